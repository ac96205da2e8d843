"""Gradients beside the backward: of weights, left for later, of tied weights, and summed over replicas.

When the replicas' gradients are summed and their weights gathered: Megatron's hooks, called for each model chunk.

The hooks are the fields ``no_sync_func``, ``grad_sync_func`` and ``param_sync_func`` of Megatron's configuration. Each
is None, one function, or a list with one function for each chunk.

Split backwards: what the gradients of weights are computed from, kept until their turn comes.

A linear layer's backward gives the gradient of the input alone. What the weight's own gradient needs is kept: the
input, and the gradient of the output, as the operation's backward sees them, after all hooks of users. Later the
gradient is computed, and given to autograd as that of the weight, so that whoever listens there (Megatron's DDP) is
told as by a whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.runtime.comm.channel import BoundChannel, Channel, RecvWork
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import SendWork

Hook = Callable[..., Any]


class GradSync:
    """One step's calls of the hooks.

    A chunk's gradients are complete after its last backward. Without ``grad_sync_func``, Megatron's DDP sums them
    bucket by bucket inside that backward, as soon as the context of ``no_sync_func`` is left. With ``grad_sync_func``,
    that hook starts the sum right after the backward. The first chunk of the first stage is an exception: nothing runs
    after its last backward that could hide the sum. Of a split backward both parts count: norms get their gradients
    with the first, linear layers with the second.

    A pass without backward calls no hook.

    Args:
        config: Megatron's configuration.
        chunks: model chunks of this rank's stage.
        forward_only: whether the pass has no backward.
        is_first_stage: whether this is the first pipeline stage.
        take_turns: whether replicas of this stage share the microbatches of a step. One replica may then need messages
            that are sent only after another has computed, so no forward may wait for another's: the weights of all
            chunks are gathered from the start of the step on.
    """

    def __init__(
        self,
        config: Any,
        chunks: Sequence[torch.nn.Module],
        *,
        forward_only: bool,
        is_first_stage: bool,
        take_turns: bool = False,
    ) -> None:
        self._chunks = chunks
        no_sync, grad_sync, param_sync = (
            None if forward_only else hook
            for hook in (config.no_sync_func, config.grad_sync_func, config.param_sync_func)
        )
        self._no_sync: Sequence[Hook] = [] if no_sync is None else [no_sync] if callable(no_sync) else no_sync
        self._grad_sync = self._per_chunk(grad_sync)
        # As in Megatron's plain pipeline, DDP's own hooks gather the weights of a single chunk.
        self._param_sync = self._per_chunk(param_sync) if len(chunks) > 1 else None
        self._is_first_stage = is_first_stage
        self._gathers_first = take_turns and not forward_only
        self._num_gathered = 0
        self._open = ExitStack()

    def _per_chunk(self, hook: Hook | Sequence[Hook] | None) -> Sequence[Hook] | None:
        return [hook] * len(self._chunks) if callable(hook) else hook

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step: gradients are summed only where :meth:`backward` lets them."""
        if self._gathers_first:
            self._start_gathers()
        self._disable()
        yield
        self._open.close()

    def _start_gathers(self) -> None:
        """Start to gather the weights of all chunks whose forwards wait for that, by hooks of Megatron's DDP."""
        chunks: Sequence[Any] = self._chunks
        for chunk in chunks:
            # Empty where the gathers do not overlap with forwards, and in the first step of megatron.training.
            if getattr(chunk, "remove_forward_pre_hook_handles", None):
                # Tells the hooks not to start the next bucket's gather; the name is Megatron's.
                chunk.ddp_config.align_param_gather = True
                chunk.start_param_sync()
                self._num_gathered = len(self._chunks)

    def before_forward(self, chunk: int) -> None:
        """Start to gather the weights of this chunk and the next one, if that has not begun."""
        if self._param_sync is not None:
            wanted = min(chunk + 2, len(self._chunks))
            for index in range(self._num_gathered, wanted):
                self._param_sync[index](self._chunks[index].parameters())
            self._num_gathered = max(self._num_gathered, wanted)

    @contextmanager
    def backward(self, chunk: int, *, is_last: bool, has_rest: bool = False) -> Iterator[None]:
        """Surround a backward or a part of it; the last of a chunk lets its gradients be summed.

        Args:
            chunk: number of the chunk.
            is_last: whether it is the last of its kind in the step.
            has_rest: whether gradients of weights are still to come.
        """
        is_inside = self._grad_sync is None or (self._is_first_stage and chunk == 0)
        if not is_last or (has_rest and not is_inside):
            yield
            return
        if is_inside:
            self._open.close()
        yield
        self._open.close()
        if self._grad_sync is not None and not is_inside:
            self._grad_sync[chunk](self._chunks[chunk].parameters())
        self._disable()

    def _disable(self) -> None:
        for hook in self._no_sync:
            context: AbstractContextManager[Any] = hook()
            self._open.enter_context(context)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """One rank's part of a word embedding of which several stages hold a copy.

    The first stage has the original. The last stage has a copy where it shares the weight with its output layer, and so
    has the stage of multi-token prediction. Every slice goes straight to the rank whose slice overlaps it, without
    gathering on either stage, so no rank ever holds more than its slice ``[V / tp, H]``. If two stages have different
    numbers of replicas, a replica of the smaller one sends to several of the larger one and receives from one.

    Attributes:
        stage: stage of this rank.
        outgoing: channels to the replicas that receive this one's values, each with the replica's stage.
        incoming: channels from one replica of each other stage, by that stage.
    """

    stage: int
    outgoing: tuple[tuple[int, Channel], ...]
    incoming: Mapping[int, Channel]

    @property
    def is_first(self) -> bool:
        """Whether the rank is in the first stage, whose weight is the original."""
        return self.stage == 0

    def reaches(self, stages: Collection[int]) -> bool:
        """Tell whether there are channels to all of these stages but this rank's own."""
        return set(stages) <= {self.stage, *self.incoming}

    def copy_from_first(self, weight: torch.Tensor, stages: Collection[int]) -> None:
        """Give the other stages the first stage's values, in place; called once by all ranks of ``stages``."""
        if self.is_first:
            for send in [_bound(channel, weight).send(weight) for stage, channel in self.outgoing if stage in stages]:
                send.wait()
        else:
            weight.copy_(_bound(self.incoming[0], weight).post().take())

    def sum_gradients(self, gradient: torch.Tensor, stages: Collection[int]) -> None:
        """Add the other stages' gradients, in place; called once a step by all ranks of ``stages``.

        The replicas of a stage hold the same gradient. All add the same numbers in the order of the stages, so the
        copies of the weight stay equal to the last bit.
        """
        incoming = [channel for stage, channel in sorted(self.incoming.items()) if stage in stages]
        outgoing = [channel for stage, channel in self.outgoing if stage in stages]
        # Post in the order of the run's channels, as in every exchange: a device may run one operation after another.
        receives: dict[Channel, RecvWork] = {}
        sends: list[SendWork] = []
        for channel in sorted((*outgoing, *incoming), key=lambda channel: channel.order):
            bound = _bound(channel, gradient)
            if channel in incoming:
                receives[channel] = bound.post()
            else:
                sends.append(bound.send(gradient))
        received = [receives[channel].take() for channel in incoming]
        for send in sends:
            send.wait()  # the sends read the gradient's memory
        # A sum of two numbers does not depend on their order.
        num_ahead = max(sum(stage < self.stage for stage in stages), 1)
        if received:
            ahead, *others = received[:num_ahead]
            for other in others:
                ahead.add_(other)
            for part in (ahead, *received[num_ahead:]):
                gradient.add_(part)


