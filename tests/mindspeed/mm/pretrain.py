"""Runs MindSpeed-MM's own ``pretrain_vlm.py``, unmodified, on a CPU: stand-ins first, then the script.

``VTP_MINDSPEED_MM`` names the tree. Started as it is, only torch.cuda is mapped onto the CPU; started by
``python -m vtp_plugin run`` that has happened already, and the plugin is applied where the script imports the adaptor.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.mindspeed.mm import samples
from tests.mindspeed.mm.standins import AfterImport, install_operators, npu_is_a_device, replace_constants
from tests.mindspeed.mm.weights import fill
from tests.mindspeed.split import leave_one_out
from vtp_plugin.platform.cpu import CpuPlatform, is_cpu_mapping_installed

DIGITS = 8  # behind the first: they tell all numbers of fp32 apart
NORM_AT = 7  # among the arguments of training_log() after the losses
POSITIONS = "mindspeed_mm.models.vision.vlm_attentionmask_for_llm"
HAS_OWN_DATA = bool(os.environ.get("VTP_TEST_OWN_DATA"))
IDS_IN_ITS_CODE = {151655: samples.PICTURE, 151656: samples.VIDEO}


def change_data(data: Any) -> None:
    """Replace the data set, which needs a tokenizer and a processor of pictures; where these are there, nothing."""
    if HAS_OWN_DATA:
        return
    from megatron.core import mpu
    from megatron.training import get_args

    def build_dataset(param: Any) -> samples.MadeSamples:
        return samples.MadeSamples()

    made: list[samples.Loader] = []

    def build_dataloader(dataset: samples.MadeSamples, **kwargs: Any) -> samples.Loader:
        replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        size, consumed = get_args().micro_batch_size, kwargs["consumed_samples"]
        # A control: a chunk behind the first one has called for a batch too many.
        ahead = size * replicas if made and os.environ.get("VTP_TEST_AHEAD") else 0
        made.append(samples.Loader(dataset, size, replica, replicas, consumed + ahead))
        return made[-1]

    data.build_mm_dataset, data.build_mm_dataloader = build_dataset, build_dataloader


def find_small_ids(module: Any) -> None:
    """Let the positions of pictures be found by ids of a small vocabulary."""
    replace_constants(module.qwen2_5_vl_get_rope_index, dict(IDS_IN_ITS_CODE))


def allow_fp32(module: Any) -> None:
    """Lift the assertion that M-RoPE needs bf16: equality in fp32 can be tight."""
    forward = module.MMGPTModel.forward

    def forward_in_fp32(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.config.bf16 = True
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config.bf16 = False

    if "--bf16" not in sys.argv:
        module.MMGPTModel.forward = forward_in_fp32


def start_from_one_set_of_weights(module: Any) -> None:
    """Fill every model, whatever part of it this rank holds, from one set of weights."""
    from megatron.core import mpu

    build = module.VLMModel.__init__

    def build_and_fill(self: Any, config: Any) -> None:
        vision, text = config.image_encoder.vision_encoder, config.text_decoder
        lists = {"image_encoder.encoder.": vision.pipeline_num_layers, "text_decoder.": text.pipeline_num_layers}
        build(self, config)
        # Of several chunks a stage, the lists have a row for each.
        chunk = self.vp_rank if self.enable_vp else 0
        rows = {name: layers if isinstance(layers[0], list) else [layers] for name, layers in lists.items()}
        before = {name: [*sum(each[:chunk], []), *each[chunk][: self.pp_rank]] for name, each in rows.items()}
        starts = {name: sum(layers) for name, layers in before.items()}
        fill(self, mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size(), starts)
        if os.environ.get("VTP_TEST_LAYERS") and mpu.get_tensor_model_parallel_rank() == 0:
            # In one piece: other ranks write, too.
            print(f"stage {self.pp_rank}, chunk {chunk} holds {_layers(self)}\n", end="", flush=True)

    module.VLMModel.__init__ = build_and_fill
    if "--bf16" not in sys.argv:
        # The script looks for the model behind two wrappers; without bf16 there is one.
        module.VLMModel.module = property(_Behind)


def _layers(model: Any) -> str:
    """Write the numbers of the layers that a chunk holds, and as which of how many parts each is stored."""
    stored, found = model.sharded_state_dict(), []
    for part, prefix in {"vision": "image_encoder.encoder.blocks", "text": "text_decoder.decoder"}.items():
        block = dict(model.named_modules()).get(prefix)
        numbers = [layer.layer_number for layer in block.layers] if block is not None else []
        weights = [
            value for value in stored.values() if value.key == f"{prefix}.layers.self_attention.linear_proj.weight"
        ]
        found.append(f"{part} {numbers} of {[(value.global_offset[0], value.global_shape[0]) for value in weights]}")
    return "; ".join(found)


class _Behind:
    """What the script asks the model for, as if it were behind one wrapper more."""

    def __init__(self, model: Any) -> None:
        self.add_image_encoder, self.image_encoder = model.add_image_encoder, model.image_encoder


def print_all_digits(module: Any) -> None:
    """Print losses and norms with more digits than the three of the log, from the rank that logs."""
    log = module.training_log

    def training_log(loss_dict: Any, *args: Any) -> Any:
        print_last = module.print_rank_last
        losses = {key: float(value) for key, value in loss_dict.items()}
        norm = args[7]
        print_last(
            f"exact loss: {losses.get('loss', float('nan')):.{DIGITS}E} | exact norm: {float(norm):.{DIGITS}E} |"
        )
        return log(loss_dict, *args)

    module.training_log = training_log


def forget_positions() -> None:
    """Let the cloud compute positions from ids that are all zero, as MindSpeed-MM's own feature does."""
    from vtp_plugin.patches.mindspeed import multimodal

    make = multimodal._batch

    def batch(rows: Any) -> dict[str, Any]:
        given = make(rows)
        del given["position_ids"]
        return {**given, "image_grid_thw": None}

    multimodal._batch = batch


