"""Small random models that transformers makes, and what transformers computes with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "4.57.1", reason="published models need it: vtp-plugin[hf]")

from tests.support.hosts import counts_end_of_document, vocab_size  # noqa: E402
from vtp_plugin.cli import main  # noqa: E402

# Documents that Megatron 0.12 makes up count to 4095.
NUM_WORDS = 4128 if vocab_size() > 72 else 72
# Heads, groups and words divide by the sizes of all lists of the tests, and layers by their stages.
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "vocab_size": NUM_WORDS,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 70}
"""Sizes of models that no run loads."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family, in small.

    Attributes:
        name: of its classes.
        fields: of its config, besides the sizes.
        theta: base of its positions.
        scaling: of its positions.
        has_experts: the list needs sizes for experts.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None
    has_experts: bool = False


KINDS = {
    "llama-2": Kind(name="Llama", fields={"num_key_value_heads": 12}),
    "llama-3": Kind(name="Llama", theta=500000.0, scaling=LLAMA3),
    "llama-3-tied": Kind(
        name="Llama", theta=500000.0, scaling={**LLAMA3, "factor": 32.0}, fields={"tie_word_embeddings": True}
    ),
    "mistral": Kind(name="Mistral", theta=1000000.0, fields={"sliding_window": None}),
    "qwen-2": Kind(name="Qwen2", theta=1000000.0),
    "qwen-2.5-tied": Kind(name="Qwen2", theta=1000000.0, fields={"tie_word_embeddings": True}),
    "qwen-3": Kind(name="Qwen3", theta=1000000.0),
    "qwen-3-moe": Kind(
        name="Qwen3Moe",
        theta=1000000.0,
        fields={"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        has_experts=True,
    ),
    "qwen-3-moe-plain": Kind(
        name="Qwen3Moe",
        theta=1000000.0,
        fields={"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False},
        has_experts=True,
    ),
    "mixtral": Kind(
        name="Mixtral",
        theta=1000000.0,
        fields={"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 4},
        has_experts=True,
    ),
}


def vocab_flag(num_words: int) -> str:
    """Give the flag with which a tokenizer that makes up words has so many; older ones add the end of a document."""
    return f"--vocab-size {num_words - counts_end_of_document()}"


def is_new() -> bool:
    """Tell whether transformers writes rope_parameters."""
    return int(transformers.__version__.partition(".")[0]) >= 5


def config_of(kind: Kind, **fields: Any) -> Any:
    """Make the config of a small model."""
    if is_new():
        rope = {"rope_parameters": {"rope_theta": kind.theta, **(kind.scaling or {"rope_type": "default"})}}
    else:
        rope = {"rope_theta": kind.theta, "rope_scaling": dict(kind.scaling) if kind.scaling else None}
    words = {"attn_implementation": "eager", "use_cache": False}
    return getattr(transformers, f"{kind.name}Config")(**{**SIZES, **kind.fields, **rope, **words, **fields})


def make(kind: Kind, folder: Path, *, dtype: Any = torch.float32, max_shard: str = "5GB", **fields: Any) -> Any:
    """Make a model, save it in a folder as it would be published, and return it.

    Activations are small, so that the epsilon of a norm counts, and logits have a standard deviation above 1.
    """
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind.name}ForCausalLM")(config_of(kind, **fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * torch.randn(weight.shape))
            elif weight.dim() == 1:
                weight.copy_(0.5 * torch.randn(weight.shape))
            elif "embed_tokens" in name:
                weight.copy_(0.01 * torch.randn(weight.shape))
            elif "lm_head" in name:
                weight.copy_(0.4 * torch.randn(weight.shape))
            else:
                weight.copy_(torch.randn(weight.shape) * 1.2 / weight.shape[-1] ** 0.5)
        if model.config.tie_word_embeddings:
            model.model.norm.weight.mul_(40)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard)
    return model.float().eval()


def edit(file: Path, **fields: Any) -> None:
    """Change fields of a config."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Fail if transformers warns."""
    seen: list[str] = []

    class _Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                seen.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), _Handler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert seen == []


def load(folder: Path, dtype: Any = torch.float32) -> Any:
    """Load a folder with transformers, which must find all that it needs, no more, and say nothing."""
    with without_warnings():
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    assert not any(found[name] for name in found), found
    return model.eval()


