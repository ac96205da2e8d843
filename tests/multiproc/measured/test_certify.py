"""``vtp certify``: its short form passes, planted faults are named, and bad input is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.device.test_options import MODEL
from tests.multiproc.cases.presets import LATENT
from tests.multiproc.cases.script_cases import Scripts
from tests.support.pool import start_python
from vtp_plugin.certify.compare import Numbers, assemble, layer_of
from vtp_plugin.certify.layouts import _SGD, CertifiedRun, _alike, _words
from vtp_plugin.certify.report import Row, blame, judge_row
from vtp_plugin.cli.certify import _own_script

START = ("start_differs", "marked_as_cut", "marked_as_whole", "layers_swapped", "one_element")
"""Faults of what a run begins with; all others are planted behind."""
DIFFERS = "is not what the uniform run began with"
# What each planted fault is called: the tensor, how it differs, and where. The first ones are the default.
NAMED = {
    "sum_left_out": r"output of decoder\.layers\.3\.mlp\.linear_fc2 .*(share|differs) on ranks 1, 2",
    "gradient_shares": r"gradient of decoder\.layers\.4\.input_layernorm\.weight is one rank's share on ranks 1, 2",
    "one_element": rf"start of decoder\.layers\.4\.mlp\.linear_fc2\.weight {DIFFERS}",
    "gradient_by_tp": r"gradient of decoder\.layers\.4\.input_layernorm\.weight is 2 times .* on ranks 1, 2",
    "gradient_of_stage": r"gradient of decoder\.layers\.2\.\S+ is 0\.5 times .* on rank 0",
    "rows_swapped": r"output of decoder\.layers\.3\.self_attention\.linear_qkv differs on .*, as if in another order",
    "one_nan": r"gradient of decoder\.layers\.3\.mlp\.linear_fc1\.weight has infinite numbers or NaN on rank 2",
    "one_rank_alone": r"gradient of decoder\.layers\.3\.mlp\.linear_fc2\.weight is 3 times .* on rank 2",
    "tied_copy_drifts": r"gradient of output_layer\.weight is 0\.25 times .* on ranks 1, 2",
    "output_halved": r"output of decoder\.layers\.4\.self_attention\.linear_proj is 0\.5 times .* on ranks 1, 2",
    "one_rate": r"weight \S+ .*on ranks? [12]",
    "start_differs": rf"start of decoder\.layers\.3\.self_attention\.linear_qkv\.weight {DIFFERS}",
    "marked_as_cut": rf"start of decoder\.layers\.3\.input_layernorm\.weight {DIFFERS}",
    "marked_as_whole": rf"start of decoder\.layers\.3\.mlp\.linear_fc1\.weight {DIFFERS}",
    "layers_swapped": rf"start of decoder\.layers\.3\.mlp\.linear_fc1\.weight {DIFFERS}",
    "labels_shifted": f"batch {DIFFERS}",
    "norm_of_another_epsilon": r"output of decoder\.layers\.3\.pre_mlp_layernorm \S+ .*on ranks 1, 2",
    "attention_scaled": r"output of decoder\.layers\.3\.self_attention\.core_attention is 1\.5 times .* on rank 2",
    "lost_bits": r"output of decoder\.layers\.3\.input_layernorm differs on ranks 1, 2",
    "permuted_sequence": r"output of decoder\.layers\.3\.input_layernorm differs on ranks 1, 2, as if in another order",
    "permuted_columns": r"output of decoder\.layers\.4\.mlp\.linear_fc1 differs on ranks 1, 2, as if in another order",
    "embedding_scaled": r"output of embedding is 1\.25 times .* on rank 0",
    "negated": r"gradient of decoder\.layers\.2\.mlp\.linear_fc2\.weight is -1 times .* on rank 0",
    "gradient_lost": r"gradient of embedding\.position_embeddings\.weight differs on rank 0",
    "gradient_twice": r"gradient of decoder\.layers\.1\.mlp\.linear_fc1\.bias is 2 times .* on rank 0",
    "infinite": r"gradient of decoder\.layers\.4\.mlp\.linear_fc1\.bias has infinite numbers or NaN on rank 1",
    "copy_drifts": r".*gradient of decoder\.layers\.4\.input_layernorm\.weight",
    "wrong_loss_scale": r"gradient at output_layer is 2 times .* on ranks 1, 2",
    "layer_skipped_backward": r"gradient at decoder\.layers\.4\.pre_mlp_layernorm is missing",
    "frozen": r"weight decoder\.layers\.3\.mlp\.linear_fc2\.bias",
    "clips_otherwise": r"weight \S+ .*on ranks? [12]",
}
DEFAULT = 3


def numbers_of(scripts: Scripts, num_ranks: int, words: Sequence[str], *hooks: str) -> Numbers:
    command = {"arguments": [*words, "--vtp-device", "cpu"], "hooks": hooks, "script": _own_script()}
    return assemble([rank.facts["numbers"] for rank in scripts.finish(num_ranks, command)])


def words_of(*flags: str) -> list[str]:
    return _words(_SGD, "--vtp-size-list 1,2", *flags)


@pytest.fixture(scope="module")
def references(scripts: Scripts) -> list[Numbers]:
    """The uniform run, and the same with start weights that are changed by a rounding."""
    return uniform_runs(scripts)


def uniform_runs(scripts: Scripts, *hooks: str) -> list[Numbers]:
    return [
        numbers_of(scripts, 2, _alike(words_of(), 3, size=1), f"certified role=reference seed={i}", *hooks)
        for i in (0, 1)
    ]


def judged(scripts: Scripts, references: list[Numbers], *hooks: str, words: Sequence[str] = ()) -> Row:
    """Run a list, which a hook watches, and judge it."""
    reference, *changed = references
    job = CertifiedRun(shows="", layout="1,2", num_ranks=3)
    return judge_row(job, numbers_of(scripts, 3, _alike(words_of(*words), 3), *hooks), 0.0, reference, changed)


@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[] if i < DEFAULT else [pytest.mark.full]) for i, name in enumerate(NAMED)],
)
def test_a_planted_fault_is_named(scripts: Scripts, references: list[Numbers], fault: str) -> None:
    words = ["--sequence-parallel"] * (fault not in ("sum_left_out", "permuted_sequence"))
    row = judged(scripts, references, *((fault, "certified") if fault in START else ("certified", fault)), words=words)
    assert row.verdict == "differs"
    assert re.match(NAMED[fault], row.note), row.note


FED = {
    "boundary_scaled": (r"output of decoder\.layers\.3\.\S+ ", "before", ()),
    "output_halved": (r"output of decoder\.layers\.4\.self_attention\.linear_proj ", "in", ()),
    "amplified": (r"output of decoder\.layers\.3\.\S+ ", "before", ("amplifier",)),
}
"""Where a run first differs, and whether the fault lies before that layer or in it; hooks of the uniform run, too."""


@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("parallel", [(), ("--sequence-parallel",)])
@pytest.mark.parametrize("fault", FED)
def test_a_layer_is_suspected(
    scripts: Scripts, references: list[Numbers], fault: str, parallel: tuple[str, ...], tmp_path: Path
) -> None:
    """It is run again with the reference's input, so that a fault upstream is not blamed on it."""
    named, where, hooks = FED[fault]
    references = uniform_runs(scripts, *hooks) if hooks else references

    def run(role: str, num_ranks: int, words: Sequence[str], fed: str = "") -> Numbers:
        planted = [fault] * (role == "list")
        return numbers_of(scripts, num_ranks, words, *planted, f"certified role={role} fed={fed}", *hooks)

    def list_run(fed: str = "") -> Numbers:
        return run("list", 3, _alike(words_of(*parallel), 3), fed)

    reference, *changed = references
    row = judge_row(CertifiedRun(shows="", layout="1,2", num_ranks=3), list_run(), 0.0, reference, changed)
    assert re.match(named, row.note), row.note
    layer = layer_of(row.first)
    run("reference", 2, _alike(words_of(), 3, size=1), str(tmp_path / layer))
    row = blame(row, list_run(str(tmp_path / layer)), reference, changed)
    assert f"the fault lies {where} {layer}" in row.note, row.note


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
