"""``vtp certify``: its short form passes, planted faults are named, and bad input is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.device.test_options import MODEL
from tests.multiproc.cases.presets import LATENT
from tests.multiproc.cases.script_cases import Scripts, arguments
from tests.support.pool import start_python
from vtp_plugin.certify.compare import Numbers, assemble, layer_of
from vtp_plugin.certify.layouts import _SGD, _alike, _list_run, _words, sizes_of
from vtp_plugin.certify.report import Row, blame, judge_row
from vtp_plugin.cli.certify import _own_script

START = (
    *("start_differs", "marked_as_cut", "marked_as_whole", "layers_swapped", "one_element"),
    *("element_of_one_replica", "boundary_scaled"),
)
"""Faults of what a run begins with, or a layer gets; all others are planted behind what watches."""
DIFFERS = "is not what the uniform run began with"
# What each planted fault is called: the tensor, how it differs, and where. The first ones are the default.
NAMED = {
    "sum_left_out": r"output of decoder\.layers\.3\.mlp\.linear_fc2 .*(share|differs) on ranks 1, 2",
    "gradient_shares": r"gradient of decoder\.layers\.4\.input_layernorm\.weight is one rank's share on ranks 1, 2",
    "one_element": rf"start of decoder\.layers\.4\.mlp\.linear_fc2\.weight {DIFFERS}",
    "gradient_by_tp": r"gradient of decoder\.layers\.4\.input_layernorm\.weight is 2 times .* on ranks 1, 2",
    "gradient_of_stage": r"gradient of decoder\.layers\.2\.\S+ is 0\.5 times .* on rank 0",
    "one_nan": r"gradient of decoder\.layers\.3\.mlp\.linear_fc1\.weight has infinite numbers or NaN on rank 2",
    "one_rank_alone": r"gradient of decoder\.layers\.3\.mlp\.linear_fc2\.weight is 3 times .* on rank 2",
    "output_halved": r"output of decoder\.layers\.4\.self_attention\.linear_proj is 0\.5 times .* on ranks 1, 2",
    "start_differs": rf"start of decoder\.layers\.3\.self_attention\.linear_qkv\.weight {DIFFERS}",
    "marked_as_cut": rf"start of decoder\.layers\.3\.input_layernorm\.weight {DIFFERS}",
    "marked_as_whole": rf"start of decoder\.layers\.3\.mlp\.linear_fc1\.weight {DIFFERS}",
    "layers_swapped": rf"start of decoder\.layers\.3\.mlp\.linear_fc1\.weight {DIFFERS}",
    "labels_shifted": f"batch {DIFFERS}",
    "attention_scaled": r"output of decoder\.layers\.3\.self_attention\.core_attention is 1\.5 times .* on rank 2",
    "lost_bits": r"output of decoder\.layers\.3\.input_layernorm differs on ranks 1, 2",
    "permuted_sequence": r"output of decoder\.layers\.3\.input_layernorm differs on ranks 1, 2, as if in another order",
    "permuted_columns": r"output of decoder\.layers\.4\.mlp\.linear_fc1 differs on ranks 1, 2, as if in another order",
    "embedding_scaled": r"output of embedding is 1\.25 times .* on rank 0",
    "negated": r"gradient of decoder\.layers\.2\.mlp\.linear_fc2\.weight is -1 times .* on rank 0",
    "gradient_lost": r"gradient of embedding\.position_embeddings\.weight differs on rank 0",
    "copy_drifts": r".*gradient of decoder\.layers\.4\.input_layernorm\.weight",
    "wrong_loss_scale": r"gradient at output_layer is 2 times .* on ranks 1, 2",
    "layer_skipped_backward": r"gradient at decoder\.layers\.4\.pre_mlp_layernorm is missing",
    "frozen": r"weight decoder\.layers\.3\.mlp\.linear_fc2\.bias",
}
DEFAULT = 3


def numbers_of(scripts: Scripts, num_ranks: int, words: Sequence[str], *hooks: str) -> Numbers:
    command = {"arguments": [*words, "--vtp-device", "cpu"], "hooks": hooks, "script": _own_script()}
    return assemble([rank.facts["numbers"] for rank in scripts.finish(num_ranks, command)])


def words_of(*flags: str) -> list[str]:
    return _words(_SGD, "--vtp-size-list 1,2", *flags)


Uniform = Callable[..., list[Numbers]]


@pytest.fixture(scope="module")
def uniform(scripts: Scripts) -> Uniform:
    """Give the uniform run of a list's flags, and the same with start weights that are changed by a rounding."""

    @cache
    def runs(words: tuple[str, ...], *hooks: str) -> list[Numbers]:
        own = [word for word in words if word != "--sequence-parallel"]
        equal = _alike(own, 3, size=1)
        return [
            numbers_of(scripts, len(sizes_of(words)), equal, f"certified role=reference seed={i}", *hooks)
            for i in (0, 1)
        ]

    return runs


