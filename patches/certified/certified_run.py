"""Watches a training script on this rank: its start weights, batch, losses, and what its modules give out."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

# Functions are asked of their modules: a name that is taken before the plugin is applied would stay the original.
from megatron.core import parallel_state
from megatron.training import training
from megatron.training.global_vars import get_args

from vtp_plugin.certify.compare import EPS, NORM, START, PartSketch, RankNumbers, kinds
from vtp_plugin.certify.layouts import CertifiedRun
from vtp_plugin.patches.certified.certified_tensors import TensorRecorder, bare, feed, named_parts
from vtp_plugin.platform.detect import detect
from vtp_plugin.runtime.step.sketch import sketch
from vtp_plugin.util.undo import UndoStack

_KILLED_AT: Final = 1  # so that one step has gone well
_NORM_AT: Final = 5  # in what Megatron's train_step returns
Sketches = dict[str, PartSketch]


class Probe:
    """Watches the run of this process, once :meth:`install` was called; the plugin may be applied afterwards.

    Args:
        run: the run.

    Attributes:
        numbers: what this rank saw; None before the last step has ended.
    """

    def __init__(self, run: CertifiedRun) -> None:
        self._run = run
        self._logged: dict[str, tuple[float, ...]] = {}
        self._tensors: dict[str, Sketches] = {}
        self._batch: set[float] = set()
        self._num_steps = 0
        self._recorder: TensorRecorder | None = None
        self.numbers: RankNumbers | None = None

    def install(self) -> None:
        """Take the place of the functions of `megatron.training` that build the model and train a step."""
        for name, call in (("setup_model_and_optimizer", self._set_up), ("train_step", self._step)):
            original = getattr(training, name)
            UndoStack().set(training, name, functools.wraps(original)(functools.partial(call, original)))

    def _set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `setup_model_and_optimizer`, which loads a checkpoint, too; then begin to watch."""
        built = original(*args, **kwargs)
        self._model, self._optimizer = built[0], built[1]
        self._parts = named_parts(self._model, getattr(get_args(), "num_experts", None) or 0)
        self._tensors[START] = self._sketches(is_exact=True)
        if self._run.seed:
            self._change_by_rounding()
        self._start = self._sketches()
        self._watch_gradients()
        if self._run.cuts_samples:
            return built
        self._recorder = TensorRecorder(self._model, 1 / self._run.num_replicas)
        if self._run.fed and parallel_state.get_data_parallel_rank() == 0:
            feed(self._model, Path(self._run.fed), is_kept=self._run.role == "reference")
        self._hooks = [
            bare(chunk).register_forward_pre_hook(self._note_batch, with_kwargs=True) for chunk in self._model
        ]
        return built

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `train_step`."""
        if self._run.killed_rank == dist.get_rank() and self._num_steps == _KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        self._begin_step()
        begin_s = time.perf_counter()
        done = original(*args, **kwargs)
        step_s = time.perf_counter() - begin_s
        self._num_steps += 1
        for name, value in {**done[0], NORM: done[_NORM_AT] or 0.0}.items():
            value = value[0] / value[1] if torch.is_tensor(value) and value.numel() == 2 else value
            self._logged[name] = (*self._logged.get(name, ()), float(value))
        if self.numbers is None:
            self._end_step(step_s)
        return done

    def _begin_step(self) -> None:
        """Name what is recorded in the step that begins, in order of execution."""
        self._kinds = kinds(self._num_steps + 1)
        self._tensors |= {kind: {} for kind in self._kinds if self.numbers is None}
        if self._recorder is not None:
            self._recorder.begin_step(*(self._tensors.get(kind, {}) for kind in self._kinds[:2]))

    def _end_step(self, step_s: float) -> None:
        is_last = self._num_steps == self._run.num_steps
        overlapped = [chunk for chunk in self._model if getattr(get_args(), "overlap_param_gather", False)]
        if overlapped and not is_last:
            return
        for chunk in overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)  # gathers the weights
        self._tensors[self._kinds[-1]] = {
            name: PartSketch(
                values=tuple(a - b for a, b in zip(end.values, self._start[name].values, strict=True)),
                index=end.index,
                count=end.count,
                is_cut=end.is_cut,
                noise=end.noise,
            )
            for name, end in self._sketches().items()
        }
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()
        if not is_last:
            return
        self.numbers = RankNumbers(
            logged=self._logged,
            batch=tuple(self._batch),
            tensors=self._tensors,
            step_s=step_s,
            link=_link(next(iter(self._parts.values())).parameter.device.type) if self._run.role == "start" else (),
        )

    def _sketches(self, *, is_exact: bool = False) -> Sketches:
        """Sketch all weights, as the model has them, or else the whole ones in fp32 that the optimizer keeps."""
        found: Sketches = {}
        args: Any = get_args()
        for name, part in self._parts.items():
            kept = None if is_exact or args.use_distributed_optimizer else getattr(part.parameter, "main_param", None)
            values = part.parameter if kept is None else kept
            eps = EPS["fp32" if values.dtype == torch.float32 else "bf16"]
            found |= part.sketches(name, values, noise=eps * float(values.detach().norm()), is_exact=is_exact)
        return found

    def _watch_gradients(self) -> None:
        """Keep the gradients of each step; those of the distributed optimizer are shards, and are left out."""
        step = self._optimizer.step

        def kept() -> Any:
            args: Any = get_args()
            if self.numbers is None and not args.use_distributed_optimizer:
                found = self._tensors[self._kinds[2]]
                for name, part in self._parts.items():
                    gradient = getattr(part.parameter, "main_grad", part.parameter.grad)
                    if gradient is not None:
                        found |= part.sketches(name, gradient)
            return step()

        UndoStack().set(self._optimizer, "step", kept)

    def _note_batch(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a digest of each row ``[S]`` of tokens or labels of the first step."""
        if self._num_steps:
            for hook in self._hooks:
                hook.remove()
            return
        for value in (*args, kwargs.get("input_ids"), kwargs.get("labels")):
            if torch.is_tensor(value) and value.dtype == torch.int64 and value.dim() == 2:
                self._batch |= {sketch("row", row[None], is_exact=True).values[0] for row in value}

    def _change_by_rounding(self) -> None:
        """Make start weights larger or smaller by the distance of two numbers, for a reference that is changed.

        In fp32 all; in bf16 one in four, since that distance is several times what sums in another order differ by.
        """
        for number, part in enumerate(self._parts.values()):
            generator = torch.Generator().manual_seed(1000 * self._run.seed + number)
            signs = torch.randint(0, 2, part.parameter.shape, generator=generator) * 2 - 1
            is_fp32 = part.parameter.dtype == torch.float32
            eps = EPS["fp32" if is_fp32 else "bf16"]
            signs *= torch.randint(0, 1 if is_fp32 else 4, signs.shape, generator=generator) == 0
            with torch.no_grad():
                part.parameter.mul_((1 + eps * signs).to(part.parameter.device))
        self._optimizer.reload_model_params()


def _link(device: Any) -> tuple[float, ...]:
    """Time the link between ranks 0 and 1; the others learn nothing. All ranks call it."""
    from vtp_plugin.runtime.comm.ping import time_links  # which other runs do without
    from vtp_plugin.tune.cluster.machines import Location

    links = time_links(detect(device), Location(node="", site="", kind=""))
    return (links.inside[""].latency_s, links.inside[""].bytes_per_s) if links else ()