def _bound(channel: Channel, weight: torch.Tensor) -> BoundChannel:
    """Bind a channel to a weight `[V, H]` of which each rank holds a slice of rows: V divides by all sizes."""
    form = TensorFormat(dtype=weight.dtype, src_sharded=True, dst_sharded=True, requires_grad=False)
    return BoundChannel(channel, form, weight.shape)


def join_tied_weight(channels: Sequence[Channel], layout: PipelineLayout) -> TiedWeight:
    """Make this rank's part of the shared embedding.

    Args:
        channels: channels of this rank, opened from :func:`vtp_plugin.plan.boundary.channel_spec.tied_weight_specs`.
        layout: stages and ranks of the pipeline.
    """
    rank, stage_of = dist.get_rank(), layout.stage_of
    outgoing = [(stage_of(c.spec.dst.ranks[0]), c) for c in channels if rank in c.spec.src.ranks]
    incoming = {stage_of(c.spec.src.ranks[0]): c for c in channels if rank in c.spec.dst.ranks}
    return TiedWeight(stage=stage_of(rank), outgoing=tuple(outgoing), incoming=incoming)


Key = tuple[int, int]
"""Virtual stage and microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """One use of a weight, whose gradient is not computed yet.

    Attributes:
        weight: the parameter, ``[out, in]``.
        tensors: what its gradient is computed from.
        product: computes it.
        versions: how often each tensor was changed in place before.
    """

    weight: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    product: Callable[..., torch.Tensor]
    versions: tuple[int, ...]

    def gradient(self) -> torch.Tensor:
        """Compute the gradient of the weight.

        Raises:
            ConfigError: something that it is computed from was changed in place meanwhile.
        """
        if self.versions != _versions(self.tensors):
            raise ConfigError(
                f"the input of a linear layer with a weight of {list(self.weight.shape)}, or its output's gradient, "
                "was changed in place after its backward; with --vtp-split-backward the gradient of the weight needs "
                "both; change a copy, or leave --vtp-split-backward out"
            )
        return self.product(*self.tensors)


def _versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Count changes; 0 for a part of a larger tensor, which counts those of its other parts, too."""
    return tuple(tensor._version if tensor.untyped_storage().nbytes() == tensor.nbytes else 0 for tensor in tensors)


