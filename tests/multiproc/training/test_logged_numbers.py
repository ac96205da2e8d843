"""Every number that Megatron logs is the uniform run's, by the rules of ``tests/multiproc/cases/logged.py``.

Both runs go on from one checkpoint of the uniform run, after one step: start weights depend on the number of stages,
and on their sizes where there are experts.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.logged import LOGGED, Logged, assert_same_log, num_small, read, rule_of
from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training, num_ranks
from tests.support.hosts import host_name, reshardable_flags, resharding_flags

pytestmark = pytest.mark.needs("scripts_here")

EVALUATE = ("--eval-interval", "2", "--eval-iters", "1")
# A bias of keys changes no attention: its gradients are rounding, and many are 0 or not by the order of sums.
DENSE = (*EVALUATE, "--disable-bias-linear", "--no-bias-gelu-fusion")
UNTIED = (*DENSE, "--untie-embeddings-and-output-weights")
EXPERTS = (
    *UNTIED,
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "96"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "1e-3"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-per-layer-logging"),
)
OVERLAPPED = ("--use-distributed-optimizer", *reshardable_flags(), "--overlap-grad-reduce", "--overlap-param-gather")
PREDICTION = (*UNTIED, "--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion")
PACKED = (*DENSE, "--dataloader-inter-document-masking", "--position-embedding-type", "rope", "--no-rope-fusion")
U_SHAPE = ("--layerwise-disaggregated-training", "--num-layer-list", "1,1,2")
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
SEQUENCE = ("--sequence-parallel",)
# Four layers on three stages.
THREE = ("--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "2")


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint of a uniform run after one step, and the run that goes on from there."""

    folder: Path
    runs: list[ScriptRun]
    log: Logged


Starts = Callable[..., Start]


def go_on(
    scripts: Scripts, folder: Path, start: Path, sizes: str, extra: Sequence[str], world_size: int, **options: Any
) -> Start:
    """Train three steps behind a checkpoint, with everything logged."""
    logging = (
        *LOGGED,
        *(("--log-energy",) if host_name() != "0.12" else ()),
        "--tensorboard-dir",
        str(folder / "events"),
    )
    saving = ("--load", str(start), "--save", str(folder / "saved"), "--save-interval", "100")
    command = arguments(sizes, extra=[*extra, *logging, *saving])
    hooks = [*options.get("hooks", ()), "note_small_gradients"]
    runs = scripts.finish(world_size, {"arguments": command, "hooks": hooks})
    return Start(start, runs, read(runs, folder / "events", folder / "saved" / "progress.txt"))


