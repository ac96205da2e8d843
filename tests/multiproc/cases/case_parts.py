"""The parts of a training case: which stages, what model, which data, what arithmetic, how it runs, what is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Plugin = Literal["on", "forced", "reverted", "stock", "mapped"]

HIDDEN = 24
HEADS = 12  # 1, 2, 3 and 4 divide it
FFN = 48
VOCAB = 36
SEQ = 9
MICRO_BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages and the ranks of each. A uniform run of other stages computes the same.

    Attributes:
        sizes: tensor-parallel size of every stage.
        dp: replicas of the pipeline.
        dp_list: data-parallel size of every stage; empty means ``dp`` on all.
        dp_mode: how stages of different ones work together.
        cp: context-parallel size; needs the attention of the tests.
        cp_list: context-parallel size of every stage; empty means ``cp`` on all.
        ep, etp: Megatron's expert-parallel size, and tensor-parallel size of the experts.
        ep_list, etp_list: these sizes of every stage; empty means ``ep`` and ``etp`` on all.
        order: of ranks, as Megatron writes it.
        sites: site of every stage; empty means one.
    """

    sizes: tuple[int, ...]
    dp: int = 1
    dp_list: tuple[int, ...] = ()
    dp_mode: Literal["multiplex", "split"] = "multiplex"
    cp: int = 1
    cp_list: tuple[int, ...] = ()
    ep: int = 1
    etp: int | None = None
    ep_list: tuple[int, ...] = ()
    etp_list: tuple[int, ...] = ()
    order: str = "tp-cp-ep-dp-pp"
    sites: tuple[str, ...] = ()

    @property
    def dp_sizes(self) -> tuple[int, ...]:
        return self.dp_list or (self.dp,) * len(self.sizes)

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        return self.cp_list or (self.cp,) * len(self.sizes)

    @property
    def is_uniform(self) -> bool:
        lists = (self.ep_list, self.etp_list)
        is_equal = len(set(zip(self.sizes, self.cp_sizes, self.dp_sizes, strict=True))) == 1
        return is_equal and all(len(set(sizes)) <= 1 for sizes in lists)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained, and how its layers are shared out among stages and chunks.

    Attributes:
        hidden: size of the hidden states.
        layers_per_chunk: transformer layers of every chunk.
        vpp: model chunks per stage; 2 and more use the interleaved schedule.
        layers: makes the pipeline U-shaped: layers of the edge's first part, of every cloud stage, of the edge's last.
        layout: Megatron's pipeline layout; empty shares out the layers evenly, and prediction is on the last stage.
        embedding_stages: stages that the script says hold the word embedding, with a layout; empty for those that do.
        tied: the output layer has the weight of the word embedding.
        has_bias: of linear layers. The key bias has no true gradient, so rounding decides whether it counts as zero.
        attention: one of the kinds in ``attentions.py``; empty is Megatron's default.
        gathered_attention: use the attention of the tests.
        mtp: layers of multi-token prediction; they need rotary positions.
        experts: one of the kinds in ``experts.py``; empty has none.
        shards: of a reference, for every stage: tp and cp sizes whose ranks decide for themselves which tokens they
            drop. Empty lets Megatron decide among all tokens of a rank.
        is_drawn: start weights depend on nothing but their names; for what Megatron cannot save. Models with experts
            always start so.
    """

    hidden: int = HIDDEN
    layers_per_chunk: int = 1
    vpp: int = 1
    layers: tuple[int, ...] = ()
    layout: str = ""
    embedding_stages: tuple[int, ...] = ()
    tied: bool = False
    has_bias: bool = True
    attention: str = ""
    gathered_attention: bool = False
    mtp: int = 0
    experts: str = ""
    shards: tuple[tuple[int, int], ...] = ()
    is_drawn: bool = False

    @property
    def num_virtual(self) -> int:
        """Megatron's virtual pipeline size. In a U the edge has two chunks, and the cloud's second ones stay empty."""
        return 2 if self.layers else self.vpp


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What the model reads, and in how many steps.

    Attributes:
        micro_batch: samples of a microbatch on the stage with most replicas.
        num_microbatches: per step and replica of the stage with the loss.
        rampup: every step has one more than the one before.
        seq: longest sequence; sequence parallelism needs a multiple of every size.
        varying_lengths: every microbatch has another sequence length.
        length_step: difference of the lengths.
        partial_batches: every third microbatch has one sample fewer; needs varying shapes.
        masked: a part of the tokens does not count.
        padded: routers are told that these are padding.
    """

    micro_batch: int = MICRO_BATCH
    num_steps: int = 4
    num_microbatches: int = 5
    rampup: bool = False
    seq: int = SEQ
    varying_lengths: bool = False
    length_step: int = 2
    partial_batches: bool = False
    masked: bool = False
    padded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What a step computes of the losses: a run and the one that it must equal have the same.

    Attributes:
        dtype: of weights and activations; gradients are always summed in fp32.
        optimizer: Megatron's distributed optimizer takes "adam" only.
        clip: largest gradient norm; 0 clips nothing.
        loss_scale: constant one; fp16 without it scales dynamically.
        per_token_loss: gradients are divided by the tokens of a step.
        loss_tuple: length of what the loss function returns.
        count_zeros: of the gradients.
    """

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip: float = 1.0
    loss_scale: float | None = None
    per_token_loss: bool = False
    loss_tuple: Literal[2, 3] = 2
    count_zeros: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How the run does it: nothing of this may change what it computes.

    Attributes:
        plugin: "on" applies it, "forced" for a uniform list too; "stock" is Megatron alone, on the CPU mapping, and
            "mapped" the same with what it needs on CPUs for sequence parallelism and experts; "reverted" trains with
            the plugin, takes it back and then trains as stock.
        schedule: "planned" runs the plugin's executor.
        in_flight: most microbatches in flight on every stage, of a planned schedule; empty for the default.
        split_backward: gradients of weights are computed where a stage would wait.
        vpp_group_size: microbatches that a chunk takes in a row; Megatron's default is the number of stages.
        transport: of all boundaries.
        sequence_parallel: on every stage of more than one tensor-parallel rank.
        bucket_size: parameters per gradient bucket.
        align_grad_reduce: Megatron's option: sums of gradients begin where the schedule says, not in the backward.
        sums_loss: the loss function sums over the replicas of its stage, as in the scripts of Megatron 0.12. What is
            reported is still the loss of this replica.
    """

    plugin: Plugin = "on"
    schedule: Literal["stock", "planned"] = "stock"
    in_flight: tuple[int, ...] = ()
    split_backward: bool = False
    vpp_group_size: int | None = None
    transport: str = "auto"
    batch_p2p: bool = False
    overlap_p2p: bool = False
    sequence_parallel: bool = False
    recompute: bool = False
    deallocate: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_grad_reduce: bool = True
    bucket_size: int = 3000
    sums_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What a test does beside the training, and wants to have back.

    Attributes:
        num_evaluations: forward-only passes before every training step.
        collects: these passes collect data other than the loss, which is the loss here.
        inf_at: (stage, tp_rank, step): one element of a gradient of this rank becomes an inf there.
        inf_cp_rank: only in this context-parallel replica, before its gradients are summed with the others'; None is in
            all of them, after that.
        inf_dp_rank: only in this data-parallel replica, after its gradients were summed with the others'; None is in
            all of them.
        save, load: directories of distributed checkpoints of the start weights.
        wants_weights: return the weights after the last step.
        wants_tied: return both ends of the tied embedding at the start and after every step.
    """

    num_evaluations: int = 0
    collects: bool = False
    inf_at: tuple[int, int, int] | None = None
    inf_cp_rank: int | None = None
    inf_dp_rank: int | None = None
    save: str | None = None
    load: str | None = None
    wants_weights: bool = False
    wants_tied: bool = False
