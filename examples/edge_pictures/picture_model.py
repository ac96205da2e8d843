"""A GPT that sees pictures, cut for an edge and a cloud, and how it trains: a vision encoder, then a language model.

Only names of megatron.core are used. In one ring the whole encoder lies on the edge, in front of the language model's
first layers. In two rings its middle layers are in the cloud, too: what crosses passes the cloud twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlock

PICTURE_SIZE, PATCH_SIZE = (8, 12), 4
NUM_PATCHES, NUM_PIXELS = PICTURE_SIZE[0] * PICTURE_SIZE[1] // PATCH_SIZE**2, PATCH_SIZE**2
VOCAB_SIZE = 108
PICTURE_TOKEN = VOCAB_SIZE - 1  # stands for a patch
SEQ_LENGTH = 18  # of a sample, the picture at its front included
ENCODER_HIDDEN, HIDDEN = 24, 48
NUM_HEADS = 12
MICRO_BATCH_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and how.

    Attributes:
        sizes: tensor-parallel size of every stage.
        encoder_layers: of every part of the encoder's ring; a single number keeps the encoder on the edge.
        language_layers: of every part of the language model; a single number trains all on one stage.
        num_replicas: of every stage; none where all have one number of them.
        num_microbatches: of a step, on every replica of the edge.
        sequence_parallel: on stages of more than one rank.
        is_tied: word embedding and head share their weight.
        some_without: every third sample has no picture, so what crosses has other shapes.
        optimizer: ``sgd`` or ``adam``.
        distributed_optimizer: share its state among the replicas.
        recompute: compute activations again in the backward.
        is_frozen: the encoder is not trained.
    """

    sizes: tuple[int, ...] = (1,)
    encoder_layers: tuple[int, ...] = (3,)
    language_layers: tuple[int, ...] = (4,)
    num_replicas: tuple[int, ...] = ()
    num_microbatches: int = 4
    sequence_parallel: bool = False
    is_tied: bool = False
    some_without: bool = False
    optimizer: str = "sgd"
    distributed_optimizer: bool = False
    recompute: bool = False
    is_frozen: bool = False

    @property
    def num_rings(self) -> int:
        """How often what crosses goes round: 0 on one stage."""
        return (len(self.language_layers) > 1) + (len(self.encoder_layers) > 1)

    def microbatches_of(self, stage: int) -> int:
        """Count the microbatches of a step that a replica of a stage handles: all stages have as many in sum."""
        if not self.num_replicas:
            return self.num_microbatches
        return self.num_microbatches * self.num_replicas[0] // self.num_replicas[stage]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one model chunk holds; of an empty tuple nothing.

    Attributes:
        encoder: first layer of the encoder, and the number of its layers.
        language: the same of the language model.
        is_first, is_last: it takes the pictures; it ends the encoder.
        begins, ends: it has the word embedding; it has the head, and the loss.
    """

    encoder: tuple[int, int] | tuple[()] = ()
    language: tuple[int, int] | tuple[()] = ()
    is_first: bool = False
    is_last: bool = False
    begins: bool = False
    ends: bool = False


def part_of(setup: Setup, stage: int, chunk: int) -> Part:
    """Say what a chunk of a stage holds; on the edge chunk 0, 1 and, in two rings, 2, in the cloud one less."""
    num_stages = len(setup.sizes)
    rows = [list(layers) for layers in (setup.encoder_layers, setup.language_layers) if len(layers) > 1]
    # Along the rings, the edge's last part of the encoder is where its first part of the language model is.
    position = chunk * num_stages + stage
    language_at = position - (num_stages if len(rows) > 1 else 0)
    encoder: tuple[int, int] | tuple[()] = ()
    if len(setup.encoder_layers) == 1:
        encoder = (0, setup.encoder_layers[0]) if position == 0 else ()
    elif position < len(setup.encoder_layers):
        encoder = (sum(setup.encoder_layers[:position]), setup.encoder_layers[position])
    language: tuple[int, int] | tuple[()] = ()
    if 0 <= language_at < len(setup.language_layers):
        language = (sum(setup.language_layers[:language_at]), setup.language_layers[language_at])
    return Part(
        encoder=encoder,
        language=language,
        is_first=position == 0,
        is_last=bool(encoder) and sum(encoder) == sum(setup.encoder_layers),
        begins=language_at == 0,
        ends=language_at == len(setup.language_layers) - 1,
    )


class EncoderPart(torch.nn.Module):
    """Some layers of the vision encoder; the first part turns patches into vectors, the last one fits them for words.

    Args:
        config: of the encoder, with the layers of this part.
        part: what this chunk holds.
    """

    def __init__(self, config: TransformerConfig, part: Part) -> None:
        super().__init__()
        self.config, self.part = config, part
        if part.is_first:
            self.patches = torch.nn.Linear(NUM_PIXELS, ENCODER_HIDDEN)
            self.places = torch.nn.Parameter(torch.zeros(NUM_PATCHES, 1, ENCODER_HIDDEN))
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
        self.block = TransformerBlock(config, spec, post_layer_norm=part.is_last)
        if part.is_last:
            self.projection = torch.nn.Linear(ENCODER_HIDDEN, HIDDEN)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode pictures `[pictures, patches, pixels]`, or continue with `[patches, pictures, hidden]`.

        With sequence parallelism every rank has some of the patches between the parts.
        """
        if self.part.is_first:
            rows = self.patches(rows.transpose(0, 1)) + self.places
            if self.config.sequence_parallel:
                rows = scatter_to_sequence_parallel_region(rows)
        rows = self.block(rows, attention_mask=None)
        if not self.part.is_last:
            return rows
        if self.config.sequence_parallel:
            # Every rank needs all of them, and every rank computes the same with them.
            rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False)
        return self.projection(rows)


