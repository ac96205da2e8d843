"""A small multimodal model on Megatron's MIMO: encoders of pictures and of sound and a GPT, each on a grid of ranks.

Only names of megatron.core are used. With ``vtp_plugin.apply(bridges=True)`` before, the plugin's bridges join them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mimo import MimoModel, MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY as LANGUAGE
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from mimo_sizes import Sizes

VISION, SOUND = "vision", "sound"
TOKENS = {VISION: 99, SOUND: 98}  # what stands for a patch of a picture, and for a frame of a clip
VOCAB_SIZE = 96  # of words
SEQ_LENGTH = 32
HIDDEN = {VISION: 24, SOUND: 36, LANGUAGE: 48}
NUM_HEADS = 12
NUM_LAYERS = {VISION: 2, SOUND: 1, LANGUAGE: 4}
PICTURE_SIZE, PATCH_SIZE = (8, 16), 4
NUM_PATCHES = PICTURE_SIZE[0] * PICTURE_SIZE[1] // PATCH_SIZE**2
NUM_FRAMES, FRAME_SIZE = 4, 10
PIECES = {VISION: (NUM_PATCHES, PATCH_SIZE**2), SOUND: (NUM_FRAMES, FRAME_SIZE)}  # of a picture, or a clip
_DIMS = (["tp"], ["cp"], ["pp"], ["dp"], ["dp", "cp"], ["tp", "cp"], ["tp", "dp", "cp"], ["tp", "pp"])


def make_grid(sizes: Sizes, first_rank: int) -> Any:
    """Make a module's grid with all groups that Megatron's parts ask for; all ranks of the world call this."""
    # There are no experts, but Megatron's optimizer asks for their groups.
    names = ["expt_tp", "ep", "expt_dp", "pp"]
    if sizes.stages:
        from vtp_plugin.bridge import StageCommGrid

        grid: Any = StageCommGrid(sizes.stages, first_rank)
        shapes = [[tp, 1, cp * dp, len(sizes.stages)] for tp, cp, dp in sizes.stages]
        grid.register_view("expert", shapes, names, shared_dims=["pp"])
    else:
        grid = HyperCommGrid([sizes.tp, sizes.cp, sizes.dp, sizes.pp], ["tp", "cp", "dp", "pp"], first_rank)
        grid.register_view("expert", [sizes.tp, 1, sizes.cp * sizes.dp, sizes.pp], names, shared_dims=["pp"])
    for dims in (*_DIMS, ["tp", "cp", "dp", "pp"]):
        grid.create_pg(dims)
    for dims in (["expt_tp"], ["ep"], ["expt_dp"], ["expt_tp", "ep"], ["expt_tp", "ep", "pp"]):
        grid.create_pg(dims, view="expert")
    return grid


def groups_of(grid: Any) -> ProcessGroupCollection:
    """Collect the groups of a grid that this rank is in."""
    groups = ProcessGroupCollection()
    for dims in _DIMS:
        setattr(groups, "_".join(dims), grid.get_pg(dims))
    groups.mp, groups.intra_dp_cp = groups.tp_pp, groups.dp_cp
    groups.tp_dp_cp = grid.get_pg(["tp", "dp", "cp"])
    groups.intra_dist_opt = grid.get_pg(["tp", "cp", "dp", "pp"])
    groups.expt_tp, groups.ep, groups.expt_dp = (
        grid.get_pg(name, view="expert") for name in ("expt_tp", "ep", "expt_dp")
    )
    groups.intra_expt_dp = groups.expt_dp
    groups.tp_ep = grid.get_pg(["expt_tp", "ep"], view="expert")
    groups.tp_ep_pp = grid.get_pg(["expt_tp", "ep", "pp"], view="expert")
    groups.embd = groups.pos_embd = None  # embedding and head have their own weights
    return groups


class Encoder(MegatronModule):
    """Turns pictures or clips into vectors of the language model: a linear layer, a transformer, a projection.

    Context-parallel ranks have some pieces of every picture each; the output is whole on all ranks.
    """

    def __init__(
        self, config: TransformerConfig, spec: ModuleSpec, pg_collection: ProcessGroupCollection, modality: str
    ) -> None:
        super().__init__(config)
        self.groups, self.tp_group = pg_collection, pg_collection.tp  # the latter for checkpoints
        num_pieces, piece_size = PIECES[modality]
        self.patches = torch.nn.Linear(piece_size, config.hidden_size)
        self.places = torch.nn.Parameter(torch.zeros(num_pieces, 1, config.hidden_size))
        self.block = TransformerBlock(config, spec, pg_collection=pg_collection)
        self.projection = torch.nn.Linear(config.hidden_size, HIDDEN[LANGUAGE])

    def forward(self, pieces: torch.Tensor) -> torch.Tensor:
        """Encode `[pictures, patches, pixels]`; returns `[pictures, patches, hidden size of the language model]`."""
        rows = self.patches(pieces.to(self.places.dtype).transpose(0, 1)) + self.places
        rows = rows.chunk(self.groups.cp.size())[self.groups.cp.rank()].contiguous()
        if self.config.sequence_parallel:
            rows = scatter_to_sequence_parallel_region(rows, group=self.groups.tp)
        rows = self.block(rows, attention_mask=None)
        # What comes back is whole on every rank: each takes its own part.
        if self.config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=self.groups.tp)
        rows = self.projection(rows)
        if self.groups.cp.size() > 1:
            rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=self.groups.cp)
        return rows.transpose(0, 1)


def make_config(name: str, grid: Any, sizes: Sizes, dtype: torch.dtype = torch.float32) -> TransformerConfig:
    """Make the configuration of a module on this rank."""
    tp, cp, _, pp = grid.shape
    num_layers = NUM_LAYERS[name]
    return TransformerConfig(
        num_layers=num_layers,
        num_layers_in_first_pipeline_stage=num_layers - num_layers // pp * (pp - 1) if num_layers % pp else None,
        hidden_size=HIDDEN[name],
        num_attention_heads=NUM_HEADS,
        kv_channels=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=sizes.sequence_parallel and tp > 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Replicas of the modules hold different numbers of samples: sums, divided by all tokens at the end of a step.
        calculate_per_token_loss=True,
    )


def make_model(
    sizes: dict[str, Sizes],
    grids: dict[str, Any],
    attention: dict[str, type] | None = None,
    *,
    is_alone: bool = False,
    dtype: torch.dtype = torch.float32,
) -> MimoModel:
    """Build what this rank holds of the model.

    Args:
        sizes: of all modules.
        grids: of all modules.
        attention: a core attention to use in the place of Megatron's local one, which knows no context parallelism.
        is_alone: this rank has all modules, and nothing joins them.
        dtype: of the weights, and of what crosses.
    """
    groups = {name: groups_of(grid) if grid.is_current_rank_in_grid() else None for name, grid in grids.items()}
    specs = {name: get_gpt_layer_local_spec() for name in grids}
    encoders = [name for name in grids if name != LANGUAGE]
    for name in encoders:
        specs[name].submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    for name, found in ((name, attention[name]) for name in grids if attention):
        specs[name].submodules.self_attention.submodules.core_attention = found
    configs = {name: make_config(name, grids[name], sizes[name], dtype) for name in grids}
    own = groups[LANGUAGE]
    language = {
        "config": configs[LANGUAGE],
        "transformer_layer_spec": specs[LANGUAGE],
        "vocab_size": VOCAB_SIZE,
        "max_sequence_length": SEQ_LENGTH,
        "pre_process": own is not None and own.pp.rank() == 0,
        "post_process": own is not None and own.pp.rank() == own.pp.size() - 1,
        "position_embedding_type": "rope",
        "scatter_embedding_sequence_parallel": False,  # MimoModel cuts when pictures are among the words
        "pg_collection": own,
    }
    model = MimoModel(
        MimoModelConfig(
            language_model_spec=ModuleSpec(module=GPTModel, params=language),
            modality_submodules_spec={
                name: ModuleSpec(
                    module=VisionModalitySubmodules,  # nothing in it is of pictures only
                    params={"pg_collection": groups[name]},
                    submodules={
                        "encoders": {
                            "encoder": ModuleSpec(
                                module=Encoder,
                                params={
                                    "config": configs[name],
                                    "spec": specs[name],
                                    "pg_collection": groups[name],
                                    "modality": name,
                                },
                            )
                        }
                    },
                )
                for name in encoders
            },
            special_token_ids={name: TOKENS[name] for name in encoders},
            module_to_grid_map=None if is_alone else grids,
        ),
        cp_group=own.cp if own is not None else None,
        tp_group=own.tp if own is not None else None,
    )
    return model.to(dtype)


def own_modules(model: MimoModel) -> dict[str, Any]:
    """Return the modules that this rank holds a part of."""
    found = {LANGUAGE: model.language_model, **dict(model.modality_submodules.items())}
    return {name: module for name, module in found.items() if module is not None}


def for_training(model: MimoModel, *, distributed_optimizer: bool = False, overlap: bool = False) -> None:
    """Let Megatron add up gradients over each module's replicas, and divide them by the tokens of all."""
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=overlap, grad_reduce_in_fp32=True
    )
    groups = {name: module.pg_collection for name, module in own_modules(model).items()}
    for name, module in own_modules(model).items():
        config = model.config if name == LANGUAGE else module.encoders["encoder"].config
        wrapped = DistributedDataParallel(config, options, module, pg_collection=groups[name])
        if name == LANGUAGE:
            model.language_model = wrapped
        else:
            model.modality_submodules[name] = wrapped

    def finalize(_models: Any, num_tokens: torch.Tensor, **options: Any) -> None:
        own = groups.get(LANGUAGE)
        is_counted = own is not None and own.pp.rank() == own.pp.size() - 1 and own.tp.rank() == 0
        total = num_tokens.float() if is_counted else torch.zeros_like(num_tokens, dtype=torch.float32)
        dist.all_reduce(total)
        for name, module in own_modules(model).items():
            options["pg_collection"] = groups[name]
            finalize_model_grads([module], None, **options)
            module.scale_gradients(1.0 / total.item())

    model.config.finalize_model_grads_func = finalize
    model.config.grad_scale_func = lambda loss: loss
    if overlap:
        model.config.no_sync_func = model.no_sync


