"""``checkpoint import`` and ``export``: the bytes of published models go through a checkpoint and come back."""

from __future__ import annotations

import filecmp
import importlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import run_action
from tests.support.hf_models import (
    KINDS,
    LLAMA3,
    SIZES,
    SMALL,
    Kind,
    config_of,
    edit,
    imported,
    load,
    make,
    run_json,
    tensors_of,
    torch,
    transformers,
)
from tests.support.hosts import ROOT
from vtp_plugin.checkpoint.hf.all_families import FAMILIES, rows_of
from vtp_plugin.checkpoint.hf.families.llama import LLAMA
from vtp_plugin.checkpoint.hf.hf_model import (
    contradictions,
    expected_settings,
    factor_of,
    flat_entries,
    free_flags,
    frequencies,
    name_in,
    neutral_settings,
    settings,
)
from vtp_plugin.checkpoint.hf.read_config import read_config, read_model
from vtp_plugin.checkpoint.hf.tensor_rows import hf_shapes, megatron_tensors

CONFIGS = json.loads((ROOT / "tests" / "golden" / "published_configs.json").read_text())
ONE_OF_EACH = ("llama-3", "mistral", "qwen-2", "qwen-3", "qwen-3-moe", "mixtral")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back_byte_by_byte(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16, with names and shapes, and with config, generation config and tokenizer as they were."""
    source, back = tmp_path / "source", tmp_path / "back"
    make(KINDS[kind], source, dtype=torch.bfloat16, **SMALL)
    (source / "tokenizer.json").write_text("{ }")
    imported(source, tmp_path / "checkpoint", capsys)
    assert run_action(capsys, "verify", tmp_path / "checkpoint")[0] == 0
    run_json(capsys, "export", "--from", tmp_path / "checkpoint", "--hf", back)
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype == torch.bfloat16 and after[name].shape == value.shape
        assert torch.equal(after[name].view(torch.int16), value.view(torch.int16)), name
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert filecmp.cmp(source / name, back / name, shallow=False), name
    assert next(load(back, dtype="auto").parameters()).dtype == torch.bfloat16


def test_a_family_is_added_as_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide says: Granite has the tensors of Llama, and factors that must be those of Megatron."""
    factors = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}
    factors["attention_multiplier"] = SIZES["head_dim"] ** -0.5
    fixed = {**LLAMA.fixed, **{name: (value,) for name, value in factors.items()}}
    family = replace(LLAMA, model_type="granite", architecture="GraniteForCausalLM", fixed=fixed)
    source, back = tmp_path / "source", tmp_path / "back"
    make(Kind(name="Granite", fields=factors), source, **SMALL)
    capsys.readouterr()
    code, (line,) = run_action(capsys, "import", "--hf", source, "--to", tmp_path / "checkpoint")
    assert code == 2 and "model_type is 'granite'; known are llama" in line
    monkeypatch.setitem(FAMILIES, "granite", family)
    imported(source, tmp_path / "checkpoint", capsys)
    run_json(capsys, "export", "--from", tmp_path / "checkpoint", "--hf", back)
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    load(back)
    edit(source / "config.json", logits_scaling=2.0)
    capsys.readouterr()
    code, (line,) = run_action(capsys, "import", "--hf", source, "--to", tmp_path / "other")
    assert code == 2 and "logits_scaling is 2.0; only 1.0 is computed" in line


