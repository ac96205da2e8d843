"""The plugin's adapters (LoRA): every list, and the U, trains them as one process does, from one base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.lora_cases import (
    EXPERTS,
    LATENT,
    LATENT_KEYS,
    LLAMA_LIKE,
    LORA,
    NUM_FACTORS,
    assert_same_factors,
)
from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    num_ranks,
)
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.plan.model.lora import is_adapter

pytestmark = pytest.mark.needs("scripts_here")
SGD = ["--optimizer", "sgd", "--lr", "1e-1", "--min-lr", "1e-1"]
# Where a gradient is almost zero, Adam divides rounding by rounding.
SMOOTH = ["--adam-eps", "1e-3"]
DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAPPED = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]
SEQUENCE = ["--sequence-parallel"]
PLANNED = ["--vtp-schedule", "planned"]
INTERLEAVED = ["--num-virtual-stages-per-pipeline-rank", "2"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list"]
LAYERS = ["--vtp-lora-layers"]
PACKED = ["--dataloader-inter-document-masking", "--micro-batch-size", "1"]
CP_2 = ["--context-parallel-size", "2"]
HOOKS = ["random_adapters", "note_lora"]
FULL = pytest.mark.full
Reference = Callable[..., list[ScriptRun]]


@pytest.fixture(scope="module")
def base(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without adapters, which every run here starts from."""
    folder = tmp_path_factory.mktemp("base")
    scripts.train("1", [*LLAMA_LIKE, "--train-iters", "1", "--save", str(folder), "--save-interval", "1"])
    return folder


@pytest.fixture(scope="module")
def reference(scripts: Scripts, base: Path) -> Reference:
    """Runs of one process with adapters; each is made once."""
    known: dict[tuple[object, ...], list[ScriptRun]] = {}

    def find(extra: Sequence[str] = (), *, dp: int = 1, hooks: Sequence[str] = HOOKS) -> list[ScriptRun]:
        key = (tuple(extra), dp, *hooks)
        if key not in known:
            known[key] = train(scripts, "1", base, [*extra, "--global-batch-size", str(8 * dp)], hooks=hooks)
        return known[key]

    return find


def train(
    scripts: Scripts, sizes: str, base: Path, extra: Sequence[str], *, dp: int = 1, hooks: Sequence[str] = HOOKS
) -> list[ScriptRun]:
    """Train adapters of a base on a list."""
    words = [*LLAMA_LIKE, *LORA, "--pretrained-checkpoint", str(base), *extra]
    return scripts.train(sizes, words, dp=dp, hooks=list(hooks))


def _case(
    name: str, sizes: str, extra: Sequence[str] = (), *, dp: int = 1, same: Sequence[str] = (), full: bool = True
) -> Any:
    """Give a case: flags of the run alone, and flags that its reference has, too."""
    marks = [pytest.mark.full] if full else []
    return pytest.param(sizes, list(extra), dp, list(same), id=f"{name}-{sizes}-dp{dp}", marks=marks)