def named_parts(model: MimoModel) -> Iterator[tuple[str, torch.nn.Parameter, int | None]]:
    """Yield name, parameter and the axis that tensor-parallel ranks share, with layers numbered over all stages."""
    for module_name, module in own_modules(model).items():
        bare = module.module if isinstance(module, DistributedDataParallel) else module
        block = bare.decoder if module_name == LANGUAGE else bare.encoders["encoder"].block
        first = block.layers[0].layer_number - 1 if len(block.layers) else 0
        for name, parameter in bare.named_parameters():
            head, found, tail = name.partition(".layers.")
            if found:
                number, _, rest = tail.partition(".")
                name = f"{head}.layers.{int(number) + first}.{rest}"
            axis = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            yield f"{module_name}.{name}", parameter, axis


def draw_weights(model: MimoModel) -> None:
    """Give the weights values that depend on their names only, the same in every layout."""
    for name, parameter, axis in named_parts(model):
        group = own_modules(model)[name.partition(".")[0]].pg_collection.tp
        shape = list(parameter.shape)
        if axis is not None:
            shape[axis] *= group.size()
        values = np.random.default_rng(zlib.crc32(name.encode())).normal(scale=0.1, size=shape)
        whole = torch.from_numpy(values).float() + float("layernorm.weight" in name)
        own = whole if axis is None else whole.chunk(group.size(), dim=axis)[group.rank()]
        with torch.no_grad():
            parameter.copy_(own)