def judged(scripts: Scripts, uniform: Uniform, fault: str, words: Sequence[str], *hooks: str, fed: str = "") -> Row:
    """Run a list with a fault, and judge it; with a folder, where it first differs, as a layer that is fed."""
    run = _list_run("", words)

    def numbers(fed: str = "") -> Numbers:
        watch = f"certified num_replicas={run.num_replicas} fed={fed}"
        own = (fault, watch) if fault in START else (watch, fault)
        return numbers_of(scripts, run.num_ranks, _alike(words, 3), *own, *hooks)

    reference, *changed = uniform(tuple(words), *hooks)
    row = judge_row(run, numbers(), 0.0, reference, changed)
    if fed:
        file, equal = f"{fed}/{layer_of(row.first)}", _alike(words, 3, size=1)
        numbers_of(scripts, len(sizes_of(words)), equal, f"certified role=reference fed={file}", *hooks)
        row = blame(row, numbers(file), reference, changed)
    return row


@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[] if i < DEFAULT else [pytest.mark.full]) for i, name in enumerate(NAMED)],
)
def test_a_planted_fault_is_named(scripts: Scripts, uniform: Uniform, fault: str) -> None:
    words = words_of(*["--sequence-parallel"] * (fault not in ("sum_left_out", "permuted_sequence")))
    row = judged(scripts, uniform, fault, words)
    assert row.verdict == "differs"
    assert re.match(NAMED[fault], row.note), row.note


# Whoever wrote these had not read how runs are compared. The list, its flags, and what is named.
_SIX, _TWICE = "--num-layers 6", "--vtp-dp-list 2,2 --global-batch-size 16"
_OWN_CLIP = "--optimizer sgd --lr 1e-1 --clip-grad 0.05 --untie-embeddings-and-output-weights"
BLIND = {
    "bias_counted_by_each_rank": (
        "2,1",
        "",
        r"step 2's output of decoder\.layers\.2\.mlp\.linear_fc2 .* on ranks 0, 1",
    ),
    "attention_sum_left_out": (
        *("1,2", ""),
        r"output of decoder\.layers\.3\.self_attention\.linear_proj is one rank's share on ranks 1, 2",
    ),
    "input_gradient_not_summed": (
        *("1,2,2", _SIX),
        r"gradient at decoder\.layers\.4\.pre_mlp_layernorm is one rank's share on ranks 1, 2",
    ),
    "bias_gradient_by_tp": (
        *("2,1", ""),
        r"gradient of decoder\.layers\.2\.self_attention\.linear_proj\.bias is 0\.5 times .* on ranks 0, 1",
    ),
    "replicas_summed_on_stage": ("1,2", _TWICE, r"gradient of output_layer\.weight .* is 2 times .* ranks 2, 3, 4, 5"),
    "qkv_rows_permuted": (
        *("1,2", ""),
        r"output of decoder\.layers\.3\.self_attention\.linear_qkv differs on ranks 1, 2, as if in another order",
    ),
    "norm_epsilon_on_one_rank": ("1,2", "", r"output of decoder\.layers\.4\.pre_mlp_layernorm differs on rank 2"),
    "tied_copy_misses_first_stage": ("1,2", "", r"gradient of output_layer\.weight differs on ranks 1, 2"),
    "vocabulary_off_by_one": ("1,2", "", r"gradient at output_layer differs on rank 2"),
    "clips_by_own_stage": ("1,2", _OWN_CLIP, r"weight decoder\.\S+ is 1\.\d+ times .* on ranks 1, 2"),
    "rate_of_one_group": (
        *("2,1", "--weight-decay 0.1"),
        r"weight decoder\.layers\.[12]\.\S+\.bias is 1\.01 times .* on ranks 0, 1",
    ),
    "infinite_gradient_in_step_2": (
        *("1,2", ""),
        r"step 2's gradient of decoder\.layers\.3\.mlp\.linear_fc1\.weight has infinite numbers or NaN on rank 2",
    ),
    "stale_activation": ("1,2,2", _SIX, r"output of decoder\.layers\.5 in microbatch 2 differs on ranks 3, 4"),
    "shards_swapped_at_boundary": (
        *("1,2", "--sequence-parallel"),
        r"output of decoder\.layers\.3\.input_layernorm differs on ranks 1, 2, as if in another order",
    ),
    "element_of_one_replica": (
        "2,1",
        _TWICE,
        rf"start of decoder\.layers\.1\.mlp\.linear_fc2\.weight {DIFFERS} on rank 3",
    ),
}


@pytest.mark.full
@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("fault", BLIND)
def test_a_blind_fault_is_named(scripts: Scripts, uniform: Uniform, fault: str) -> None:
    sizes, flags, named = BLIND[fault]
    row = judged(scripts, uniform, fault, arguments(sizes, extra=flags.split()))
    assert re.match(named, row.note), row.note


FED = {
    "boundary_scaled": (r"output of decoder\.layers\.3\.\S+ ", "before", ()),
    "output_halved": (r"output of decoder\.layers\.4\.self_attention\.linear_proj ", "in", ()),
    "amplified": (r"output of decoder\.layers\.3\.\S+ ", "before", ("amplifier",)),
}
"""Where a run first differs, and whether the fault lies before that layer or in it; hooks of the uniform run, too."""


