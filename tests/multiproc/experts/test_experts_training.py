"""Experts through megatron.training: what is logged, checkpoints that move between lists, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    num_ranks,
)
from tests.support.hosts import logs_one_replica, reshardable_flags, resharding_flags, saves_distributed
from tests.support.lines import warnings

pytestmark = [pytest.mark.needs("experts"), pytest.mark.needs("scripts_here")]

# Megatron's local experts fail with fused activations and with biases.
EXPERTS = ["--num-experts", "6", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear"]
EXPERTS += [
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "1e-3")
]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "96", "--sequence-parallel"]
EXPERTS += ["--moe-per-layer-logging"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
RESHARDABLE = [*DISTRIBUTED, *reshardable_flags()]
BATCH = ["--global-batch-size", "16"]  # as with two replicas
UNEQUAL = ["--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"]


# One step before the checkpoint from which runs go on, five behind it.
STEPS = ["--train-iters", "6"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,2"]
SEVERAL_COPIES = ["--vtp-ep-list", "2,1", "--vtp-etp-list", "1,1"]


def router_losses(runs: Sequence[ScriptRun], events: Path) -> dict[str, list[float]]:
    """Give the losses of the routers by their name: as they were printed, and of single layers from TensorBoard."""
    (output,) = [run.output for run in runs if "lm loss:" in run.output]
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r"(load_balancing_loss|z_loss): (\S+)", output):
        found.setdefault(name, []).append(float(value))
    assert len(found) == 2, output
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (path,) = events.iterdir()
    log = accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0})
    log.Reload()
    layers = {name: [e.value for e in log.Scalars(name)] for name in log.Tags()["scalars"] if name.startswith("moe/")}
    assert len(layers) == 8, layers  # two of each of four layers
    return found | layers


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint after one step, since all start weights depend on sizes, and the uniform run that goes on."""

    folder: Path
    runs: list[ScriptRun]
    losses: dict[str, list[float]]


def begin(scripts: Scripts, folder: Path, *extra: str) -> Start:
    """Train the uniform run, with two replicas."""
    words = [word for word in EXPERTS if word != "--sequence-parallel"]
    words += ["--expert-model-parallel-size", "2", *STEPS, *extra]
    saved, events = folder / "saved", folder / "events"
    scripts.train("1,1", [*words, "--save", str(saved), "--save-interval", "1", "--exit-interval", "1"], dp=2)
    runs = scripts.train("1,1", [*words, "--load", str(saved), "--tensorboard-dir", str(events)], dp=2)
    return Start(saved, runs, router_losses(runs, events))