def draw_batch(seed: int, num_pictures: list[int], num_clips: list[int] | None = None) -> dict[str, Any]:
    """Generate samples: pictures at the front, clips behind them, then words.

    Args:
        seed: of the values.
        num_pictures: of every sample.
        num_clips: of every sample; None generates none.

    Returns:
        Tensors of all samples, and for each modality a list with what each sample has: `[pictures, patches, pixels]`.
    """
    random = np.random.default_rng(seed)
    words = random.integers(0, VOCAB_SIZE, size=(len(num_pictures), SEQ_LENGTH + 1))
    tokens, labels = words[:, :-1].copy(), words[:, 1:]
    mask = np.ones_like(labels)
    pictures, clips = [], []
    for sample, count in enumerate(num_pictures):
        num_sounds = num_clips[sample] if num_clips else 0
        middle = count * NUM_PATCHES
        end = middle + num_sounds * NUM_FRAMES
        tokens[sample, :middle], tokens[sample, middle:end] = TOKENS[VISION], TOKENS[SOUND]
        mask[sample, :end] = 0
        rows, columns = (size // PATCH_SIZE for size in PICTURE_SIZE)
        pixels = random.random((count, rows, PATCH_SIZE, columns, PATCH_SIZE))
        pictures.append(torch.from_numpy(pixels.swapaxes(2, 3).reshape(count, NUM_PATCHES, PATCH_SIZE**2)).float())
        clips.append(torch.from_numpy(random.random((num_sounds, NUM_FRAMES, FRAME_SIZE))).float())
    names = {"input_ids": tokens, "labels": np.where(mask, labels, 0), "loss_mask": mask}
    return {VISION: pictures, SOUND: clips, **{name: torch.from_numpy(values) for name, values in names.items()}}


def share_of(batch: dict[str, Any], index: int, num_shares: int) -> dict[str, Any]:
    """Cut the samples of one replica out of a batch, and give them the form that MimoModel takes."""
    length = len(batch["input_ids"]) // num_shares
    own = slice(index * length, (index + 1) * length)
    tensors = {name: batch[name][own] for name in ("input_ids", "labels", "loss_mask")}
    given = {name: torch.cat(batch[name][own]) for name in TOKENS}
    return {
        **tensors,
        "position_ids": torch.arange(SEQ_LENGTH).expand(length, -1),
        "modality_inputs": {name: {"encoder": {"pieces": one}} for name, one in given.items() if len(one)} or None,
    }


def loss_sums(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses of words, their number, and both for the report."""
    total, num_tokens = (losses.float() * mask).sum(), mask.sum().int()
    return total, num_tokens, {"loss": torch.stack([total.detach(), num_tokens.float()])}
