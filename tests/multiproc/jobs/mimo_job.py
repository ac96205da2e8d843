"""Jobs that train the multimodal model of examples/mimo, over two grids or on one rank."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mimo_model
import mimo_steps
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from mimo_model import LANGUAGE, SOUND, VISION, draw_batch, named_parts, own_modules
from mimo_steps import Alone, Spread
from torch.distributed.distributed_c10d import _pg_map

import vtp_plugin
from tests.multiproc.cases.mimo_cases import NUM_STEPS, MimoCase, MimoResult, Part
from tests.multiproc.hooks.gathered_attention import GatheredAttention
from tests.multiproc.hooks.leak_watch import Watch
from tests.multiproc.jobs.bridge_job import wait_for_sends
from tests.multiproc.jobs.core_job import cpu_only
from tests.ordering.recorder import Recorder
from tests.ordering.trace import format_trace
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.errors import ConfigError
from vtp_plugin.platform.cpu import CpuPlatform
from vtp_plugin.platform.detect import detect
from vtp_plugin.runtime.bridges import separate as bridge_groups


class AttentionToAll(GatheredAttention):
    """Attention without a mask, as encoders have it."""

    is_causal = False


ATTENTION = {VISION: AttentionToAll, SOUND: AttentionToAll, LANGUAGE: GatheredAttention}


def train(case: MimoCase) -> MimoResult:
    """Train a case on this rank."""
    init_gloo()
    with _applied(case):
        run = _make(case)
        try:
            return _train(case, run)
        finally:
            run.close()
            del run
            gc.collect()
            left = [group.group_desc for group in _pg_map]
            assert left == ["default_pg"], left


def _train(case: MimoCase, run: Any) -> MimoResult:
    steps: list[tuple[float, float, float]] = []
    gradients: dict[str, Any] = {}

    def keep(model: Any) -> None:
        # The distributed optimizer has only shards of the sums.
        if not steps and not case.distributed_optimizer:
            gradients.update((name, _gradient_of(part)) for name, part, _ in named_parts(model) if part.requires_grad)

    run.on_gradients = keep
    if case.counts_in_megatron:
        run.model.config.finalize_model_grads_func = functools.partial(_finalize, run)
    for step in range(NUM_STEPS):
        steps.append(run.step(draw_batches(case, step)))
    if isinstance(run, Spread) and not case.is_stock and not case.is_frozen:
        bridges = [one.vtp_bridge for one in run.communicator.bridge_comms if one.vtp_bridge is not None]
        assert bridges or run.own_name == LANGUAGE
        for bridge in bridges:
            kept = sum(not work.is_done for work in bridge._opens._works)
            # Activations go when their gradients have come, gradients at the latest with the next step.
            assert kept <= (len(case.pictures) if run.own_name == LANGUAGE else 0), f"{kept} tensors are kept"
    assert case.is_planned == hasattr(getattr(run, "communicator", None), "vtp_modules"), "another schedule ran"
    tp_rank = 0 if isinstance(run, Alone) else run.groups.tp.rank()
    parts = {
        name: Part(axis=axis, tp_rank=tp_rank, values=part.detach().float().numpy(), gradient=gradients.get(name))
        for name, part, axis in named_parts(run.model)
    }
    return MimoResult(steps=steps, parts=parts)


def evaluate(case: MimoCase) -> tuple[list[tuple[float, float]], str]:
    """Compute losses, train a step between, and compute them again; return them, and the order of a training step."""
    init_gloo()
    with _applied(case):
        run = _make(case)
        try:
            losses = []
            with torch.no_grad():
                losses.append(run.run(draw_batches(case, 0), forward_only=True))
            run.step(draw_batches(case, 0))
            with torch.no_grad():
                losses.append(run.run(draw_batches(case, 0), forward_only=True))
            modules = getattr(run.communicator, "vtp_modules", None)
            number = len(case.pictures)
            order = modules and modules.runner.schedule(number, forward_only=False, group_size=None)
            return losses, order.describe() if order else ""
        finally:
            run.close()
            del run
            gc.collect()


def refused(case: MimoCase, topology: dict[str, list[str]] | None, *, is_fixed: bool) -> str:
    """Train a step of modules that no planned order fits; return this rank's error."""
    init_gloo()
    with _applied(case):
        run = _make(case)
        try:
            if topology is not None:
                run.communicator.topology = topology
            run.model.config.variable_seq_lengths = not is_fixed
            run.step(draw_batches(case, 0))
        except ConfigError as error:
            return str(error)
        finally:
            run.close()
            del run
            gc.collect()
    return "nothing"