class WeightGradients:
    """What waits on this rank, by virtual stage and microbatch.

    Attributes:
        is_splitting: whether the compute that runs leaves the gradients of its weights for later.
        always_whole: weights that no backward leaves for later; None until the first step finds them.
    """

    def __init__(self) -> None:
        self.is_splitting = False
        self.always_whole: Collection[torch.Tensor] | None = None
        self._waiting: dict[Key, list[_Waiting]] = {}
        self._current: list[_Waiting] | None = None
        self._whole: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of what waits; a tensor that several uses share counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for uses in self._waiting.values()
            for use in uses
            for tensor in use.tensors
        }
        return sum(storages.values())

    @contextmanager
    def forward(self, whole: Collection[torch.Tensor]) -> Iterator[None]:
        """Let the forward that runs meanwhile be one whose backward is split.

        Args:
            whole: weights whose gradients are not left for later: those that something else than linear layers uses,
                since autograd must sum both gradients of such a weight.
        """
        self._whole = {id(weight) for weights in (whole, self.always_whole or ()) for weight in weights}
        self.is_splitting = True
        try:
            yield
        finally:
            self.is_splitting = False

    @contextmanager
    def backward(self, vstage: int, microbatch: int, whole: Collection[torch.Tensor]) -> Iterator[None]:
        """Keep what the backward meanwhile leaves for later; a forward that it runs again is split, too."""
        self._current = self._waiting.setdefault((vstage, microbatch), [])
        try:
            with self.forward(whole):
                yield
        finally:
            self._current = None

    def is_left_for_later(self, weight: torch.Tensor, inputs: torch.Tensor) -> bool:
        """Tell whether the layer that is about to run leaves the gradient of its weight for later.

        Not without a gradient of the input, since then nothing would run back through the layer; not in the first pass
        of a recompute, which keeps nothing; not where the weight is computed of others, such as a slice of one, since
        these would get a gradient for each.
        """
        return (
            self.is_splitting
            and torch.is_grad_enabled()
            and weight.requires_grad
            and weight.is_leaf
            and inputs.requires_grad
            and id(weight) not in self._whole
        )

    @property
    def is_keeping(self) -> bool:
        """Whether a split backward runs, so that gradients of weights may wait."""
        return self._current is not None

    def keep(self, weight: torch.Tensor, product: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
        """Keep what the gradient of a weight is computed from, or give it at once where the backward is whole.

        Args:
            weight: the parameter, ``[out, in]``.
            product: computes its gradient of the tensors.
            tensors: as the backward of the layer sees them.
        """
        use = _Waiting(weight=weight, tensors=tensors, product=product, versions=_versions(tensors))
        if self._current is None:
            _give([use])
        else:
            self._current.append(use)

    def take(self, entry: torch.Tensor, weight: torch.Tensor) -> None:
        """Keep for a weight the gradient that a backward is about to give to what stands for it in the graph.

        A split backward gives none. But one that a user runs inside a forward is whole, and so is one whose gradients
        a hook of the layer's node wants to see.

        Args:
            entry: a leaf of the graph.
            weight: the parameter for which it stands.
        """

        def take(entry: torch.Tensor) -> None:
            gradient, entry.grad = entry.grad, None
            if gradient is not None:
                self.keep(weight, torch.Tensor.detach, gradient)

        entry.register_post_accumulate_grad_hook(take)

    def compute(self, vstage: int, microbatch: int) -> None:
        """Compute what one split backward has left for later, weight after weight in the order of the backward.

        A weight that was used several times gets the sum, as from autograd. One pass of autograd takes them all, and
        frees each gradient before it comes to the next.

        Raises:
            PlanError: nothing is left: that backward has not run, or its rest is computed already.
        """
        if (vstage, microbatch) not in self._waiting:
            raise PlanError(f"{vstage}W{microbatch} comes before {vstage}I{microbatch}, or twice")
        uses: dict[int, list[_Waiting]] = {}
        for use in self._waiting.pop((vstage, microbatch)):
            uses.setdefault(id(use.weight), []).append(use)
        _give(*uses.values())


def _give(*uses: list[_Waiting]) -> None:
    """Let autograd take the gradients of weights, one after the other; each list has the uses of one weight."""
    # What was made last, autograd computes first. They are empty, as are their gradients.
    with torch.enable_grad():  # a hook of a backward runs without
        outputs = [_Later.apply(own[0].weight, own) for own in reversed(uses)]
    if outputs:
        torch.autograd.backward(outputs, outputs)


class _Later(torch.autograd.Function):
    """Makes an empty tensor, whose backward computes the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, uses: list[_Waiting]) -> torch.Tensor:
        ctx.uses = uses
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        first, *rest = ctx.uses
        del ctx.uses
        gradient = first.gradient()
        for use in rest:
            gradient = gradient + use.gradient()
        return gradient, None