@pytest.fixture(scope="module")
def start(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Begin once."""
    return begin(scripts, tmp_path_factory.mktemp("experts"), *RESHARDABLE)


def check_logs(
    scripts: Scripts, start: Start, tmp_path: Path, sizes: str, extra: Sequence[str], world_size: int
) -> None:
    """Go on from the checkpoint: training and all logged losses are those of the uniform run."""
    events = tmp_path / "events"
    words = [*EXPERTS, *RESHARDABLE, *STEPS, *BATCH, *extra, *resharding_flags(), "--load", str(start.folder)]
    command = arguments(sizes, extra=[*words, "--tensorboard-dir", str(events)])
    runs = scripts.finish(world_size, {"arguments": command})
    assert_same_training(runs, start.runs)
    found = router_losses(runs, events)
    assert found.keys() == start.losses.keys()
    has_all = world_size == 6 or not logs_one_replica()
    for name, values in found.items():
        assert len(values) == 5
        assert not has_all or values == pytest.approx(start.losses[name], rel=1e-5), name


@pytest.mark.needs("norms_of_a_u_with_experts", cases=("U",))
@pytest.mark.needs("log_of_all_replicas", cases=("1,2-dp-2",))
@pytest.mark.parametrize(
    ("sizes", "extra", "world_size"),
    [
        pytest.param("1,2", UNEQUAL, 3, id="1,2", marks=pytest.mark.full),
        pytest.param("1,2", ["--vtp-dp-list", "1,2", *UNEQUAL], 5, id="dp-1,2"),
        pytest.param("2,1", ["--vtp-dp-list", "1,2", *SEVERAL_COPIES], 4, id="2,1-dp-1,2", marks=pytest.mark.full),
        pytest.param("1,2", [*U_SHAPE, *UNEQUAL], 3, id="U-1,2", marks=pytest.mark.full),
        # As many replicas as the uniform run has: older Megatrons log one of them.
        pytest.param("1,2", SEVERAL_COPIES, 6, id="1,2-dp-2", marks=pytest.mark.full),
    ],
)
def test_logged_router_losses(
    scripts: Scripts, start: Start, tmp_path: Path, sizes: str, extra: list[str], world_size: int
) -> None:
    """In a U, and with different numbers of replicas, too."""
    check_logs(scripts, start, tmp_path, sizes, extra, world_size)


@pytest.mark.parametrize(
    ("sizes", "extra", "world_size"),
    [
        # The experts of the second stage lie on ranks of both replicas.
        pytest.param("2,1", ["--vtp-ep-list", "1,2"], 6, id="2,1"),
        pytest.param(
            *("2,1", ["--vtp-dp-list", "1,2", "--vtp-ep-list", "2,2", "--vtp-etp-list", "1,1"], 4),
            id="2,1-dp-1,2",
            marks=pytest.mark.full,
        ),
        # The same ranks hold the experts and the other weights.
        pytest.param("2,1", ["--vtp-dp-list", "1,2"], 4, id="common", marks=pytest.mark.full),
    ],
)
def test_the_norm_of_all_weights(
    scripts: Scripts, start: Start, tmp_path: Path, sizes: str, extra: list[str], world_size: int
) -> None:
    """Each expert counts once, whichever ranks hold it.

    Without an overlapped gather: Megatron looks at the weights before it, when each replica knows its own share only.
    """
    words = [*EXPERTS, *STEPS, *BATCH, "--log-params-norm", "--load", str(start.folder), "--no-load-optim"]
    words += ["--use-distributed-optimizer"] if extra[-1] == "1,2" else []
    hooks = ["note_params_norms"]
    uniform = [word for word in words if word != "--sequence-parallel"]
    wanted = scripts.train("1,1", [*uniform, "--expert-model-parallel-size", "2"], dp=2, hooks=hooks)
    command = arguments(sizes, extra=[*words, *resharding_flags(), *extra])
    runs = scripts.finish(world_size, {"arguments": command, "hooks": hooks})
    assert_same_training(runs, wanted)
    for run in runs:
        assert run.facts["params_norms"] == pytest.approx(wanted[0].facts["params_norms"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("pattern", ["([0]*2+[1]*2)", "([1]*2+[0]*2)"])
def test_a_stage_without_experts_logs(scripts: Scripts, tmp_path: Path, pattern: str) -> None:
    """The first one, or the one that logs."""
    only_some = ["--moe-layer-freq", pattern]
    start = begin(scripts, tmp_path, *RESHARDABLE, *only_some)
    assert sum(any(values) for name, values in start.losses.items() if name.startswith("moe/")) == 4
    check_logs(scripts, start, tmp_path / "unequal", "1,2", [*UNEQUAL, *only_some], 3)


@pytest.mark.parametrize(
    ("sizes", "extra", "dp", "other", "other_extra"),
    [
        pytest.param("1,2", UNEQUAL, 1, "2,1", SEVERAL_COPIES, id="1,2"),
        # Four copies of an expert on the second stage, one on the first.
        pytest.param(
            *("1,2", SEVERAL_COPIES, 2, "2,1", ["--vtp-ep-list", "1,1", "--vtp-etp-list", "1,1"]),
            id="copies",
            marks=pytest.mark.full,
        ),
    ],
)
def test_checkpoints_move_between_lists(
    scripts: Scripts,
    start: Start,
    tmp_path: Path,
    sizes: str,
    extra: list[str],
    dp: int,
    other: str,
    other_extra: list[str],
) -> None:
    """An unequal run goes on from the uniform checkpoint; another list goes on from the unequal one's."""
    words = [*EXPERTS, *STEPS, *BATCH, *resharding_flags(), *(RESHARDABLE if saves_distributed() else ())]
    if not saves_distributed():
        start = begin(scripts, tmp_path / "start")
    saving = ["--load", str(start.folder), "--save", str(tmp_path), "--save-interval", "1"]
    assert_same_training(scripts.train(sizes, [*words, *extra, *saving], dp=dp), start.runs)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    again = scripts.train(other, [*words, *other_extra, "--load", str(tmp_path)])
    assert_same_training(again, start.runs, first=1)


@pytest.mark.full
def test_checkpoints_of_one_list(scripts: Scripts, tmp_path: Path) -> None:
    """Megatron's usual format has the shards of the optimizer under the number of their group of ranks.

    Numbers of experts' copies differ between the stages, and so do those of the groups.
    """
    words = [*EXPERTS, *DISTRIBUTED, *STEPS, *SEVERAL_COPIES]
    saving = ["--save", str(tmp_path), "--save-interval", "2"]
    whole = scripts.train("1,2", [*words, *saving], dp=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    again = scripts.train("1,2", [*words, "--load", str(tmp_path)], dp=2)
    assert_same_training(again, whole, first=2)
    anew = scripts.train("1,2", [*words, "--load", str(tmp_path), "--no-load-optim"], dp=2)
    with pytest.raises(AssertionError):
        assert_same_training(anew, whole, first=2)


@pytest.mark.parametrize(
    "optimizer", [pytest.param((), id="plain"), pytest.param(RESHARDABLE, id="distributed", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(UNEQUAL, (), id="own-to-common"),
        pytest.param((), UNEQUAL, id="common-to-own", marks=pytest.mark.full),
    ],
)
def test_an_optimizer_without_experts_of_its_own_is_refused(
    scripts: Scripts, tmp_path: Path, saved: Sequence[str], loaded: Sequence[str], optimizer: Sequence[str]
) -> None:
    """Megatron gives experts an optimizer of their own in some layouts only, and one cannot load the other."""
    words = [*EXPERTS, *BATCH, "--train-iters", "2", *(optimizer if saves_distributed() else ())]
    saving = ["--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1"]
    scripts.train("1,2", [*words, *saved, *saving])
    command = arguments("1,2", extra=[*words, *loaded, "--load", str(tmp_path)])
    own, common = "--vtp-size-list 1,2 --vtp-ep-list 1,2 --vtp-etp-list 1,1", "--vtp-size-list 1,2"
    saver, loader = (own, common) if saved else (common, own)
    texts = (f"saved by {saver}, this run has {loader}",)
    assert_refused(scripts.launch(num_ranks("1,2"), {"arguments": command}), *texts, "--no-load-optim")
    scripts.train("1,2", [*words, *loaded, *resharding_flags(), "--load", str(tmp_path), "--no-load-optim"])


@pytest.mark.needs("forced_balance", cases=("forced",))
@pytest.mark.needs("biased_balance", cases=("biased",))
@pytest.mark.parametrize(
    "option",
    [
        pytest.param("--moe-input-jitter-eps 0.1", id="jitter"),
        pytest.param("--moe-expert-capacity-factor 1.0", id="capacity", marks=pytest.mark.full),
        pytest.param("--moe-router-force-load-balancing", id="forced", marks=pytest.mark.full),
        pytest.param("--moe-router-force-biased 1.0", id="biased", marks=pytest.mark.full),
    ],
)
def test_noise_of_the_routers(scripts: Scripts, start: Start, option: str) -> None:
    """What each rank decides for the tokens that it routes: a run says so, repeats itself, and repeats no other."""
    words = [*EXPERTS, *RESHARDABLE, *STEPS, *BATCH, *resharding_flags(), "--load", str(start.folder), *option.split()]
    first, second = (scripts.train("1,2", [*words, *UNEQUAL]) for _ in range(2))
    assert_same_training(first, second, tolerance=0.0)
    equal = [word for word in words if word != "--sequence-parallel"]
    uniform = scripts.train("1,1", [*equal, "--expert-model-parallel-size", "2"], dp=2)
    for other in (uniform, start.runs):
        with pytest.raises(AssertionError, match="of step"):
            assert_same_training(first, other)
    for runs, sizes in ((first, "1,2 --vtp-ep-list 1,2"), (uniform, "1,1")):
        said = [line for run in runs for line in warnings(run.output)]
        assert len(said) == 1 and said[0].startswith(f"{option} with --vtp-size-list {sizes}; ")
        assert "repeats none of other sizes" in said[0]


@pytest.mark.full
@pytest.mark.needs("biased_balance")
def test_ranks_share_the_bias_of_biased_routers(scripts: Scripts, start: Start) -> None:
    """Without the random logits beside it such a run is the uniform one. Below 0 the bias of a layer is drawn once."""
    words = [*EXPERTS, *RESHARDABLE, *STEPS, *BATCH, *resharding_flags(), "--load", str(start.folder)]
    words += ["--moe-router-force-biased", "-1.0"]
    runs = scripts.train("1,2", [*words, *UNEQUAL], hooks=["keep_logits"])
    equal = [word for word in words if word != "--sequence-parallel"]
    uniform = scripts.train("1,1", [*equal, "--expert-model-parallel-size", "2"], dp=2, hooks=["keep_logits"])
    assert_same_training(runs, uniform)
    with pytest.raises(AssertionError, match="of step"):
        assert_same_training(runs, start.runs)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--vtp-ep-list", "1,4"), ("expert sizes tp 2 * ep 4 = 8 do not divide", "of stage 1")),
        (
            ("--num-experts", "5", *UNEQUAL),
            ("--num-experts 5: stage 1 has EP 2, which does not divide it; EP sizes that divide this model: 1, 5",),
        ),
        (("--no-sequence-parallel",), ("stage 1 has tensor-parallel size 2", "add --sequence-parallel")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_experts_that_do_not_fit_are_refused(scripts: Scripts, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    extra = [*EXPERTS, *flags]
    if flags[0] == "--no-sequence-parallel":
        extra = [word for word in EXPERTS if word != "--sequence-parallel"]
    assert_refused(scripts.launch(num_ranks("1,2"), {"arguments": arguments("1,2", extra=extra)}), *words)
