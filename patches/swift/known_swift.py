"""What is known of ms-swift's Megatron: the versions that were run, their sources, and what does not work there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from vtp_plugin.config import VtpConfig, flags_of_fields
from vtp_plugin.host.patching.pins import changed_targets, missing_in_files, pins_in, read_pins

PINS: Final = Path(__file__).with_name("pins.json")
"""Digests of the functions that are replaced or relied on: version of a package -> target -> digest."""
WRITTEN_FOR: Final[Mapping[str, str]] = {"swift": "ms-swift 4.6.0", "mcore_bridge": "mcore-bridge 1.6.5"}
"""The version of every package that was run, as the file of pins has it."""
_ARGUMENTS = "swift.megatron.arguments.megatron_args:MegatronArguments"
_TOOLS = "swift.megatron.utils.megatron_lm_utils"
_BRIDGE = "mcore_bridge.bridge.gpt_bridge:GPTBridge"
ARGUMENTS: Final = f"{_ARGUMENTS}.__post_init__"
_DISTRIBUTED: Final = f"{_ARGUMENTS}._init_distributed"
GROUPS: Final = f"{_TOOLS}:_initialize_mpu"
ROWS: Final = "swift.megatron.utils.utils:get_padding_to"
MODEL: Final = "swift.megatron.model.utils:get_mcore_model_config"
STATE: Final = f"{_TOOLS}:_generate_state_dict"
LOAD: Final = f"{_TOOLS}:load_mcore_checkpoint"
WRITER: Final = "swift.utils.env:is_last_rank"
NUMBERS: Final = "swift.utils.transformers_utils:get_model_parameter_info"
ADAPTERS: Final = "swift.megatron.utils.utils:prepare_adapter"
BRIDGE: Final = f"{_BRIDGE}.__init__"
WEIGHT: Final = f"{_BRIDGE}._get_weight"
_LORA: Final = "mcore_bridge.tuners.lora:LoraParallelLinear.reset_lora_parameters"
_BELOW: Final = tuple(f"{_BRIDGE}.{name}" for name in ("_split_tp", "_broadcast_ep_pp", "_set_state_dict"))
TARGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "swift": (ARGUMENTS, _DISTRIBUTED, GROUPS, ROWS, MODEL, STATE, LOAD, WRITER, NUMBERS, ADAPTERS),
    "mcore_bridge": (BRIDGE, WEIGHT, *_BELOW, _LORA),
}
"""What each package has that is replaced or relied on."""


def is_loaded() -> bool:
    """Tell whether this process is a rank of ms-swift's Megatron."""
    return "swift.megatron" in sys.modules


def problems_of_versions() -> Iterator[str]:
    """Name what an installed package does not have."""
    for package, known in WRITTEN_FOR.items():
        yield from missing_in_files(package, known, _root(package), TARGETS[package])


def changes_of_versions() -> Iterator[str]:
    """Say which packages are of other versions than those that were run, and what differs in them."""
    for package, known in WRITTEN_FOR.items():
        name, _, version = known.partition(" ")
        here = metadata.version(name)
        changed = changed_targets(read_pins(PINS), known, pins_in(_root(package), TARGETS[package]))
        if here != version or changed:
            yield "; ".join((f"{name} {here}; stages of unequal size were run with {known} only", *changed))


def _root(package: str) -> Path:
    """Return the folder in which a package lies."""
    return Path(str(getattr(importlib.util.find_spec(package), "origin", package))).parent.parent


_UNTRIED: Final = "was not run with stages of unequal size in ms-swift"
_WAY_OUT: Final = "give all stages one size"
_SUPPORTED: Final[Mapping[str, object]] = {
    **{"bridge_backend": "mcore-bridge", "task_type": "causal_lm", "optimizer": "adam", "context_parallel_size": 1},
    **dict.fromkeys(("rlhf_type", "fp8_format", "fp4_format", "mtp_num_layers"), None),
    **dict.fromkeys(("use_megatron_fsdp", "tp_comm_overlap", "nccl_comm_warmup", "streaming", "async_save"), False),
}
"""Arguments of ms-swift whose other values do not go with stages of unequal size."""


def problems_of_arguments(args: Any) -> Iterator[str]:
    """Say which arguments do not go with stages of unequal size.

    >>> from types import SimpleNamespace
    >>> print(*problems_of_arguments(SimpleNamespace(streaming=True, context_parallel_size=1)))
    --streaming True; it was not run with stages of unequal size in ms-swift; leave it out, or give all stages one size
    """
    for name, supported in _SUPPORTED.items():
        if (given := getattr(args, name, None)) not in (supported, None):
            yield f"--{name} {given}; it {_UNTRIED}; leave it out, or {_WAY_OUT}"


_SIZES: Final = ("cp_list", "dp_list", "ep_list", "etp_list")
_OURS: Final = frozenset({"encoder_layer_list", "schedule", "split_backward", "sites", *_SIZES})
"""Fields of the plugin's options that were not run in ms-swift."""


def problems_of_request(config: VtpConfig) -> Iterator[str]:
    """Say which options of the plugin do not go with ms-swift.

    >>> print(*problems_of_request(VtpConfig(size_list=(1, 2), schedule="planned")))
    --vtp-schedule; it was not run with ms-swift; leave it out
    >>> print(*problems_of_request(VtpConfig(size_list="auto")))
    --vtp-size-list auto; ms-swift needs the sizes before its ranks meet; write them
    """
    if not isinstance(config.size_list, tuple):
        yield f"--vtp-size-list {config.size_list}; ms-swift needs the sizes before its ranks meet; write them"
    default = VtpConfig()
    for flag in flags_of_fields():
        if flag.field in _OURS and getattr(config, flag.field) != getattr(default, flag.field):
            yield f"{flag.name}; it was not run with ms-swift; leave it out"


_KINDS: Final = ("num_moe_experts", "is_multimodal", "hybrid_layer_pattern", "experimental_attention_variant")


def problems_of_model(config: Any) -> Iterator[str]:
    """Say what of a model does not go with stages of unequal size.

    Args:
        config: mcore-bridge's configuration of the model.

    >>> from types import SimpleNamespace
    >>> print(*problems_of_model(SimpleNamespace(num_moe_experts=8, is_multimodal=False)))
    model with num_moe_experts 8; it was not run with stages of unequal size in ms-swift; give all stages one size
    """
    for name in (*_KINDS, "multi_latent_attention"):
        if value := getattr(config, name, None):
            yield f"model with {name} {value}; it {_UNTRIED}; {_WAY_OUT}"
