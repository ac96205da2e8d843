"""Fields of a config: each of every JSON type is read or refused in one line; what tools leave there passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import run_action
from vtp_plugin.checkpoint.hf.all_families import FAMILIES
from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.checkpoint.hf.read_config import FIXED, HARMLESS, known_fields, passed_over, read_config, read_model
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.typed_json import parse_json

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 16384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_5_vl": {
        "vision_config": {"hidden_size": 32, "num_heads": 4, "out_hidden_size": 64},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# Some values of every JSON type.
VALUES = (
    *(None, True, False, 0, 1, -1, 3, 1 << 62, 0.0, 0.5, -2.5, 1e300, "", "x", "64", "full_attention"),
    *([], [1], [None], ["x"], [[]], ["full_attention"], [["full_attention"]], [{}], {}, {"a": 1}, {"rope_theta": [1]}),
)  # fmt: skip


def config_of(family: str) -> dict[str, Any]:
    """Return a config that is read."""
    return {"model_type": family, "architectures": [FAMILIES[family].architecture], **BASE, **OWN.get(family, {})}


def read(config: dict[str, Any]) -> HFModel | str:
    """Read a config; return what is wrong with it, which is one line of value, rule and way out."""
    try:
        return read_model(config, Path("m/config.json"))
    except ConfigError as error:
        text = str(error)
        assert "\n" not in text and text.startswith("m/config.json: "), text
        assert all(each.count("; ") >= 2 for each in text.split(" | ")), text
        return text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_every_type(family: str) -> None:
    """No traceback; what is read is made of numbers that are finite and truths."""
    config = config_of(family)
    assert isinstance(read(config), HFModel)
    num_read = 0
    for name in (*known_fields(FAMILIES[family]), "unsloth_version", "x"):
        for value in VALUES:
            made = read({**config, name: value})
            num_read += isinstance(made, HFModel)
            if isinstance(made, HFModel):
                kinds = {each: type(getattr(made, each)) for each in ("num_layers", "hidden", "heads", "ffn", "vocab")}
                assert set(kinds.values()) == {int}, (name, value)
                assert type(made.is_tied) is bool and type(made.rotary_base) is int and made.epsilon < 1e308
    assert num_read > len(VALUES) * len(HARMLESS)


def test_names_write_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever characters a name has, the error is one line of text."""
    for name in ("a\nb", "\x1b[2J", "\ud800", "\u202e"):
        (tmp_path / "config.json").write_text(json.dumps({**config_of("llama"), name: 1}))
        code, (line,) = run_action(capsys, "import", "--hf", tmp_path, "--to", tmp_path / "to")
        assert code == 2 and line.isprintable() and f"{ascii(name)[1:-1]} is 1, and no field" in line


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_every_part_of_a_scaling_of_every_type(place: str) -> None:
    config = {name: value for name, value in config_of("llama").items() if name != "rope_theta"}
    for scaling in (SCALING, {"rope_type": "default"}):
        for name in (*SCALING, "type", "rope_theta", "partial_rotary_factor", "x"):
            for value in VALUES:
                made = read({**config, place: {**scaling, name: value}})
                factor = made.rope_factor if isinstance(made, HFModel) else None
                assert factor is None or 0 < factor < 1e301


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_json_in_some_fields(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    names = st.sampled_from(sorted(known_fields(FAMILIES[family])))
    made = {**config_of(family), **data.draw(st.dictionaries(names, JSON, max_size=4))}
    text = json.dumps(made)
    try:
        config = parse_json(text)
    except ValueError:
        return
    read(config)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('{"rope_theta": 1e999}', "a number is not finite"),
        ('{"rope_theta": Infinity}', "a number is not finite"),
        ('{"rms_norm_eps": NaN}', "a number is not finite"),
        ('{"hidden_size": ' + "9" * 30 + "}", "an integer has more than 64 bits"),
        ("\ufeff{}x", "is no JSON object ("),
        ('{"a": "\\ud800"', "is no JSON object ("),
    ],
)
def test_a_text_that_is_no_small_json(fields: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(fields)
    with pytest.raises(ConfigError, match=r"config.json is no JSON object \(") as error:
        read_config(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_theta": [10000.0]}, "rope_theta is [10000.0]; it must be a number above 0"),
        ({"rope_theta": -1}, "rope_theta is -1; it must be a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]; it must be an object or null"),
        ({"rope_parameters": {"rope_theta": "x"}}, 'rope_parameters: rope_theta is "x"; it must be a number above 0'),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear"; it must be an object or null'),
        ({"architectures": 3}, "architectures is 3; it must be a list of texts"),
        ({"architectures": "LlamaForCausalLM"}, "it must be a list of texts"),
        ({"hidden_act": []}, 'hidden_act is []; only "silu"'),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"layer_types": "full_attention"}, "layer_types is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_interleaved": True}, "rope_interleaved is true; only false"),
        ({"is_causal": False}, "is_causal is false; only true"),
        ({"attention_bias": True}, "attention_bias is true; only false"),
        ({"sliding_window": 4096}, "sliding_window is 4096; only null"),
    ],
)
def test_values_that_are_refused(fields: dict[str, Any], said: str) -> None:
    found = read({**config_of("llama"), **fields})
    assert isinstance(found, str) and said in found


# What transformers itself and tools leave in configs of all these families.
LEFT: dict[str, Any] = {
    "_attn_implementation": "sdpa",
    "_attn_implementation_autoset": True,
    "_commit_hash": None,
    "_name_or_path": "somebody/model",
    "add_cross_attention": False,
    "attention_bias": False,
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "do_sample": False,
    "id2label": {"0": "LABEL_0"},
    "is_decoder": False,
    "is_llama_config": True,
    "label2id": {"LABEL_0": 0},
    "layer_types": ["full_attention", "full_attention"],
    "max_length": 20,
    "max_window_layers": 28,
    "mlp_bias": False,
    "num_beams": 1,
    "output_attentions": False,
    "output_hidden_states": True,
    "problem_type": None,
    "pruned_heads": {},
    "quantization_config": {},
    "return_dict": True,
    "rope_interleaved": False,
    "task_specific_params": None,
    "temperature": 0.6,
    "tokenizer_class": "LlamaTokenizer",
    "top_k": 50,
    "torchscript": False,
    "transformers.js_config": {"dtype": "q4"},
    "unsloth_fixed": True,
    "unsloth_version": "2025.1.1",
    "use_bfloat16": False,
    "use_sliding_window": False,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_tools_leave_changes_nothing(family: str) -> None:
    """And is named."""
    config = config_of(family)
    plain = read(config)
    left = {name: value for name, value in LEFT.items() if value in FAMILIES[family].fixed.get(name, (value,))}
    for name, value in left.items():
        assert read({**config, name: value}) == plain, name
    assert read({**config, **left}) == plain
    named = {*passed_over({**config, **left}, FAMILIES[family])}
    assert named >= left.keys() - FIXED.keys()
    assert not named & (BASE.keys() | OWN.get(family, {}).keys() - {"sliding_window"})


def defaults() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what transformers writes of a config whose fields all are as it makes them."""
    transformers = pytest.importorskip("transformers", "4.57.1")
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral"):
        config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, num_key_value_heads=4, sliding_window=None)
        yield f"{name}ForCausalLM", json.loads(config.to_json_string(use_diff=False))


def test_all_that_transformers_writes_passes() -> None:
    """Also with every field, as ``to_json_file(use_diff=False)`` and other tools write it."""
    for architecture, config in defaults():
        assert isinstance(found := read({**config, "architectures": [architecture]}), HFModel), found
