"""The distributed optimizer, stored as Megatron stores it by default, goes on in any other layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.optimizer_state import assert_same_state
from tests.multiproc.cases.saved_runs import SavedRuns, resume
from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    error_line,
    num_ranks,
)
from tests.support.hosts import reshardable_flags, resharding_flags
from vtp_plugin.checkpoint.format.index import MANIFEST, dump_manifest, make_manifest, read_index
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK
from vtp_plugin.util.text import own_command

pytestmark = [pytest.mark.needs("scripts_here")]
DISTRIBUTED = ["--use-distributed-optimizer"]
MAP = "vtp_optimizer_map.json"
Writer = Callable[..., tuple[Path, list[ScriptRun]]]


@pytest.fixture(scope="module")
def written(saved_runs: SavedRuns) -> Writer:
    """Runs of four steps that save after the second one; each is made once."""
    return lambda sizes, extra=(), **options: saved_runs(sizes, [*DISTRIBUTED, *extra], **options)


SIX_LAYERS = ("--num-layers", "6")
TIED_APART = ["--untie-embeddings-and-output-weights"]
GATED = ["--swiglu", "--group-query-attention", "--num-query-groups", "6"]
INTERLEAVED = ["--num-virtual-stages-per-pipeline-rank", "2"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,1,1"]
LATENT = "--multi-latent-attention --q-lora-rank 36 --kv-lora-rank 20 --qk-head-dim 6 --qk-pos-emb-head-dim 4"
LATENT += " --v-head-dim 8 --position-embedding-type rope --no-rope-fusion"
EXPERTS = ["--num-experts", "6", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear"]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "128", "--sequence-parallel"]
LATENT_EXPERTS = (*LATENT.split(), *EXPERTS, "--decoder-first-pipeline-num-layers", "1")
EXPERTS_1_2 = ["--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"]
EXPERTS_2_1 = ["--vtp-ep-list", "2,1", "--vtp-etp-list", "1,1"]


@dataclass(frozen=True, kw_only=True)
class MovedOptimizer:
    """From which layout the optimizer goes on in which.

    Attributes:
        source: list of the writer.
        source_dp: its number of replicas.
        wrote: flags of its layout.
        target: list of the reader.
        dp: its number of replicas.
        reads: flags of its layout.
        model: flags of both.
        hooks: of both runs.
    """

    source: str
    target: str
    source_dp: int = 1
    dp: int = 1
    wrote: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()


def _case(name: str, *, is_full: bool = True, **values: Any) -> Any:
    return pytest.param(MovedOptimizer(**values), id=name, marks=[pytest.mark.full] if is_full else [])


@pytest.mark.needs("latent_attention", cases=("1,2-to-2,1-latent",))
@pytest.mark.parametrize(
    "case",
    [
        _case("1,2-to-2,1", source="1,2", source_dp=2, target="2,1", is_full=False),
        _case("1,2-to-1", source="1,2", source_dp=2, target="1"),
        _case("1,2-to-2,2", source="1,2", source_dp=2, target="2,2"),
        _case("2,2-to-1,2", source="2,2", target="1,2", dp=2),
        _case("3,1,2-to-1,2", source="3,1,2", target="1,2", dp=2, model=SIX_LAYERS, is_full=False),
        _case("1,2-to-3,1,2-untied", source="1,2", source_dp=2, target="3,1,2", model=(*SIX_LAYERS, *TIED_APART)),
        _case("1,2-to-2,1-gated", source="1,2", source_dp=2, target="2,1", model=(*GATED, *TIED_APART), is_full=False),
        _case("1,2-to-2,1-bf16", source="1,2", source_dp=2, target="2,1", model=("--bf16",)),
        _case("1,2-to-2,1-interleaved", source="1,2", source_dp=2, target="2,1", reads=(*INTERLEAVED,)),
        _case("interleaved-1,2-to-2,1", source="1,2", source_dp=2, target="2,1", wrote=(*INTERLEAVED,)),
        _case("1,2-to-u-1,2,2", source="1,2", source_dp=2, target="1,2,2", reads=(*U_SHAPE,)),
        _case("u-1,2,2-to-2,1", source="1,2,2", target="2,1", wrote=(*U_SHAPE,), is_full=False),
        _case(
            "1,2-to-2,1-experts",
            source="1,2",
            source_dp=2,
            target="2,1",
            model=(*EXPERTS,),
            wrote=(*EXPERTS_1_2,),
            reads=(*EXPERTS_2_1,),
            is_full=False,
        ),
        _case(
            "1,2-to-2,1-latent",
            source="1,2",
            source_dp=2,
            target="2,1",
            model=tuple(LATENT.split()),
            hooks=("latent_attention",),
        ),
        _case(
            "1,2-to-2,1-latent-experts",
            source="1,2",
            source_dp=2,
            target="2,1",
            model=LATENT_EXPERTS,
            wrote=(*EXPERTS_1_2,),
            reads=(*EXPERTS_2_1,),
            hooks=("latent_attention",),
        ),
        # The bucket of the tied embedding is padded, and others follow it.
        _case(
            "1,2-to-2,1-latent-experts-reshardable",
            source="1,2",
            source_dp=2,
            target="2,1",
            model=LATENT_EXPERTS,
            wrote=(*EXPERTS_1_2, *reshardable_flags()),
            reads=(*EXPERTS_2_1, *reshardable_flags()),
            hooks=("latent_attention",),
        ),
        _case("1,2-to-2,1-sinks", source="1,2", source_dp=2, target="2,1", model=("--softmax-type", "learnable")),
        _case("1,2-to-2,1-frozen", source="1,2", source_dp=2, target="2,1", hooks=("freeze_weights",)),
        _case("1,2-to-1,2-other-dp", source="1,2", source_dp=2, target="1,2"),
        # On Megatron 0.12 this would be a form that only the same list can load.
        _case("1,2-to-2,1-serial", source="1,2", source_dp=2, target="2,1", wrote=("--no-ckpt-fully-parallel-save",)),
        _case(
            "1,2-to-1,2-experts",
            source="1,2",
            target="1,2",
            model=(*EXPERTS,),
            wrote=(*EXPERTS_1_2,),
            reads=(*EXPERTS_1_2,),
        ),
    ],
)
def test_the_optimizer_goes_on_in_another_layout(scripts: Scripts, written: Writer, case: MovedOptimizer) -> None:
    """Masters, moments and steps are those of the writer bit by bit, and the next steps are those that it took."""
    folder, whole = written(case.source, [*case.model, *case.wrote], dp=case.source_dp, hooks=case.hooks)
    flags = [*DISTRIBUTED, *case.model, *case.reads]
    runs = resume(scripts, folder, case.target, flags, dp=case.dp, hooks=case.hooks)
    assert_same_state(runs, whole)
    tolerance = 2e-2 if "--bf16" in case.model else 1e-5
    assert_same_training(runs, whole, first=2, tolerance=tolerance)


def _other_numel(text: str) -> str:
    """Make the first bucket of a map longer by one."""
    read = json.loads(text)
    read["buckets"][0][1] += 1
    return json.dumps(read)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda _: "{", "is damaged; it says where the optimizer lies; copy it again", id="damaged"),
        pytest.param(
            lambda _: '{"version": 2}', "is a map of version 2, and this vtp_plugin reads version 1", id="newer"
        ),
        pytest.param(_other_numel, "the map does not belong to this checkpoint", id="unfit"),
        pytest.param(lambda _: None, "is missing, and where the optimizer's parameters lie cannot be", id="missing"),
    ],
)
def test_a_map_that_is_not_of_the_checkpoint_is_refused(
    scripts: Scripts, written: Writer, tmp_path: Path, spoil: Callable[[str], str | None], words: str
) -> None:
    folder = shutil.copytree(written("1,2", dp=2)[0], tmp_path / "copy")
    file = folder / "iter_0000002" / MAP
    spoiled = spoil(file.read_text())
    file.unlink() if spoiled is None else file.write_text(spoiled)
    # As if it had been saved so: a file that has changed since is refused before it is read.
    (file.parent / MANIFEST).write_text(dump_manifest(make_manifest(file.parent)))
    _assert_refused(scripts, folder, [], str(file), words)


def test_a_flipped_bit_of_the_optimizer_is_refused_by_name(scripts: Scripts, written: Writer, tmp_path: Path) -> None:
    """Megatron reads the weights, and in another list the plugin the optimizer: both compare hashes."""
    folder = Path(shutil.copytree(written("1,2", dp=2)[0], tmp_path / "copy"))
    checkpoint = folder / "iter_0000002"
    tensors = (tensor for key, tensor in read_index(checkpoint).tensors.items() if key.endswith(".exp_avg"))
    piece = max((extent for tensor in tensors for _, extent in tensor.extents), key=lambda extent: extent.length or 0)
    data = bytearray((checkpoint / piece.file).read_bytes())
    data[piece.offset + (piece.length or 0) // 2] ^= 1
    (checkpoint / piece.file).write_bytes(data)
    loading = [*DISTRIBUTED, *resharding_flags(), "--load", str(folder), "--global-batch-size", "16"]
    command = arguments("2,1", extra=loading)
    refused = scripts.launch(num_ranks("2,1"), {"arguments": command})
    # A rank that reads the piece ends by itself, before the others have come to the end of their own.
    assert all(run.exit_code not in (0, None) and not run.steps for run in refused)
    damage = f"{checkpoint / piece.file} is damaged between bytes {piece.offset} and"
    assert all(damage in (error_line(run.output) or "") for run in refused), [run.output[-3000:] for run in refused]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        pytest.param(["--ffn-hidden-size", "384"], ["the optimizer's ", "and this run's has"], id="shape"),
        pytest.param(["--make-vocab-size-divisible-by", "32"], ["loads with the same number only"], id="vocabulary"),
    ],
)
def test_another_model_is_refused(scripts: Scripts, written: Writer, extra: list[str], words: list[str]) -> None:
    folder, _ = written("1,2", dp=2)
    way_out = f"--from {folder}/iter_0000002 --to DIR" if "same number" in words[0] else "start with its options"
    _assert_refused(scripts, folder, extra, str(folder), *words, way_out)


def test_another_number_of_layers_is_refused_before_any_state_is_read(scripts: Scripts, written: Writer) -> None:
    folder, _ = written("1,2", dp=2)
    words = f"{folder} is of another model (--num-layers 4, here 6)", "give the flags that it was saved with"
    _assert_refused(scripts, folder, ["--num-layers", "6"], *words)


@pytest.mark.full
@pytest.mark.needs("forgotten_blocks")
@pytest.mark.parametrize("sizes", ["1,2", "2,1"])
def test_blocks_of_older_megatrons_are_refused_by_name(scripts: Scripts, tmp_path: Path, sizes: str) -> None:
    """As Megatron 0.14 says what it has saved; also where the list is the same."""
    saving = ["--dist-ckpt-optim-fully-reshardable", "--save", str(tmp_path), "--save-interval", "2"]
    scripts.train("1,2", [*DISTRIBUTED, *saving, "--train-iters", "2"], hooks=["claim_blocks"])
    command = arguments(sizes, extra=[*DISTRIBUTED, "--load", str(tmp_path)])
    way_out = f"{own_command()} checkpoint reshard --form fully_reshardable --from {tmp_path}"
    words = f"holds the distributed optimizer as {BY_BLOCK}, which this Megatron no longer reads", way_out
    assert_refused(scripts.launch(num_ranks(sizes), {"arguments": command}), *words)


@pytest.mark.full
def test_an_optimizer_of_other_types_is_refused_by_name(scripts: Scripts, written: Writer) -> None:
    """It needs Transformer Engine, so only the argument is there."""
    folder, _ = written("1,2", dp=2)
    command = arguments("2,1", extra=[*DISTRIBUTED, "--load", str(folder), "--global-batch-size", "16"])
    runs = scripts.launch(num_ranks("2,1"), {"arguments": command, "hooks": ["claim_precision"]})
    assert_refused(runs, "--use-precision-aware-optimizer", "--no-load-optim")


@pytest.mark.full
@pytest.mark.needs("older_buckets")
def test_a_tied_embedding_that_megatron_cannot_place_is_refused(scripts: Scripts) -> None:
    """Stock Megatron ends at an assertion."""
    sizes = [*DISTRIBUTED, "--max-position-embeddings", "13"]
    words = "--use-distributed-optimizer with a tied embedding; Megatron 0.12 can place one only where"
    for run in scripts.launch(num_ranks("1,2"), {"arguments": arguments("1,2", extra=sizes)}):
        assert run.exit_code not in (0, None) and words in run.output, run.output[-3000:]
    command = arguments("1,1", extra=sizes)
    position = command.index("--vtp-device")
    command[position : position + 4] = ["--pipeline-model-parallel-size", "2"]
    stock = scripts.launch(2, {"arguments": command, "how": "stock"})
    assert any("Param should not be in param_gbuf_map" in run.output for run in stock)


def _assert_refused(scripts: Scripts, folder: Path, extra: Sequence[str], *words: str) -> None:
    """Check that all ranks of another layout end with one line."""
    command = arguments("2,1", extra=[*DISTRIBUTED, "--load", str(folder), "--global-batch-size", "16", *extra])
    assert_refused(scripts.launch(num_ranks("2,1"), {"arguments": command}), *words)


def test_the_map_is_small(written: Writer) -> None:
    """It has one line for a bucket, and each name once."""
    folder, _ = written("1,2", dp=2)
    text = (folder / "iter_0000002" / MAP).read_text()
    read = json.loads(text)
    num_parts = sum(len(parts) for _, _, parts in read["buckets"])
    assert len(text.splitlines()) == len(read["buckets"]) + 2
    assert len({name for name, _ in read["parameters"]}) == len(read["parameters"]) < num_parts
    assert len(text) < 120 * (len(read["parameters"]) + num_parts)