@pytest.mark.parametrize(
    ("sizes", "extra", "dp", "same"),
    [
        _case("sgd", "1,2", same=SGD, full=False),
        _case("u-sequence", "1,2", [*U_SHAPE, "1,1,2", *SEQUENCE], full=False),
        _case("uniform", "1,1", [*RECOMPUTE]),
        _case("sgd-sequence", "1,2", SEQUENCE, same=SGD),
        _case("plain", "2,1,3", ["--num-layers", "4", "--decoder-first-pipeline-num-layers", "2"], same=SGD),
        _case("sequence", "2,1,3", [*SEQUENCE, "--decoder-first-pipeline-num-layers", "2", *PLANNED]),
        _case("u", "2,1,3", [*U_SHAPE, "1,1,1,1", *DISTRIBUTED], same=SGD[:0]),
        _case("u-recompute-split", "1,2", [*U_SHAPE, "1,1,2", *RECOMPUTE, "--vtp-split-backward"]),
        _case("overlapped-sequence", "2,1", [*OVERLAPPED, *SEQUENCE], dp=2, same=SMOOTH),
        _case("distributed-recompute", "1,2", [*DISTRIBUTED, *RECOMPUTE], dp=2, same=[]),
        _case("interleaved", "1,2", [*INTERLEAVED]),
        _case("planned-interleaved-sequence", "2,1", [*INTERLEAVED, *PLANNED, *SEQUENCE]),
        _case("split", "1,2", [*PLANNED, "--vtp-split-backward", *SEQUENCE]),
        _case("part", "1,2", same=["--vtp-lora-targets", "q_proj", "v_proj", *LAYERS, "1:4"]),
        _case("u-edge", "1,2", [*U_SHAPE, "1,1,2", "--vtp-lora-layers", "edge"], same=["--vtp-lora-layers", "0:1,2:4"]),
        _case(
            "u-cloud", "2,1,3", [*U_SHAPE, "1,1,1,1", "--vtp-lora-layers", "cloud"], same=["--vtp-lora-layers", "1:3"]
        ),
        _case("u-last", "2,1,3", [*U_SHAPE, "1,1,1,1"], same=[*LAYERS, "3:4"]),
        _case("u-split-cloud", "1,2", [*U_SHAPE, "1,1,2", "--vtp-split-backward"], same=[*LAYERS, "1:3"]),
        _case("planned-last", "2,1", PLANNED, same=[*LAYERS, "2:4"], full=False),
        _case("planned-interleaved-last", "2,1", [*INTERLEAVED, *PLANNED, *RECOMPUTE], same=[*LAYERS, "2:4"]),
        _case("per-token", "1,2", same=["--calculate-per-token-loss"]),
        _case("selective", "2,1", ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]),
    ],
)
def test_adapters_train_as_in_one_process(
    scripts: Scripts, base: Path, reference: Reference, sizes: str, extra: list[str], dp: int, same: list[str]
) -> None:
    """Losses and norms to 1e-5, factors with SGD too; copies and the base to the bit, and every factor moves."""
    wanted = reference(same, dp=dp)
    runs = train(scripts, sizes, base, [*same, *extra], dp=dp)
    assert_same_training(runs, wanted)
    atol = 1e-5 if "sgd" in same else 2e-4
    number = NUM_FACTORS
    if LAYERS[0] in same:  # of the four layers with seven matrices each
        ranges = [map(int, word.split(":")) for word in same[same.index(LAYERS[0]) + 1].split(",")]
        number = sum(end - first for first, end in ranges) * (2 if "--vtp-lora-targets" in same else 7) * 2
    assert_same_factors(runs, wanted, number=number, atol=atol)


@pytest.mark.needs("latent_attention")
@pytest.mark.parametrize(
    ("model", "sizes", "extra", "num_matrices"),
    [
        pytest.param(LATENT, "1,2", [], 8, id="1,2"),
        pytest.param(LATENT, "2,1", [*SEQUENCE, *RECOMPUTE], 8, id="2,1-sequence-recompute", marks=FULL),
        pytest.param(LATENT_KEYS, "1,2", [*U_SHAPE, "1,1,2", *SEQUENCE], 7, id="u-without-query-rank", marks=FULL),
        pytest.param(LATENT, "1,2", [*PLANNED, "--vtp-split-backward"], 8, id="1,2-split", marks=FULL),
    ],
)
def test_latent_attention(
    scripts: Scripts, tmp_path: Path, model: list[str], sizes: str, extra: list[str], num_matrices: int
) -> None:
    """Its published matrices are others, and each has a pair of its own."""
    scripts.train(
        "1", [*model, "--train-iters", "1", "--save", str(tmp_path), "--save-interval", "1"], hooks=["latent_attention"]
    )
    words, hooks = [*model, *LORA, *SGD, "--pretrained-checkpoint", str(tmp_path)], [*HOOKS, "latent_attention"]
    wanted = scripts.train("1", words, hooks=hooks)
    runs = scripts.train(sizes, [*words, *extra], hooks=hooks)
    assert_same_training(runs, wanted)
    assert_same_factors(runs, wanted, number=4 * num_matrices * 2)