def logits_of(model: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Compute logits ``[B, S, V]``."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def loss_of(model: Any, tokens: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Any:
    """Compute the mean loss of all tokens, whose gradient can be taken."""
    logits = model(torch.from_numpy(tokens)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())


def tensors_of(folder: Path) -> dict[str, Any]:
    """Read all tensors of a published model with the package safetensors."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """Run an action of the tools, which must succeed, and return what it says."""
    capsys.readouterr()
    main(["checkpoint", *map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def imported(folder: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Import a model and return the flags with which Megatron builds it."""
    said = run_json(capsys, "import", "--hf", folder, "--to", target)
    return [word for flag in (*said["flags"], *said["free_flags"]) for word in flag.split()]


def export(source: Path, target: Path, like: Path | None) -> None:
    """Export a checkpoint."""
    main(["checkpoint", "export", "--from", str(source), "--hf", str(target), *(["--like", str(like)] if like else [])])


def variants(kind: Kind) -> dict[str, Callable[[dict[str, Any], dict[str, Any]], None]]:
    """Give ways to get a model wrong, which change its tensors and its config; each must be seen.

    Args:
        kind: of the model.
    """
    found: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
        "gate and up swapped": _swap_gates,
        "query groups permuted": lambda tensors, config: _move_heads(tensors, config, ("q_proj",), _permuted),
        "positions interleaved": lambda tensors, config: _move_heads(
            tensors, config, ("q_proj", "k_proj"), _interleaved
        ),
        "another base of positions": _double_base,
        "another epsilon": lambda tensors, config: config.update(rms_norm_eps=config["rms_norm_eps"] / 10),
        "head tied or untied": _turn_head,
    }
    if kind.name == "Llama" and kind.fields.get("num_key_value_heads") == 12:
        del found["query groups permuted"]  # a group for each head
    if kind.name == "Qwen2":
        found["bias dropped"] = lambda tensors, config: _zero(tensors, ".bias")
    if kind.scaling is not None:
        found["another factor of positions"] = _other_factor
    if kind.name == "Qwen3":
        found["norms of queries left out"] = _leave_out_query_norms
    if kind.name == "Qwen3Moe" and kind.fields["norm_topk_prob"]:
        found["norms of queries left out"] = _be_mixtral
    if kind.name == "Mixtral":
        found["weights of experts not normalised"] = _be_qwen2_moe
    if "norm_topk_prob" in kind.fields:
        found["weights of experts normalised or not"] = lambda tensors, config: config.update(
            norm_topk_prob=not config["norm_topk_prob"]
        )
    return found


def wrong_logits(source: Path, folder: Path, change: Callable[..., None], tokens: np.ndarray[Any, Any]) -> Any:
    """Compute the logits of a wrong variant of a model, which is written to a folder."""
    from safetensors.torch import save_file

    tensors, config = tensors_of(source), json.loads((source / "config.json").read_text())
    change(tensors, config)
    folder.mkdir()
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return logits_of(load(folder), tokens)


def _swap_gates(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [*tensors]:
        for gate, up in (("gate_proj", "up_proj"), (".w1.", ".w3.")):
            if gate in name:
                other = name.replace(gate, up)
                tensors[name], tensors[other] = tensors[other], tensors[name]


def _move_heads(
    tensors: dict[str, Any], config: dict[str, Any], names: Sequence[str], order: Callable[..., Any]
) -> None:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name, value in tensors.items():
        if any(f"{each}." in name for each in names):
            heads = value.view(-1, size, *value.shape[1:])
            tensors[name] = order(heads, config["num_key_value_heads"]).reshape(value.shape)


def _permuted(heads: Any, groups: int) -> Any:
    return heads.view(groups, -1, *heads.shape[1:]).transpose(0, 1)


def _interleaved(heads: Any, groups: int) -> Any:
    return heads.view(len(heads), 2, -1, *heads.shape[2:]).transpose(1, 2)


def _double_base(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    place = config.get("rope_parameters") or config
    place["rope_theta"] *= 2


def _other_factor(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    place = config.get("rope_parameters") or config["rope_scaling"]
    place["factor"] = 8.0 if place["factor"] == 32.0 else 32.0


def _turn_head(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = not config["tie_word_embeddings"]
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    else:
        tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape) * 0.01


def _zero(tensors: dict[str, Any], ending: str) -> None:
    for name, value in tensors.items():
        if name.endswith(ending):
            tensors[name] = torch.zeros_like(value)


def _leave_out_query_norms(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Llama is Qwen 3 without them."""
    for name in [*tensors]:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            del tensors[name]
    config.update(model_type="llama", architectures=["LlamaForCausalLM"])


# Names of the parts of a layer of experts, of Mixtral and of Qwen's models.
_EXPERTS = (("block_sparse_moe.", "mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))


def _be_mixtral(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Mixtral is Qwen 3 with experts, without the norms of queries and keys."""
    _leave_out_query_norms(tensors, config)
    for name in [name for name in tensors if ".mlp." in name]:
        other = name
        for mixtral, qwen in _EXPERTS:
            other = other.replace(qwen, mixtral)
        tensors[other] = tensors.pop(name)
    config.update(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=config.get("num_experts") or config["num_local_experts"],
        intermediate_size=config["moe_intermediate_size"],
        sliding_window=None,
    )


def _be_qwen2_moe(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Qwen 2 with experts is Mixtral with weights that do not add up to 1, if its shared expert gives nothing."""
    for name in [name for name in tensors if ".block_sparse_moe." in name]:
        other = name
        for mixtral, qwen in _EXPERTS:
            other = other.replace(mixtral, qwen)
        tensors[other] = tensors.pop(name)
    hidden, size = config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        part = f"model.layers.{layer}.mlp.shared_expert"
        tensors |= {
            f"{part}_gate.weight": torch.zeros(1, hidden),
            f"{part}.down_proj.weight": torch.zeros(hidden, size),
        }
        tensors |= {f"{part}.{name}_proj.weight": torch.zeros(size, hidden) for name in ("gate", "up")}
    config.update(
        model_type="qwen2_moe",
        architectures=["Qwen2MoeForCausalLM"],
        num_experts=config.get("num_local_experts") or config["num_experts"],
        moe_intermediate_size=size,
        shared_expert_intermediate_size=size,
        norm_topk_prob=False,
        qkv_bias=False,
        use_sliding_window=False,
    )