class EncoderChunk(MegatronModule):
    """A model chunk with layers of the encoder alone."""

    def __init__(self, config: TransformerConfig, part: Part) -> None:
        super().__init__(config)
        self.part = part
        self.encoder = EncoderPart(config, part)
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Take what the part before has sent; Megatron calls this before every forward."""
        self.received = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, batch: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """Encode what has been received, or the pictures of a batch."""
        return self.encoder(batch["pictures"] if self.part.is_first else self.received)


class PictureGPT(GPTModel):
    """A model chunk with layers of the language model; the one with the word embedding ends the encoder, too."""

    def __init__(
        self, config: TransformerConfig, encoder_config: TransformerConfig, part: Part, **options: Any
    ) -> None:
        super().__init__(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQ_LENGTH,
            pre_process=part.begins,
            post_process=part.ends,
            scatter_embedding_sequence_parallel=False,  # it is cut when the pictures are among the words
            **options,
        )
        self.part = part
        self.encoder = EncoderPart(encoder_config, part) if part.encoder else None
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take what the part before has sent: for the encoder, if it is here, or else for the language model."""
        if self.encoder is None:
            super().set_input_tensor(input_tensor)
        else:
            self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, batch: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """Run the layers; returns the losses `[B, S]` at the end of the model."""
        labels = batch["labels"] if batch is not None and self.post_process else None
        if self.encoder is None or batch is None:
            return super().forward(None, None, None, labels=labels)
        seen = self.encoder(batch["pictures"] if self.part.is_first else self.received)
        places = torch.arange(SEQ_LENGTH).expand_as(batch["tokens"])
        rows = self.embedding(batch["tokens"], places).transpose(0, 1)
        rows = rows.masked_scatter((batch["tokens"] == PICTURE_TOKEN).unsqueeze(-1), seen.transpose(0, 1))
        rows = rows.transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            rows = scatter_to_sequence_parallel_region(rows)
        return super().forward(None, None, None, decoder_input=rows, labels=labels)