@pytest.mark.full
@pytest.mark.needs("latent_attention")
def test_adapters_of_latent_attention_move(scripts: Scripts, tmp_path: Path) -> None:
    base, own = str(tmp_path / "base"), str(tmp_path / "own")
    hooks = ["latent_attention"]
    scripts.train("1", [*LATENT, "--train-iters", "1", "--save", base, "--save-interval", "1"], hooks=hooks)
    words = [*LATENT, *LORA, *DISTRIBUTED, "--pretrained-checkpoint", base]
    first = scripts.train("1,2", [*words, "--save", own, "--save-interval", "2"], hooks=[*HOOKS, *hooks])
    (tmp_path / "own/latest_checkpointed_iteration.txt").write_text("2")
    runs = scripts.train("2,1", [*words, *SEQUENCE, "--load", own], hooks=[*HOOKS, *hooks])
    assert_same_training(runs, first, first=2)


EP_1_2 = [*SEQUENCE, "--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"]
EP_2_ETP_2 = [*SEQUENCE, "--vtp-ep-list", "1,2", "--vtp-etp-list", "1,2"]
# The first stage has no experts, and so nothing to train.
LAST_EXPERTS = ["--moe-layer-freq", "([0]*2+[1]*2)", "--vtp-lora-targets", "experts.down_proj"]
ETP_1_2 = [*SEQUENCE, "--vtp-ep-list", "1,1", "--vtp-etp-list", "1,2"]


@pytest.mark.parametrize(
    ("sizes", "extra", "dp", "same"),
    [
        pytest.param("1,2", EP_1_2, 1, [], id="ep-1,2"),
        pytest.param("1,2", ETP_1_2, 1, [], id="etp-1,2", marks=FULL),
        pytest.param("1,2", EP_2_ETP_2, 2, [], id="ep-etp-2-dp2", marks=FULL),
        pytest.param(
            "2,1",
            [*SEQUENCE, "--vtp-ep-list", "2,1", "--vtp-etp-list", "1,1", *RECOMPUTE],
            1,
            [],
            id="ep-2,1",
            marks=FULL,
        ),
        pytest.param("1,2", EP_1_2, 2, [], id="ep-1,2-dp2", marks=FULL),
        pytest.param("1,2", [*EP_1_2, *U_SHAPE, "1,1,2"], 1, [], id="u-ep-1,2", marks=FULL),
        pytest.param("1,2", [*EP_1_2, *PLANNED, "--vtp-split-backward"], 1, [], id="split", marks=FULL),
        pytest.param("1,2", EP_1_2, 1, ["--moe-layer-freq", "2"], id="every-second", marks=FULL),
        pytest.param("1,2", ETP_1_2, 1, ["--vtp-lora-targets", "experts.down_proj"], id="down", marks=FULL),
        pytest.param("1,2", EP_1_2, 1, LAST_EXPERTS, id="dense-first", marks=FULL),
        pytest.param("1,2", [*EP_1_2, *PLANNED], 1, LAST_EXPERTS, id="planned-dense-first", marks=FULL),
    ],
)
def test_experts(scripts: Scripts, tmp_path: Path, sizes: str, extra: list[str], dp: int, same: list[str]) -> None:
    """A pair for each expert; gate and up share one A."""
    scripts.train(
        "1",
        [
            *EXPERTS,
            *(same[:2] if "--moe-layer-freq" in same else []),
            "--train-iters",
            "1",
            "--save",
            str(tmp_path),
            "--save-interval",
            "1",
        ],
    )
    words = [*EXPERTS, *LORA, *SGD, *same, "--pretrained-checkpoint", str(tmp_path)]
    wanted = scripts.train("1", [*words, "--global-batch-size", str(8 * dp)], hooks=HOOKS)
    runs = scripts.train(sizes, [*words, *extra], dp=dp, hooks=HOOKS)
    assert_same_training(runs, wanted)
    of_attention, of_expert = 4 * 2, 3 + 2
    number = 4 * (of_attention + 6 * of_expert)
    if "--moe-layer-freq" in same:
        number = 4 * of_attention + 2 * 6 * of_expert + 2 * 3 * 2
    if "--vtp-lora-targets" in same:
        number = (2 if "--moe-layer-freq" in same else 4) * 6 * 2
    assert_same_factors(runs, wanted, number=number)


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        ("1,2", [*SEQUENCE, *RECOMPUTE]),
        pytest.param("2,1", [], marks=FULL),
        pytest.param("3,2", [*PLANNED, "--vtp-split-backward"], marks=FULL),
        pytest.param("1,2", [*U_SHAPE, "1,1,2", *SEQUENCE], marks=FULL),
    ],
)
def test_dropout_is_drawn_for_whole_tensors(
    scripts: Scripts, base: Path, reference: Reference, sizes: str, extra: list[str]
) -> None:
    """Stages of every size leave out the same inputs, sharded sequences and recomputed layers included."""
    words = [*SGD, "--vtp-lora-dropout", "0.3"]
    shape = extra[: 3 * ("--num-layer-list" in extra)]
    wanted = train(scripts, "1,1", base, [*words, *shape])
    runs = train(scripts, sizes, base, [*words, *extra])
    assert_same_training(runs, wanted)
    assert_same_factors(runs, wanted)
    with pytest.raises(AssertionError):
        assert_same_training(runs, reference(SGD), tolerance=1e-3)


