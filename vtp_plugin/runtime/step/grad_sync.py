"""When the replicas' gradients are summed and their weights gathered: Megatron's hooks, called for each model chunk.

The hooks are the fields ``no_sync_func``, ``grad_sync_func`` and ``param_sync_func`` of Megatron's configuration. Each
is None, one function, or a list with one function for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

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