def make_configs(setup: Setup) -> tuple[TransformerConfig, TransformerConfig]:
    """Make the configurations of encoder and language model on this rank."""
    size, num_stages = parallel_state.get_tensor_model_parallel_world_size(), len(setup.sizes)
    recompute: dict[str, Any] = {}
    if setup.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    encoder = TransformerConfig(
        num_layers=sum(setup.encoder_layers),
        hidden_size=ENCODER_HIDDEN,
        num_attention_heads=NUM_HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=size,
        sequence_parallel=setup.sequence_parallel and size > 1,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=setup.some_without and setup.num_rings > 1,
        moe_token_dispatcher_type="alltoall",  # the default does not take variable lengths, experts or not
        batch_p2p_comm=False,
        calculate_per_token_loss=True,  # microbatches have different numbers of words
        **recompute,
    )
    # The layers of the encoder's parts are no layers of this model: the encoder's ring is empty here.
    parts = [["decoder"] * number for number in setup.language_layers]
    layout = [[] for _ in range(num_stages * (setup.num_rings - 1))]
    layout += [["embedding", *parts[0]], *parts[1:-1], [*parts[-1], "loss"], *([] for _ in range(num_stages - 1))]
    language = replace(
        encoder,
        num_layers=sum(setup.language_layers),
        hidden_size=HIDDEN,
        ffn_hidden_size=4 * HIDDEN,
        kv_channels=HIDDEN // NUM_HEADS,
        pipeline_model_parallel_size=num_stages,
        virtual_pipeline_model_parallel_size=setup.num_rings + 1 if setup.num_rings else None,
        pipeline_model_parallel_layout=layout if setup.num_rings else None,
    )
    return encoder, language