@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("parallel", [pytest.param((), marks=pytest.mark.full, id="whole"), ("--sequence-parallel",)])
@pytest.mark.parametrize("fault", [*list(FED)[:2], pytest.param("amplified", marks=pytest.mark.full)])
def test_a_layer_is_suspected(
    scripts: Scripts, uniform: Uniform, fault: str, parallel: tuple[str, ...], tmp_path: Path
) -> None:
    """It is run again with the reference's input, so that a fault upstream is not blamed on it."""
    named, where, hooks = FED[fault]
    row = judged(scripts, uniform, fault, words_of(*parallel), *hooks, fed=str(tmp_path))
    assert re.match(named, row.note), row.note
    assert f"the fault lies {where} {layer_of(row.first)}" in row.note, row.note


def test_short_form(tmp_path: Path) -> None:
    """All is well, a killed rank is named, and the report speaks of what is installed, until it is changed."""
    path = tmp_path / "report.json"
    printed = start_python("-m", "vtp_plugin", "certify", "--short", "--device", "cpu", "--out", str(path))
    assert "verdict: fine: 5 of 5 runs" in printed
    report = json.loads(path.read_text())
    assert [row["verdict"] for row in report["rows"]] == ["equal"] * 4 + ["named"]
    assert str(tmp_path) not in path.read_text() and "/" not in re.sub(r"https?://", "", path.read_text())
    assert "what is installed" in start_python("-m", "vtp_plugin", "certify", "--check", str(path))


@pytest.mark.full
def test_all_layouts_that_fit_four_ranks() -> None:
    printed = start_python("-m", "vtp_plugin", "certify", "--ranks", "4", "--device", "cpu")
    assert "verdict: fine" in printed and "not run: distributed optimizer, overlapped: needs 6 ranks" in printed


@pytest.mark.full
def test_started_by_torchrun() -> None:
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "vtp_plugin", "certify", "--short")
    assert start_python(*words).count("verdict: fine") == 1


_EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --sequence-parallel"
)
ROUTER = r"output of decoder\.layers\.1\.mlp\.router differs"
# Rows of numbers that depend on the TP size in stock Megatron 0.19; the script, its flags, and what is named.
DEPENDENT = {
    "sinkhorn": ("", f"{_EXPERTS} --moe-router-load-balancing-type sinkhorn", ROUTER),
    "capacity": ("", f"{_EXPERTS} --moe-expert-capacity-factor 1.0", ROUTER),
    "norms of latent heads": (
        "latent_gpt",
        f"{LATENT} --init-method-std 0.2",
        r".*; gradient of decoder\.layers\.4\.self_attention\.q_layernorm\.(weight|bias) is 2 times",
    ),
    "positions of latent heads": (
        "latent_gpt",
        f"{LATENT.replace('--qk-layernorm', '')} --init-method-std 0.2",
        r"gradient at decoder\.layers\.4\.input_layernorm differs",
    ),
    "sinks": (
        "",
        "--softmax-type learnable",
        r"start of decoder\.layers\.1\.self_attention\.core_attention\.softmax_offset",
    ),
    "jitter": ("", f"{_EXPERTS} --moe-input-jitter-eps 0.1", ROUTER),
}


def certify_script(script: str, *words: str) -> str:
    flags = ("certify", "--device", "cpu", "--ranks", "4", "--", script)
    return start_python("-m", "vtp_plugin", *flags, *words)


@pytest.mark.full
@pytest.mark.needs("our_example")
@pytest.mark.parametrize("row", DEPENDENT)
def test_numbers_that_depend_on_the_size_in_megatron_itself(row: str) -> None:
    script, flags, named = DEPENDENT[row]
    path = f"tests/multiproc/faults/{script}.py" if script else _own_script()
    printed = certify_script(path, *words_of(flags, "--vtp-size-list 2,2"))
    assert re.search(rf"^uniform \(TP 2\): {named}", printed, re.MULTILINE), printed
    assert "stock Megatron with TP 2" in printed and "ours" not in printed


@pytest.mark.full
@pytest.mark.needs("our_example")
@pytest.mark.parametrize("flags", ["--swiglu", "--layerwise-disaggregated-training --num-layer-list 1,2,1", "--bf16"])
def test_a_script_computes_the_same(flags: str) -> None:
    printed = certify_script("examples/pretrain_gpt.py", *words_of(flags))
    assert "conclusion: rounding: 1,2 computes what TP 1 does; from run to run TP 1 differs by 0.0e+00" in printed


@pytest.mark.needs("our_example")
def test_flags_of_the_options_for_devices_train(scripts: Scripts) -> None:
    """All but Transformer Engine's layers."""
    local = ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion"]
    words = [*MODEL.split(), *local, "--vtp-device", "cpu", "--vtp-size-list", "1,2", "--train-iters", "1"]
    assert len(scripts.finish(3, {"arguments": words})[-1].steps) == 1
