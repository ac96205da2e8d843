"""What is known of MindSpeed-MM: its sources, its data, its converters' files.

What of MindSpeed-MM the plugin was written for: the model that it trains, and the functions that it relies on.

Neither MindSpeed-MM nor MindSpeed says its version in its code, so their functions are compared, by the pins beside
this file. What is missing is refused, what has changed is named.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from vtp_plugin.checkpoint.format.resolver import read_tracker
from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.host.patching.pins import changed_targets, missing_in_files, pins_in, read_pins
from vtp_plugin.host.rules.checks.batch import most_tokens
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.util.text import own_command


def problems_of_files(args: argparse.Namespace) -> Iterator[str]:
    """Say what a rank that reads data will not find: the tokenizer, before others wait for this rank.

    Args:
        args: after :func:`read_model`.
    """
    data = getattr(args.mm, "data", None)
    if data is None:
        yield "no --mm-data on a rank that reads data (in a U-shape the edge, else all); give its JSON file"
        return
    path = getattr(getattr(data.dataset_param, "preprocess_parameters", None), "model_name_or_path", None)
    # Else it may be the name of a model in a cache.
    if isinstance(path, str) and path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        yield (
            f"model_name_or_path {path} of --mm-data {args.mm_data} is not there; a rank that reads data needs the "
            "tokenizer and the processor in it; correct the JSON file"
        )


def require_batch(args: argparse.Namespace, batch: Mapping[str, Any]) -> None:
    """Refuse a batch that stages could not pass on, before one of them takes memory for it.

    Args:
        args: arguments of the run.
        batch: what MindSpeed-MM's loader gives.

    Raises:
        ConfigError: it has pictures and videos.
        LayoutError: it has another form than tensors between stages, or more tokens than any may have.
    """
    require_one_kind(batch)
    shape, expected = tuple(batch["input_ids"].shape), (args.micro_batch_size, args.seq_length)
    if not has_own_lengths(args) and shape != expected:
        raise LayoutError(
            f"a batch of {shape} tokens; between stages all have {expected}, --micro-batch-size and --seq-length; add "
            "--variable-seq-lengths, for batches of their own lengths, or pad all samples to --seq-length and drop the "
            "last batch if it is smaller"
        )
    most = most_tokens(args)
    if most is not None and math.prod(shape) > most:
        raise LayoutError(
            f"a batch of {shape} tokens; {most} at most, by --micro-batch-size and what the arguments say of lengths; "
            "raise --seq-length"
        )


def require_one_kind(batch: Mapping[str, Any]) -> None:
    """Refuse a batch of which MindSpeed-MM would read one half.

    Raises:
        ConfigError: it has pictures and videos.
    """
    if batch.get("video_grid_thw") is not None and batch.get("image_grid_thw") is not None:
        raise ConfigError(
            "a batch with pictures and videos; MindSpeed-MM reads either; put them into different batches"
        )


def has_own_lengths(args: argparse.Namespace) -> bool:
    """Tell whether batches have lengths of their own; MindSpeed declares the flag."""
    return getattr(args, "variable_seq_lengths", False)


_HEAD = "text_decoder.output_layer."
_CHUNK = "model"
_WAY_OUT = (
    "make a checkpoint of it with {command} checkpoint import --mm {folders} --like MODEL --to NEW, and "
    "load that with --ckpt-format torch_dist (docs/guides/mindspeed-mm.md)"
)


def problems_of_converted(load: str | None, layout: PipelineLayout, *, is_u_shaped: bool) -> Iterator[str]:
    """Say why converted weights cannot be loaded by these stages.

    Args:
        load: folder of checkpoints that the run looks into.
        layout: who is where.
        is_u_shaped: the run is.
    """
    found = None if load is None or "://" in load else _converted_file(Path(load))
    if found is None:
        return
    file, stored = found
    if _is_of_its_u(file, stored):
        yield (
            f"{file} is of MindSpeed-MM's hf_to_mm_ldt, which writes a tree for each side of its own U, in its own "
            f"chunks; no layout of the plugin has these; {_WAY_OUT.format(command=own_command(), folders='EDGE CLOUD')}"
        )
    elif is_u_shaped or len(set(layout.tp_sizes)) > 1:
        sizes = ",".join(map(str, layout.tp_sizes))
        yield (
            f"{file} is of MindSpeed-MM's hf_to_mm, which writes a file for each rank of a uniform run; "
            f"--vtp-size-list {sizes}{' in a U-shape' if is_u_shaped else ''} has other ranks; "
            f"{_WAY_OUT.format(command=own_command(), folders=load)}"
        )


def _converted_file(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Give one of the files that a converter wrote, and what it holds; None if there is none."""
    # The converter knows no iterations.
    if read_tracker(folder) != "release":
        return None
    for file in sorted(folder.glob("release/mp_rank_*/model_optim_rng.pt")):
        try:
            # Mapped: only names are read, and no weights. A run stores its arguments, which are no plain values.
            stored = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError):
            return None  # the checks of checkpoints say what is wrong with it
        return (file, stored) if isinstance(stored, dict) and "args" not in stored else None
    return None


def _is_of_its_u(file: Path, stored: Mapping[str, Any]) -> bool:
    """Tell whether a file's chunks are those of a U: the first stage has the head, and others end with nothing."""
    chunks = [stored[name] for name in sorted(stored) if name.startswith(_CHUNK)]
    if len(chunks) < 2:
        return False
    # "mp_rank_01_002" is rank 1 of stage 2.
    is_first_stage = int(file.parent.name.split("_")[3]) == 0
    return any(name.startswith(_HEAD) for name in chunks[-1]) if is_first_stage else not chunks[-1]


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
        if (root := _root(package)) is not None:
            yield from missing_in_files(package, known, root, TARGETS[package])


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