def make_chunks(setup: Setup) -> list[EncoderChunk | PictureGPT]:
    """Build this rank's chunks: of the edge one more than there are rings, of the cloud one for each ring."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    encoder_config, language_config = make_configs(setup)
    chunks: list[EncoderChunk | PictureGPT] = []
    for number in range(setup.num_rings + (stage == 0)):
        part = part_of(setup, stage, number)
        own = replace(encoder_config, num_layers=part.encoder[1]) if part.encoder else encoder_config
        if part.language:
            chunk = PictureGPT(
                language_config,
                own,
                part,
                share_embeddings_and_output_weights=setup.is_tied,
                vp_stage=number if setup.num_rings else None,
            )
        else:
            chunk = EncoderChunk(own, part)
        chunks.append(chunk)
    return chunks


def named_parts(chunks: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter, int | None]]:
    """Yield name, parameter and the axis that tensor-parallel ranks share; layers are numbered over the whole model."""
    for chunk in chunks:
        bare = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        firsts = {"encoder.block": bare.part.encoder[:1], "decoder": bare.part.language[:1]}
        for name, parameter in bare.named_parameters():
            head, found, tail = name.partition(".layers.")
            if found:
                number, _, rest = tail.partition(".")
                name = f"{head}.layers.{int(number) + firsts[head][0]}.{rest}"
            yield (
                name,
                parameter,
                parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
            )


def draw_weights(chunks: list[Any]) -> None:
    """Give the weights values that depend on their names only, the same in every layout."""
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    for name, parameter, axis in named_parts(chunks):
        shape = [length * (size if dim == axis else 1) for dim, length in enumerate(parameter.shape)]
        # A head that shares the embedding's weight is another parameter there.
        drawn = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
        values = np.random.default_rng(zlib.crc32(drawn.encode())).normal(scale=0.1, size=shape)
        whole = torch.from_numpy(values).float() + float("norm.weight" in name)
        with torch.no_grad():
            parameter.copy_(whole if axis is None else whole.chunk(size, dim=axis)[rank])


def draw_batch(setup: Setup, index: int) -> dict[str, torch.Tensor]:
    """Generate a microbatch by its number in the run: pictures at the front of the samples, then words.

    Returns:
        ``tokens``, ``labels`` and ``mask`` of all samples, and ``pictures`` `[pictures, patches, pixels]` of those that
        have one; at least one has.
    """
    random = np.random.default_rng(1000 + index)
    words = random.integers(0, PICTURE_TOKEN, size=(MICRO_BATCH_SIZE, SEQ_LENGTH + 1))
    tokens, labels, mask = words[:, :-1].copy(), words[:, 1:].copy(), np.ones((MICRO_BATCH_SIZE, SEQ_LENGTH))
    with_picture = [i for i in range(MICRO_BATCH_SIZE) if i == 0 or not setup.some_without or index % 3]
    for sample in with_picture:
        tokens[sample, :NUM_PATCHES] = PICTURE_TOKEN
        mask[sample, :NUM_PATCHES] = 0
    rows, columns = (size // PATCH_SIZE for size in PICTURE_SIZE)
    pixels = random.random((len(with_picture), rows, PATCH_SIZE, columns, PATCH_SIZE))
    pictures = pixels.swapaxes(2, 3).reshape(len(with_picture), NUM_PATCHES, NUM_PIXELS)
    found = {"pictures": pictures.astype(np.float32), "tokens": tokens, "labels": labels, "mask": mask.astype(np.int64)}
    return {name: torch.from_numpy(values) for name, values in found.items()}


class Training:
    """Model and optimizer of this rank; made when Megatron has its groups."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.num_read = 0
        self.num_microbatches = setup.microbatches_of(parallel_state.get_pipeline_model_parallel_rank())
        chunks = make_chunks(setup)
        draw_weights(chunks)
        for chunk in chunks:
            if setup.is_frozen and chunk.encoder is not None:
                chunk.encoder.requires_grad_(False)
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=setup.distributed_optimizer
        )
        self.chunks = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=setup.optimizer,
                lr={"sgd": 0.1, "adam": 0.01}[setup.optimizer],
                clip_grad=1.0,
                use_distributed_optimizer=setup.distributed_optimizer,
            ),
            self.chunks,
        )
        # Megatron reads these from the configuration of the first chunk.
        self.config = chunks[0].config
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    def close(self) -> None:
        """Break the cycles that would keep process groups alive."""
        self.config.grad_scale_func = self.config.finalize_model_grads_func = None
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if hasattr(parameter, "main_param"):
                    del parameter.main_param
        del self.optimizer

    def batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the microbatches of this replica; every chunk of the edge that needs data reads all of them."""
        num_replicas = parallel_state.get_data_parallel_world_size()
        for number in range(self.num_microbatches):
            self.num_read += 1
            index = (step * self.num_microbatches + number) * num_replicas
            yield draw_batch(self.setup, index + parallel_state.get_data_parallel_rank())

    def forward_step(self, iterator: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple[torch.Tensor, Any]:
        """Run one microbatch through a chunk; the cloud reads nothing."""
        part = chunk.module.part
        batch = next(iterator) if part.is_first or part.begins or part.ends else None

        def loss_sums(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            assert batch is not None
            total, num_words = (losses.float() * batch["mask"]).sum(), batch["mask"].sum().int()
            return total, num_words, {"loss": torch.stack([total.detach(), num_words.float()])}

        return chunk(batch), loss_sums

    def run(self, step: int, *, forward_only: bool = False) -> list[tuple[float, float]]:
        """Run all microbatches; returns sum of the losses and number of words of each one, on the edge."""
        # In the first of two rings what crosses has a row for each patch, in the second one for each word.
        lengths = {"seq_length": NUM_PATCHES, "decoder_seq_length": SEQ_LENGTH}
        reports = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=[self.batches(step) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=self.num_microbatches,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=forward_only,
            **(lengths if self.setup.num_rings > 1 else {"seq_length": SEQ_LENGTH}),
        )
        return [(float(report["loss"][0]), float(report["loss"][1])) for report in reports]

    def step(self, step: int) -> tuple[list[tuple[float, float]], float]:
        """Train one step; returns what :meth:`run` does, and the norm of the gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self.run(step)
        _, norm, _ = self.optimizer.step()
        return sums, float(norm)


def start(setup: Setup) -> None:
    """Let Megatron make its groups; the process group of all ranks is there."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=len(setup.sizes),
        virtual_pipeline_model_parallel_size=setup.num_rings + 1 if setup.num_rings else None,
    )
    model_parallel_cuda_manual_seed(7)  # dropout asks for it, even for none


def loss_of(sums: list[tuple[float, float]]) -> float:
    """Average over the words of all replicas of the edge; the ranks of other stages give nothing."""
    group = parallel_state.get_data_parallel_group()
    total = torch.tensor([[loss, words] for loss, words in sums] or [[0.0, 0.0]], dtype=torch.float64).sum(0)
    dist.all_reduce(total, group=group)
    return float(total[0] / total[1]) if total[1] else 0.0
