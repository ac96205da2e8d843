"""What of MindSpeed-MM the plugin was written for: the model that it trains, and the functions that it relies on.

Neither MindSpeed-MM nor MindSpeed says its version in its code, so their functions are compared, by the pins beside
this file. What is missing is refused, what has changed is named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vtp_plugin.host.patching.pins import changed_targets, pins_in, read_pins

PINS: Final = Path(__file__).with_name("pins.json")
"""Digests of the functions that were relied on: version of a package -> target -> digest."""
WRITTEN_FOR: Final[Mapping[str, str]] = {
    "mindspeed_mm": "MindSpeed-MM 26.1.0",
    "mindspeed": "MindSpeed 26.1.0_core_r0.12.1",
}
"""The version of every package that the plugin was written against, as the file of pins has it."""
_LDT = "mindspeed_mm.patchs.layerwise_disaggregated_training"
_POSITIONS = "mindspeed_mm.models.vision.vlm_attentionmask_for_llm"
_VLM = "mindspeed_mm.models.vlm_model:VLMModel"
LAYER_COUNT: Final = (
    "mindspeed_mm.models.vision.vision_encoders.vision_transformer_block:Qwen2VLVisionTransformerBlock.forward"
)
"""Counts the vision layers before a chunk; see :func:`counts_layers_wrong`."""
_MANAGER = "mindspeed.patch_utils:MindSpeedPatchesManager"
_FEATURES = "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager"
TARGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "mindspeed_mm": (
        # Called here.
        "mindspeed_mm.configs.config:merge_mm_args",
        "mindspeed_mm.configs.config:ConfigReader",
        "mindspeed_mm.configs.config:MMConfig",
        f"{_POSITIONS}:prepare_positionsids_mask_for_llm",
        f"{_POSITIONS}:_build_attentionmask_positionid_qwenllm",
        f"{_POSITIONS}:qwen2_5_position",
        f"{_POSITIONS}:qwen2_5_vl_get_rope_index",
        # Laid around, or kept out.
        "mindspeed_mm.patchs.validate_args_patch:validate_args",
        "mindspeed_mm.patchs.patch_manager:PatchesManager",
        f"{_LDT}.parallel_state_patch:pre_validate_args_for_vtp",
        f"{_LDT}.parallel_state_patch:post_validate_args_for_vtp",
        f"{_LDT}.parallel_state_patch:install_ldt_init_model_parallel_patch",
        # Hold functions of Megatron that are replaced, and say how often which of them is called.
        "mindspeed_mm.training:pretrain",
        "mindspeed_mm.training:train",
        "mindspeed_mm.training:train_step",
        "mindspeed_mm.training:training_log",
        # Say which layers a chunk builds of the lists, and what it reads of a batch.
        f"{_VLM}.__init__",
        f"{_VLM}._build_image_encoder_model",
        f"{_VLM}._build_text_decoder_model",
        f"{_VLM}.set_input_tensor",
        f"{_VLM}.forward",
        f"{_VLM}.process_multimodal_embeddings",
        LAYER_COUNT,
        "mindspeed_mm.models.common.mm_gpt_model:MMGPTModel",
    ),
    "mindspeed": (
        _MANAGER,
        "mindspeed.patch_utils:Patch",
        _FEATURES,
        "mindspeed.features_manager.feature:MindSpeedFeature",
        "mindspeed.megatron_adaptor:patch_features",
        "mindspeed.megatron_adaptor:repatch",
        "mindspeed.arguments:validate_args_wrapper",
        "mindspeed.arguments:parse_args_wrapper",
    ),
}
"""What each package has that the plugin replaces, lies around or relies on."""
_LANGUAGE = ("qwen2_5_lm",)
_VISION = ("qwen2vit", "qwen2_5_vit")
_ONE_SIZE = "train it with one size for all stages, without --vtp-size-list"


def problems_of_model(model: Any) -> Iterator[str]:
    """Say what of the JSON file of a model is not of Qwen2.5-VL.

    Args:
        model: what the file says.
    """
    whole, text = getattr(model, "model_id", None), getattr(model, "text_decoder", None)
    reason = (
        "of MindSpeed-MM's models only Qwen2.5-VL was tried on stages of unequal size; InternVL, GLM-4.5V and Qwen3-VL "
        "it trains without a pipeline, on FSDP2"
    )
    if text is None:
        yield f"model_id {whole} of --mm-model, without a text_decoder; {reason}; {_ONE_SIZE}"
        return
    vision = getattr(getattr(model, "image_encoder", None), "vision_encoder", None)
    for name, part, known in (("text_decoder", text, _LANGUAGE), ("vision_encoder", vision, _VISION)):
        if part is not None and (found := getattr(part, "model_id", None)) not in known:
            yield f"model_id {found} of {name} (of the model {whole}); {reason} ({' or '.join(known)}); {_ONE_SIZE}"
    for name in ("audio_encoder", "video_encoder", "text_encoder"):
        if getattr(model, name, None) is not None:
            yield f"{name} of the model {whole}; {reason}; {_ONE_SIZE}"


def problems_of_versions(megatron: str) -> Iterator[str]:
    """Say which package is of a version that the plugin cannot work with.

    Args:
        megatron: its version.
    """
    if not megatron.startswith("0.12."):
        yield (
            f"MindSpeed-MM on Megatron {megatron}; the plugin knows it on Megatron 0.12.1, with "
            f"{WRITTEN_FOR['mindspeed']}; check out core_v0.12.1"
        )
    for package, known in WRITTEN_FOR.items():
        root = _root(package)
        missing = [] if root is None else sorted(set(TARGETS[package]) - set(pins_in(root, TARGETS[package])))
        if missing:
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield (
                f"{package} in {root} has no {missing[0]}{rest}; it is of another version than {known}, which the "
                "plugin was written for; check that out"
            )


def changes_of_versions() -> Iterator[str]:
    """Name what the packages that lie here have changed since the plugin was written against them."""
    for package, known in WRITTEN_FOR.items():
        if (root := _root(package)) is not None:
            found = pins_in(root, TARGETS[package])
            yield from changed_targets(read_pins(PINS), known, found)


def counts_layers_wrong() -> bool:
    """Tell whether MindSpeed-MM counts the vision layers before a chunk as in the version that the plugin mends."""
    root = _root("mindspeed_mm")
    known = read_pins(PINS)[WRITTEN_FOR["mindspeed_mm"]]
    return root is not None and pins_in(root, [LAYER_COUNT]).get(LAYER_COUNT) == known[LAYER_COUNT]


def _root(package: str) -> Path | None:
    """Return the folder in which a package lies; None if it cannot be found."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent.parent