@pytest.fixture(scope="module")
def starts(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Begin once for each model and number of replicas."""
    known: dict[tuple[object, ...], Start] = {}

    def begin(model: tuple[str, ...], dp: int, own: tuple[str, ...] = (), **options: Any) -> Start:
        key = model, dp, own, str(options)
        model = (*model, *own)
        if key not in known:
            folder = tmp_path_factory.mktemp("uniform")
            saving = ["--save", str(folder), "--save-interval", "1", "--exit-interval", "1"]
            batch = ("--global-batch-size", str(8 * dp))
            scripts.train("1,1", [*model, *saving], dp=dp, **options)
            known[key] = go_on(scripts, folder / "on", folder, "1,1", [*model, *batch], 2 * dp, **options)
        return known[key]

    return begin


def _case(
    model: tuple[str, ...], name: str, sizes: str, *extra: str, dp: int = 1, default: bool = False, **more: Any
) -> Any:
    """Give a case. ``world``: ranks, if not the list's; ``ours``: more hooks; ``theirs``: flags of the uniform run."""
    marks = () if default else (pytest.mark.full,)
    return pytest.param(model, sizes, extra, dp, more, id=f"{name}-{sizes}", marks=marks)


UNEQUAL = ("--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1")
TWO = ("--expert-model-parallel-size", "2")


@pytest.mark.needs("router_losses_by_context", cases=("experts-cp-list",))
@pytest.mark.needs("log_of_all_replicas", cases=("experts-own",))
@pytest.mark.needs("document_masking", cases=("packed",))
@pytest.mark.parametrize(
    ("model", "sizes", "extra", "dp", "options"),
    [
        _case(DENSE, "tied", "1,2", default=True),
        _case(DENSE, "tied-three-stages", "2,1,3", *SEQUENCE, *THREE),
        _case(DENSE, "tied-interleaved", "2,1", *INTERLEAVED),
        _case(DENSE, "tied-u", "1,2", *U_SHAPE, default=True),
        _case(DENSE, "tied-sites", "2,1", *U_SHAPE, "--vtp-sites", "edge,cloud"),
        _case(DENSE, "tied-dp-list", "1,2", "--vtp-dp-list", "1,2", dp=2, world=5),
        _case(DENSE, "tied-dp-list-u", "1,2", "--vtp-dp-list", "1,2", *U_SHAPE, dp=2, world=5),
        _case(DENSE, "split", "2,1", "--vtp-dp-list", "1,2", "--vtp-dp-mode", "split", dp=2, world=4),
        _case(DENSE, "tied-cp-list", "1,1", "--vtp-cp-list", "1,2", world=3, ours=["context_parallel"]),
        _case(UNTIED, "untied", "2,1", *SEQUENCE),
        _case(UNTIED, "untied-interleaved", "1,2", *INTERLEAVED, *SEQUENCE),
        _case(UNTIED, "untied-u", "1,2,2", "--layerwise-disaggregated-training", "--num-layer-list", "1,1,1,1"),
        _case((*UNTIED, *OVERLAPPED), "overlapped", "1,2", dp=2),
        _case((*UNTIED, "--softmax-type", "learnable"), "sinks", "1,2"),
        _case((*UNTIED, *OVERLAPPED[:-1], "--softmax-type", "learnable"), "sinks", "2,1", dp=2),
        # With --overlap-param-gather Megatron takes the norm of weights before all shards of a step have arrived.
        _case((*UNTIED, *OVERLAPPED[:-1]), "overlapped-dp-list", "1,2", "--vtp-dp-list", "2,1", dp=2, world=4),
        _case((*UNTIED, "--calculate-per-token-loss"), "per-token", "1,2", dp=2, hooks=["mask_losses"]),
        _case((*DENSE, "--iterations-to-skip", "3"), "skipped", "1,1", "--vtp-dp-list", "1,2", dp=2, world=3),
        _case((*DENSE, "--decoupled-lr", "1e-3"), "decoupled", "2,1"),
        _case(EXPERTS, "experts", "2,1", *SEQUENCE),
        _case(EXPERTS, "experts-own-dp", "1,2", *SEQUENCE, *UNEQUAL, dp=2, theirs=TWO),
        _case(EXPERTS, "experts-own-interleaved", "1,2", *SEQUENCE, *UNEQUAL, *INTERLEAVED, dp=2, world=3, theirs=TWO),
        _case(EXPERTS, "experts-own-u", "1,2", *SEQUENCE, *UNEQUAL, *U_SHAPE, dp=2, world=3, theirs=TWO),
        _case(EXPERTS, "experts-cp-list", "1,1", "--vtp-cp-list", "1,2", world=3, ours=["context_parallel"]),
        _case(PREDICTION, "prediction", "1,2"),
        _case(PREDICTION, "prediction-u", "1,2", *U_SHAPE),
        _case((*PACKED, "--micro-batch-size", "1"), "packed", "1,2", hooks=["packed_samples"]),
    ],
)
def test_numbers_are_those_of_the_uniform_run(
    scripts: Scripts,
    starts: Starts,
    tmp_path: Path,
    model: tuple[str, ...],
    sizes: str,
    extra: tuple[str, ...],
    dp: int,
    options: dict[str, Any],
) -> None:
    hooks = options.get("hooks", [])
    start = starts(model, dp, options.get("theirs", ()), hooks=hooks)
    extra = (*model, "--global-batch-size", str(8 * dp), *resharding_flags(), *extra)
    world_size = options.get("world", num_ranks(sizes, dp))
    run = go_on(scripts, tmp_path, start.folder, sizes, extra, world_size, hooks=[*hooks, *options.get("ours", [])])
    assert_same_training(run.runs, start.runs)
    assert_same_log(run.log, start.log)
    assert max(run.log.num_small, start.log.num_small) < 200, "a count of zeros shows nothing"


@pytest.mark.full
def test_timers_of_a_planned_order_wait_for_no_receive(scripts: Scripts) -> None:
    """A wait for the device is one for receives that were posted early, whose senders may wait for this rank."""
    timed = ["--timing-log-level", "2"]
    command = arguments("1,1", dp=2, extra=[*timed, "--vtp-dp-list", "1,2"])
    planned = scripts.finish(3, {"arguments": command, "hooks": ["note_device_waits"]})
    stock = scripts.train("1,2", timed, hooks=["note_device_waits"])
    inside = {"forward-compute", "backward-compute"}
    assert all(run.facts["waits"] >= inside for run in stock), [run.facts for run in stock]
    assert not any(run.facts["waits"] & inside for run in planned), [run.facts for run in planned]
    assert all("optimizer" in run.facts["waits"] for run in planned)
    assert "forward-compute ..." in planned[-1].output


@pytest.mark.full
@pytest.mark.parametrize("precision", [(), ("--fp16", "--initial-loss-scale", "1024")], ids=["fp32", "fp16"])
def test_zeros_of_biases(scripts: Scripts, precision: tuple[str, ...]) -> None:
    """With biases or in half precision more are 0 by chance: those whose gradient is 0 within rounding."""
    extra = [*precision, "--log-num-zeros-in-grad"]
    counts: dict[str, list[float]] = {}
    small = 0
    for sizes in ("1,2", "2,1", "2,2", "1,1"):
        runs = scripts.train(sizes, extra, hooks=["note_small_gradients"])
        counts[sizes] = [step.num_zeros for step in runs[0].steps if step.num_zeros is not None]
        small = max(small, num_small(runs))
    assert len(counts["1,1"]) == 4
    apart = [max(step) - min(step) for step in zip(*counts.values(), strict=True)]
    assert max(apart) <= small, (counts, small)
    # Also between uniform runs: no list of sizes does this.
    assert counts["2,2"] != counts["1,1"], counts


# What Megatron calls its scalars, where the name is no constant.
COMPUTED = {
    "key": "lm loss",
    "key + ' vs samples'": "lm loss",
    "'{} validation'.format(key)": "lm loss validation",
    "'{} validation{}'.format(key, suffix)": "lm loss validation",
    "'{} validation ppl'.format(key)": "lm loss validation ppl",
    "'{} validation{} ppl'.format(key, suffix)": "lm loss validation ppl",
    "'{} validation vs samples'.format(key)": "lm loss validation",
    "'{} validation{} vs samples'.format(key, suffix)": "lm loss validation",
    "'{} validation ppl vs samples'.format(key)": "lm loss validation ppl",
    "'{} validation{} ppl vs samples'.format(key, suffix)": "lm loss validation ppl",
    "name + '-time'": "optimizer-time",
    "f'moe/{name}_layer_{i}'": "moe/z_loss_layer_0",
    "loss_name": "mtp_1 loss",
    "step_acc_name": "mtp_1_acceptance_rate",
    "cum_acc_name": "mtp_1_acceptance_rate",
}
# The function in which "name" is the name of a router's loss or of a prediction's.
NAMED = {"moe_logging": "z_loss", "moe_utils": "z_loss", "multi_token_prediction": "mtp_1 loss"}
# What is not compared, and why.
NOT_COMPARED = {
    "max_attention_logit": "--log-max-attention-logit needs Transformer Engine on a GPU",
    "indexer loss": "--dsa-indexer-loss-coeff is refused with unequal stages",
    "avg-logprobs-kept": "--logits-save-dir is refused with unequal stages",
    "grpo_collection_iteration": "of reinforcement learning, which --perform-rl-step refuses",
    "metric_name": "of packed sequences in reinforcement learning",
}


def _scalars_of_megatron() -> Iterator[tuple[str, str]]:
    """Yield every name that Megatron gives to TensorBoard, as it is written, and the module."""
    core = importlib.util.find_spec("megatron.core")
    assert core is not None and core.origin is not None
    root = Path(core.origin).parent.parent
    for path in sorted(path for part in ("core", "training") for path in (root / part).rglob("*.py")):
        text = path.read_text()
        if "add_scalar(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_scalar":
                yield ast.unparse(node.args[0]), path.stem


def test_every_scalar_of_megatron_has_a_rule() -> None:
    found = list(_scalars_of_megatron())
    assert len(found) > 30, found
    for written, module in found:
        computed = COMPUTED.get(written) or (NAMED[module] if written == "name" else written.strip("'"))
        if computed not in NOT_COMPARED:
            rule_of(computed.removesuffix(" vs samples"))