def test_several_files_and_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small slabs and small files change no byte; transformers reads the index."""
    source, back = tmp_path / "source", tmp_path / "back"
    make(KINDS["qwen-3-moe"], source, max_shard="100KB", **SMALL)
    assert len([*source.glob("*.safetensors")]) > 1
    for module in ("tools.writer", "load.stored_optimizer"):
        monkeypatch.setattr(f"vtp_plugin.checkpoint.{module}.SLAB_BYTES", 1000)
    monkeypatch.setattr("vtp_plugin.checkpoint.tools.export_hf.plan_files.__defaults__", (90_000,))
    imported(source, tmp_path / "checkpoint", capsys)
    assert run_json(capsys, "export", "--from", tmp_path / "checkpoint", "--hf", back)["num_files"] > 2
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    load(back)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_shares_hold_every_element_once(kind: str, tmp_path: Path) -> None:
    """Of theirs and of ours, in arithmetic of its own."""
    config_of(KINDS[kind], **SMALL).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.json").read_text()), "architectures": None})
    )
    model = read_model(read_config(tmp_path), tmp_path)
    theirs = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in hf_shapes(rows_of(model), model).items()}
    for tensor in megatron_tensors(rows_of(model), model):
        ours = torch.zeros(tensor.shape, dtype=torch.int8)
        for share in tensor.shares:
            ours[tuple(slice(*pair) for pair in share.box)] += 1
            theirs[share.name][tuple(slice(*pair) for pair in share.hf_box(share.box))] += 1
        assert (ours == 1).all(), tensor.row.megatron_keys
    assert all((count == 1).all() for count in theirs.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs(name: str, tmp_path: Path) -> None:
    """The fields that models were published with: those that pass, with their flags, and those that do not."""
    told = CONFIGS[name]
    if "refused" in told:
        with pytest.raises(ValueError, match=told["refused"]):
            read_model(told["config"], tmp_path / "config.json")
        return
    model = read_model(told["config"], tmp_path / "config.json")
    assert " ".join(each.text for each in settings(model) if each.is_given) == told["flags"]


@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("kind", ["llama-3-tied", "qwen-2", "qwen-3-moe-plain"])
def test_megatron_reads_every_flag_where_the_note_looks_for_it(kind: str, tmp_path: Path) -> None:
    """An argument that a run does not have is not compared, so none may be missing."""
    from tests.expected.of_megatron import megatron_parser

    config_of(KINDS[kind], architectures=None, **{**SMALL, "rms_norm_eps": 3e-6}).save_pretrained(tmp_path)
    model = read_model(read_config(tmp_path), tmp_path)
    flags = [word for each in settings(model) if each.is_given for word in each.text.split()]
    read = vars(megatron_parser().parse_args([*flags, *" ".join(free_flags(model)).split()]))
    known, wanted = {*megatron_parser()._option_string_actions}, expected_settings(model)
    assert {each.flag for each in settings(model)} <= known
    assert [each.flag for each in wanted if each.flag in known and name_in(read, each.argument) not in read] == []
    assert [*contradictions(wanted, read)] == []
    read[name_in(read, "norm_epsilon")] = 1e-5
    assert [each.problem for each in contradictions(wanted, read)] == ["--norm-epsilon is 1e-05, and 3e-06 is expected"]


def test_entries_that_change_a_function_are_told() -> None:
    """Of MindSpeed-MM, which puts functions in the place of their names, and takes gelu for a name that it lacks."""
    functional, known = torch.nn.functional, neutral_settings(has_experts=False, is_seeing=True)
    seeing = {"vision_encoder": {"activation_func": functional.silu, "layernorm_epsilon": 1e-6}}
    right = {"activation_func": "silu", "position_embedding_type": "mrope", "rope_scaling": None, "window_size": None}
    assert [*contradictions(known, flat_entries({"text_decoder": right, "image_encoder": seeing}))] == []
    wrong = {"activation_func": functional.gelu, "rotary_interleaved": True, "rope_scaling": {"factor": 2.0}}
    found = contradictions(known, flat_entries({"text_decoder": {**right, **wrong}, "image_encoder": seeing}))
    assert {each.problem for each in found} == {
        "text_decoder.activation_func is gelu, and silu is expected",
        "text_decoder.rotary_interleaved is given, and is not expected",
        "text_decoder.rope_scaling.factor is 2.0, and 1.0 is expected",
    }


LLAMA_FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 16384,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"new_norm": True}, "new_norm is true, and no field of llama that is known"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu" is computed'),
        ({"mlp_bias": True}, "mlp_bias is true; only false"),
        ({"mlp_bias": 0}, "mlp_bias is 0; only false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*; only null"),
        ({"rope_theta": 10000.5}, "rope_theta is 10000.5; .* whole number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "Megatron has no scaling of positions but llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "Megatron has no scaling of positions but llama3"),
        ({"rope_scaling": {**SCALED, "high_freq_factor": 2.0}}, "high_freq_factor 4"),
        (
            {"rope_scaling": {**SCALED, "original_max_position_embeddings": 4096}},
            "original_max_position_embeddings 8192",
        ),
        ({"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}, "Megatron has no scaling"),
        ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 5e5}}, "say different things"),
        ({"rope_scaling": None, "rope_parameters": SCALED}, ""),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, and num_key_value_heads 3"),
        ({"hidden_size": "64"}, 'hidden_size is "64"; it must be a whole number'),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; it must be a whole number"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; known are llama, mistral"),
        ({"model_type": None}, "model_type is None; known are"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM is expected"),
    ],
)
def test_fields_that_change_what_is_computed(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    if not message:
        assert read_model({**LLAMA_FIELDS, **fields}, tmp_path).rope_factor == 8.0
        return
    with pytest.raises(ValueError, match=message) as error:
        read_model({**LLAMA_FIELDS, **fields}, tmp_path / "config.json")
    assert "\n" not in str(error.value) and str(error.value).count(";") >= 2


@pytest.mark.parametrize("size", [8, 64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_tell_the_factor(size: int, factor: float) -> None:
    """Those of transformers, in 32 bits."""
    config = config_of(replace(KINDS["llama-3"], scaling={**LLAMA3, "factor": factor}), head_dim=size)
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    found = module.LlamaRotaryEmbedding(config).inv_freq.tolist()
    assert found == pytest.approx(frequencies(size, 500000.0, factor), rel=1e-5)
    assert factor_of(found, 500000.0) == pytest.approx(factor, rel=1e-4)


def test_flags_are_printed_to_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On lines of their own: those that must be given, and those that may."""
    make(KINDS["llama-3"], tmp_path / "source", **SMALL)
    code, (wrote, flags, free, words) = run_action(
        capsys, "import", "--hf", tmp_path / "source", "--to", tmp_path / "to"
    )
    assert code == 0 and f"load it with --load {tmp_path / 'to'}, and with:" in wrote
    told = run_json(capsys, "import", "--hf", tmp_path / "source", "--to", tmp_path / "again")
    assert (flags, free) == (" ".join(told["flags"]), " ".join(told["free_flags"]))
    assert flags.startswith("--num-layers 2 --hidden-size 48 ")
    assert told["vocab_flag"] == "--padded-vocab-size 70" and told["vocab_flag"] in words


def test_a_bar_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal only."""
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    make(KINDS["llama-3"], tmp_path / "source", **SMALL)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        middle, back = (tmp_path / f"{what} {terminal.isatty()}" for what in ("middle", "back"))
        for words in (
            ("import", "--hf", tmp_path / "source", "--to", middle),
            ("export", "--from", middle, "--hf", back),
        ):
            run_json(capsys, *words)
            assert (f"{words[0]} " in terminal.getvalue()) == terminal.isatty()


def test_the_oldest_transformers_is_new_enough() -> None:
    assert tuple(map(int, transformers.__version__.split(".")[:3])) >= (4, 57, 1)