def resume(case: MimoCase, path: str) -> list[str]:
    """Train with a checkpoint in the middle, and again from it; return what differs on this rank."""
    init_gloo()
    results = []
    with _applied(case):
        for is_second in (False, True):
            run = _make(case)
            try:
                if is_second:
                    with torch.no_grad():
                        for parameter in run.model.parameters():
                            parameter.zero_()
                    run.load(path)
                steps = []
                for step in range(RESUMED_AT if is_second else 0, NUM_STEPS):
                    if step == RESUMED_AT and not is_second:
                        run.save(path)
                    steps.append(run.step(draw_batches(case, step)))
                parts = {name: part.detach().clone() for name, part, _ in named_parts(run.model)}
            finally:
                run.close()
                del run
                gc.collect()
            results.append((steps[-(NUM_STEPS - RESUMED_AT) :], parts))
    (steps, parts), (resumed, others) = results
    problems = [f"losses and norms {steps} are {resumed} after the checkpoint"] if steps != resumed else []
    return problems + [name for name, part in parts.items() if not torch.equal(part, others[name])]


RESUMED_AT = 2


def record(case: MimoCase) -> str:
    """Train two steps as on devices; return the trace of what this rank issued."""
    init_gloo()
    with pytest.MonkeyPatch.context() as patch, Recorder(detect("cpu")) as recorder:
        patch.setattr(CpuPlatform, "gathers_by_messages", False)
        patch.setattr(CpuPlatform, "orders_by_peer", False)
        patch.setattr(bridge_groups, "coalesces", lambda _platform: True)
        with _applied(case):
            run = _make(case)
            try:
                for step in range(2):
                    run.step(draw_batches(case, step))
                for bridge in run.communicator.bridge_comms:
                    wait_for_sends(bridge)
            finally:
                run.close()
                del run
                gc.collect()
        return format_trace(recorder.trace())


def watch_pictures(case: MimoCase, *, leak: str = "") -> tuple[int, list[str]]:
    """Train two steps; return how many tensors left the encoders' ranks, and how those went that show a secret.

    Secrets are the pictures, and the encoders' weights before, between and after the steps.

    Args:
        case: what to train.
        leak: what goes to the language model besides: a part of a ``picture``, or of a ``weight``.
    """
    rank = init_gloo()
    first_language = case.world_size - (case.language.num_ranks if case.language else 0)
    with _applied(case):
        run = _make(case)
        weights = _copies_of_weights(run.model)
        try:
            with Watch(home=range(first_language)) as watch:
                for step in range(2):
                    run.step(draw_batches(case, step))
                    weights += _copies_of_weights(run.model)
                part = draw_batches(case, 0)[0][VISION][1][0, 2:4].double().t().contiguous()
                if leak == "weight":
                    part = weights[-1][:5].clone()
                if leak and rank == 0:
                    dist.send(part, first_language)
                elif leak and rank == first_language:
                    dist.recv(part, 0)
        finally:
            run.close()
            del run
            gc.collect()
    pictures = [one for step in range(2) for batch in draw_batches(case, step) for one in batch[VISION]]
    secrets = torch.cat([*(one.flatten().double() for one in pictures), *weights])
    outgoing = watch.outgoing if rank < first_language else []
    found = [
        one.how
        for one in outgoing
        if isinstance(one.values, torch.Tensor)
        # Of hundreds of float32 numbers two have been those of weights by chance, on one kind of processor; an injected
        # leak has five.
        and int(torch.isin(one.values.flatten().double(), secrets).sum()) > 3
    ]
    return len(outgoing), found


def _copies_of_weights(model: Any) -> list[torch.Tensor]:
    return [part.detach().flatten().double() for _, part, _ in named_parts(model)]