@pytest.mark.parametrize(("layers", "num_back"), [("2:4", 0), pytest.param("0:4", 1, marks=FULL)])
def test_no_gradient_crosses_before_the_first_adapter(
    scripts: Scripts, base: Path, reference: Reference, layers: str, num_back: int
) -> None:
    """Between sites, by the bytes that the edge counts: adapters of its last layers alone need nothing back."""
    shape = [*U_SHAPE, "1,1,2", "--vtp-sites", "edge,cloud", "--vtp-edge-seed", "shared", "--vtp-timing"]
    words = [*LAYERS, layers]
    runs = train(scripts, "1,2", base, [*shape, *words])
    assert_same_training(runs, reference(words))
    # Of each of 4 microbatches an activation [12, 2, 64] in fp32 crosses each way, and else a gradient each way, too.
    num_bytes = 4 * (1 + num_back) * 12 * 2 * 64 * 4
    assert f"edge: sent {num_bytes:,} bytes, received {num_bytes:,} bytes" in runs[0].output


@pytest.mark.parametrize(
    ("sizes", "extra", "num_ranks", "same", "hooks"),
    [
        pytest.param("1,2", [*U_SHAPE, "1,1,2", "--vtp-dp-list", "1,2"], 5, [], [], id="u-dp-1,2"),
        pytest.param("2,1", ["--vtp-dp-list", "1,2", *SEQUENCE], 4, [], [], id="2,1-dp-1,2", marks=FULL),
        pytest.param("1,2", ["--vtp-dp-list", "2,1", *PLANNED], 4, [], [], id="1,2-dp-2,1", marks=FULL),
        pytest.param("1,2", ["--vtp-cp-list", "2,1"], 4, [], ["context_parallel"], id="1,2-cp-2,1"),
        pytest.param("2,1", [*CP_2, *SEQUENCE], 6, [], ["context_parallel"], id="2,1-cp-2", marks=FULL),
        pytest.param("1,2", [*PACKED, *SEQUENCE], 3, PACKED, ["packed_samples"], id="1,2-packed"),
        pytest.param("1,2", [*U_SHAPE, "1,1,2"], 3, PACKED, ["packed_samples"], id="u-packed", marks=FULL),
    ],
)
def test_adapters_on_parts_of_a_batch(
    scripts: Scripts,
    base: Path,
    reference: Reference,
    sizes: str,
    extra: list[str],
    num_ranks: int,
    same: list[str],
    hooks: list[str],
) -> None:
    """Other numbers of replicas by stage, sequences in parts, and several samples in a row."""
    same = [*same, *SGD]
    wanted = reference(same, dp=2, hooks=[*HOOKS, *hooks])
    words = [*LLAMA_LIKE, *LORA, "--pretrained-checkpoint", str(base), *same, *extra]
    command = {"arguments": arguments(sizes, dp=2, extra=words), "hooks": [*HOOKS, *hooks]}
    runs = scripts.finish(num_ranks, command)
    assert_same_training(runs, wanted)
    assert_same_factors(runs, wanted)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "sizes", "extra"),
    [
        ("unsummed_factor", "1,2", SEQUENCE),
        ("factors_of_shards", "1,2", []),
        ("no_gradient_of_inputs", "1,2", RECOMPUTE),
        ("changed_base", "1,2", []),
    ],
)
def test_a_fault_is_seen(
    scripts: Scripts, base: Path, reference: Reference, fault: str, sizes: str, extra: list[str]
) -> None:
    """The public faults, planted one by one."""
    wanted = reference(SGD)
    with pytest.raises(AssertionError):
        runs = train(scripts, sizes, base, [*extra, *SGD], hooks=[*HOOKS, fault])
        assert_same_training(runs, wanted, tolerance=1e-3)
        assert_same_factors(runs, wanted, atol=1e-3)