def leave_layers_uncounted() -> None:
    """Let MindSpeed-MM count the vision layers before a chunk, as it does without the plugin."""
    from vtp_plugin.patches.mindspeed import known_mm

    known_mm.counts_layers_wrong = lambda: False


def mix_up_pictures() -> None:
    """Send the cloud the sizes of a microbatch's pictures in another order."""
    from vtp_plugin.patches.mindspeed import two_rings

    read = two_rings._read
    two_rings._read = lambda most, batch: read(most, {"image_grid_thw": batch["image_grid_thw"].flip(0)})


def finalize_first_chunk_only(module: Any) -> None:
    """Leave the gradients of the edge's last chunk as they are, as MindSpeed-MM's own feature does in the cloud."""
    wrap = module.finalize_model_grads_wrapper

    def wrap_for_one(finalize: Any) -> Any:
        return wrap(lambda model, num_tokens=None: finalize(model[:1], num_tokens))

    module.finalize_model_grads_wrapper = wrap_for_one


CONTROLS = {
    "ZERO_IDS": forget_positions,
    "UNCOUNTED": leave_layers_uncounted,
    "MIXED_UP": mix_up_pictures,
    "LEFT_OUT": leave_one_out,
}
"""What a control changes in the plugin, by the end of the variable that asks for it."""


def change_training(module: Any) -> None:
    """Print all digits, and drop what a control drops."""
    print_all_digits(module)
    if os.environ.get("VTP_TEST_ONE_CHUNK"):
        finalize_first_chunk_only(module)


def main() -> None:
    """Prepare, and run the script as its own main."""
    if not is_cpu_mapping_installed():
        CpuPlatform("this script").install()
    install_operators()
    AfterImport(
        {
            "mindspeed_mm.data": change_data,
            POSITIONS: find_small_ids,
            "mindspeed_mm.models.common.mm_gpt_model": allow_fp32,
            "mindspeed_mm.models.vlm_model": start_from_one_set_of_weights,
            "mindspeed_mm.training": change_training,
        },
        around={POSITIONS: npu_is_a_device},
    )
    for name, change in CONTROLS.items():
        if os.environ.get(f"VTP_TEST_{name}"):
            change()
    script = Path(os.environ["VTP_MINDSPEED_MM"]) / "pretrain_vlm.py"
    sys.argv[0] = str(script)
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