def average(case: MimoCase) -> str:
    """Build modules that average their losses and gradients over their replicas; return this rank's error."""
    init_gloo()
    make_config = mimo_model.make_config

    def make_averaging(*arguments: Any) -> Any:
        return dataclasses.replace(make_config(*arguments), calculate_per_token_loss=False)

    with _applied(case):
        mimo_model.make_config = make_averaging
        try:
            _make(case).close()
        except ConfigError as error:
            parallel_state.destroy_global_memory_buffer()
            return str(error)
        finally:
            mimo_model.make_config = make_config
    return "nothing"


def draw_batches(case: MimoCase, step: int) -> list[dict[str, Any]]:
    clips = [list(counts) for counts in case.clips] or [None] * len(case.pictures)
    return [
        draw_batch(1000 * step + index, list(counts), sounds)
        for index, (counts, sounds) in enumerate(zip(case.pictures, clips, strict=True))
    ]


def _make(case: MimoCase) -> Any:
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    if case.vision is None or case.language is None:
        encoders = (VISION, SOUND) if case.clips else (VISION,)
        return Alone(
            ATTENTION,
            is_frozen=case.is_frozen,
            clip=case.clip,
            optimizer=case.optimizer,
            encoders=encoders,
            dtype=dtype,
        )
    sizes = {VISION: case.vision, **({SOUND: case.sound} if case.sound else {}), LANGUAGE: case.language}
    run = Spread(
        sizes,
        ATTENTION,
        is_frozen=case.is_frozen,
        clip=case.clip,
        optimizer=case.optimizer,
        distributed_optimizer=case.distributed_optimizer,
        overlap=case.overlap,
        dtype=dtype,
    )
    if case.has_fixed_shape:
        share = sum(case.pictures[0]) // case.vision.dp * mimo_model.NUM_PATCHES
        for bridge in run.communicator.bridge_comms:
            bridge.fixed_shape = (share, mimo_model.HIDDEN[LANGUAGE])
    return run


@contextmanager
def _applied(case: MimoCase) -> Iterator[None]:
    """Put our bridges in place, or let Megatron's run over gloo."""
    if case.is_stock:
        with cpu_only(), _stock_on_gloo():
            yield
        return
    vtp_plugin.apply(
        device="cpu",
        bridges=True,
        timeout_s=TIMEOUT_S,
        audit=case.audit,
        schedule="planned" if case.is_planned else "stock",
        in_flight=case.in_flight,
    )
    try:
        yield
    finally:
        vtp_plugin.revert()


def _finalize(run: Spread, _models: Any, num_tokens: torch.Tensor, **options: Any) -> None:
    """Let Megatron divide the language model's gradients; the encoder has to be told the number."""
    options["pg_collection"] = run.groups
    (module,) = own_modules(run.model).values()
    is_language = run.own_name == LANGUAGE
    finalize_model_grads([module], num_tokens if is_language else None, **options)
    total = num_tokens.float() if is_language else torch.zeros([])
    # Replicas and stages have the same number by now.
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    if not is_language:
        module.scale_gradients(1.0 / total.item())


def tie(case: MimoCase) -> str:
    """Build a model whose language model shares the embedding of its ends; return this rank's error."""
    init_gloo()
    make, optimizer = mimo_model.GPTModel.__init__, mimo_steps.get_mimo_optimizer

    def share(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **{**options, "share_embeddings_and_output_weights": True})

    def stop(*_arguments: Any) -> None:
        raise ConfigError("built")

    with _applied(case):
        mimo_model.GPTModel.__init__, mimo_steps.get_mimo_optimizer = share, stop
        try:
            _make(case)
        except ConfigError as error:
            return str(error)
        finally:
            mimo_model.GPTModel.__init__, mimo_steps.get_mimo_optimizer = make, optimizer
            parallel_state.destroy_global_memory_buffer()
    return "nothing"


def _gradient_of(part: torch.nn.Parameter) -> Any:
    gradient = part.main_grad if hasattr(part, "main_grad") else part.grad
    return gradient.detach().float().clone().numpy()


@contextmanager
def _stock_on_gloo() -> Iterator[None]:
    """Let Megatron's bridge, whose groups ask for NCCL, have the world's backend."""
    kept = {
        name: BridgeCommunicator.__dict__[name] for name in ("_get_or_create_broadcast_pg", "_get_or_create_bridge_pg")
    }
    mimo_steps.use_gloo()
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(BridgeCommunicator, name, method)