@pytest.mark.full
def test_a_fault_of_experts_is_seen(scripts: Scripts, tmp_path: Path) -> None:
    scripts.train("1", [*EXPERTS, "--train-iters", "1", "--save", str(tmp_path), "--save-interval", "1"])
    words = [*EXPERTS, *LORA, *SGD, "--pretrained-checkpoint", str(tmp_path)]
    wanted = scripts.train("1", words, hooks=HOOKS)
    runs = scripts.train("1,2", [*words, *ETP_1_2], hooks=[*HOOKS, "unsummed_expert"])
    with pytest.raises(AssertionError):
        assert_same_training(runs, wanted, tolerance=1e-3)
        assert_same_factors(runs, wanted, number=4 * (4 * 2 + 6 * 5), atol=1e-3)


def _keys(folder: Path) -> set[str]:
    return {*Contents(folder).index.tensors}


@pytest.mark.parametrize(
    ("first", "second", "extra"),
    [
        ("1,2", "3,1", DISTRIBUTED),
        pytest.param("1,2", "3,1", [*DISTRIBUTED, "--vtp-lora-save-base"], marks=pytest.mark.full),
        pytest.param("2,1", "1,2", ["--vtp-lora-targets", "q_proj", "v_proj"], marks=pytest.mark.full),
    ],
)
def test_adapters_move(
    scripts: Scripts, base: Path, reference: Reference, tmp_path: Path, first: str, second: str, extra: list[str]
) -> None:
    """From a list to another and then into a U, with the optimizer; they alone are saved, unless asked otherwise."""
    own = [word for word in extra if word not in DISTRIBUTED]
    wanted = reference([word for word in own if word != "--vtp-lora-save-base"])
    saving = ["--save", str(tmp_path), "--save-interval", "1"]
    train(scripts, first, base, [*extra, *saving])
    stored = _keys(tmp_path / "iter_0000002")
    assert any(map(is_adapter, stored))
    of_base = {key for key in stored if not is_adapter(key) and not key.startswith(("optimizer", "chained"))}
    assert bool(of_base) == ("--vtp-lora-save-base" in extra), of_base
    for number, sizes, more in ((1, second, []), (2, "1,2", [*U_SHAPE, "1,1,2"])):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(number))
        runs = train(scripts, sizes, base, [*extra, *more, "--load", str(tmp_path)], hooks=["note_lora"])
        assert_same_training(runs, wanted, first=number)


@pytest.mark.full
def test_a_checkpoint_that_does_not_fit_the_adapters_of_a_run(scripts: Scripts, base: Path, tmp_path: Path) -> None:
    """One line on every rank: a run without adapters, other ones, and adapters without their base."""
    train(scripts, "1,2", base, ["--save", str(tmp_path), "--save-interval", "2"])
    load, below = ["--load", str(tmp_path)], ["--pretrained-checkpoint", str(base)]
    others = ["--vtp-lora-rank", "4", "--vtp-lora-targets", "q_proj"]
    for words, said in (
        ([*load, *below], "holds adapters of rank 5; this run has none"),
        ([*others, *load, *below], "has adapters with --vtp-lora-rank 5, this run 4"),
        ([*LORA, *load], "holds adapters alone; without their base"),
    ):
        kwargs = {"arguments": arguments("1,2", extra=[*LLAMA_LIKE, *words])}
        assert_refused(scripts.launch(num_ranks("1,2"), kwargs), said)
