"""What is known of ms-swift's Megatron: the versions that were run, their sources, and what does not work there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from vtp_plugin.config import VtpConfig, flags_of_fields
from vtp_plugin.host.patching.pins import changed_targets, missing_targets, pins_in, read_pins

PINS: Final = Path(__file__).with_name("pins.json")
"""Digests of the functions that are replaced or relied on: version of a package -> target -> digest."""
WRITTEN_FOR: Final[Mapping[str, str]] = {"swift": "ms-swift 4.6.0", "mcore_bridge": "mcore-bridge 1.6.5"}
"""The version of every package that was run, as the file of pins has it."""
_ARGUMENTS = "swift.megatron.arguments.megatron_args:MegatronArguments"
_TOOLS = "swift.megatron.utils.megatron_lm_utils"
_BRIDGE = "mcore_bridge.bridge.gpt_bridge:GPTBridge"
ARGUMENTS: Final = f"{_ARGUMENTS}.__post_init__"
GROUPS: Final = f"{_TOOLS}:_initialize_mpu"
ROWS: Final = "swift.megatron.utils.utils:get_padding_to"
MODEL: Final = "swift.megatron.model.utils:get_mcore_model_config"
STATE: Final = f"{_TOOLS}:_generate_state_dict"
LOAD: Final = f"{_TOOLS}:load_mcore_checkpoint"
ADAPTERS: Final = "swift.megatron.utils.utils:prepare_adapter"
BRIDGE: Final = f"{_BRIDGE}.__init__"
WEIGHT: Final = f"{_BRIDGE}._get_weight"
TARGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "swift": (
        ARGUMENTS,
        f"{_ARGUMENTS}._init_distributed",
        GROUPS,
        ROWS,
        MODEL,
        STATE,
        LOAD,
        ADAPTERS,
    ),
    "mcore_bridge": (
        BRIDGE,
        WEIGHT,
        f"{_BRIDGE}._split_tp",
        f"{_BRIDGE}._broadcast_ep_pp",
        f"{_BRIDGE}._set_state_dict",
        "mcore_bridge.tuners.lora:LoraParallelLinear.reset_lora_parameters",
    ),
}
"""What each package has that is replaced or relied on."""


def is_loaded() -> bool:
    """Tell whether this process is a rank of ms-swift's Megatron."""
    return "swift.megatron" in sys.modules


def version() -> str:
    """Return the version of ms-swift that is installed."""
    return metadata.version("ms-swift")


def problems_of_versions() -> Iterator[str]:
    """Name what an installed package does not have."""
    for package, known in WRITTEN_FOR.items():
        if (root := _root(package)) is not None:
            yield from missing_targets(package, known, root, TARGETS[package])


def changes_of_versions() -> Iterator[str]:
    """Say which packages are of other versions than those that were run, and what differs in them."""
    for package, known in WRITTEN_FOR.items():
        name, _, version = known.partition(" ")
        here = metadata.version(name)
        root = _root(package)
        changed = () if root is None else changed_targets(read_pins(PINS), known, pins_in(root, TARGETS[package]))
        if here != version or changed:
            yield f"{name} {here}; stages of unequal size were run with {known} only" + "".join(
                f"; {line}" for line in changed
            )


def _root(package: str) -> Path | None:
    """Return the folder in which a package lies; None if it cannot be found."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent.parent


_FLAGS: Final[tuple[tuple[str, object, str], ...]] = (
    ("rlhf_type", None, "it counts replicas by one size of all stages"),
    ("bridge_backend", "mcore-bridge", "only mcore-bridge was run"),
    ("use_megatron_fsdp", False, "it shards by one size of all stages"),
    ("fp8_format", None, "it pads rows for one size of all stages"),
    ("fp4_format", None, "it pads rows for one size of all stages"),
    ("tp_comm_overlap", False, "its buffers have one size for all stages"),
    ("nccl_comm_warmup", False, "it warms up groups of equal stages"),
    ("streaming", False, "it was not run"),
    ("context_parallel_size", 1, "it was not run"),
    ("mtp_num_layers", None, "it was not run"),
    ("skip_megatron_init", False, "it was not run"),
    ("task_type", "causal_lm", "only language models were run"),
    ("optimizer", "adam", "only adam was run"),
    ("async_save", False, "it was not run"),
)
"""Arguments of ms-swift, the value that works with unequal stages, and why others do not."""
_WAY_OUT: Final = "leave it out, or give all stages one size"


def problems_of_arguments(args: Any) -> Iterator[str]:
    """Say which arguments do not go with stages of unequal size.

    >>> from types import SimpleNamespace
    >>> print(*problems_of_arguments(SimpleNamespace(streaming=True, context_parallel_size=1)))
    --streaming True; it was not run with stages of unequal size in ms-swift; leave it out, or give all stages one size
    """
    for name, supported, why in _FLAGS:
        if getattr(args, name, supported) not in (supported, None):
            yield f"--{name} {getattr(args, name)}; {why.replace('was not run', _UNTRIED)}; {_WAY_OUT}"


_OURS: Final = frozenset(
    {
        "layerwise_disaggregated",
        "schedule",
        "split_backward",
        "sites",
        "cp_list",
        "dp_list",
        "ep_list",
        "etp_list",
    }
)
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


_UNTRIED: Final = "was not run with stages of unequal size in ms-swift"


def problems_of_model(args: Any) -> Iterator[str]:
    """Say what of a model does not go with stages of unequal size.

    >>> from types import SimpleNamespace
    >>> info = SimpleNamespace(model_type="qwen3_moe", is_moe_model=True)
    >>> print(*problems_of_model(SimpleNamespace(model_info=info, is_multimodal=False)))
    model qwen3_moe has experts; mcore-bridge groups their ranks by one size; give all stages one size
    """
    kind = args.model_info.model_type
    if args.model_info.is_moe_model:
        yield (f"model {kind} has experts; mcore-bridge groups their ranks by one size; give all stages one size")
    if args.is_multimodal:
        yield f"model {kind} is multimodal; its encoder was not run with stages of unequal size; give all one size"


def problems_of_configuration(config: Any) -> Iterator[str]:
    """Say which kinds of layers were not run with stages of unequal size.

    Args:
        config: mcore-bridge's configuration of the model.
    """
    for name in ("hybrid_layer_pattern", "experimental_attention_variant", "multi_latent_attention"):
        if value := getattr(config, name, None):
            yield f"model with {name} {value}; it {_UNTRIED}; give all stages one size"
