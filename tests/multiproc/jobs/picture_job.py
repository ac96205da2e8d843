"""Jobs that train the model of examples/edge_pictures, over an edge and a cloud or on one rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from picture_model import (
    ENCODER_HIDDEN,
    NUM_PATCHES,
    NUM_PIXELS,
    Setup,
    Training,
    draw_batch,
    loss_of,
    named_parts,
    start,
)

import vtp_plugin
from tests.multiproc.cases.picture_cases import NUM_STEPS, PictureCase, PictureResult
from tests.multiproc.hooks.leak_watch import Watch
from tests.multiproc.jobs.core_job import cpu_only
from tests.multiproc.jobs.split_job import num_split
from tests.support.pool import TIMEOUT_S, init_gloo
from vtp_plugin.errors import ConfigError

WINDOW = 4  # numbers in a row that do not come about by chance


def setup_of(case: PictureCase) -> Setup:
    """Give the example's own form of a case."""
    return Setup(
        sizes=case.sizes,
        encoder_layers=case.encoder,
        language_layers=case.language,
        num_replicas=case.dp_list,
        num_microbatches=case.num_microbatches,
        **dict(case.setup),
    )


@contextmanager
def _applied(case: PictureCase, **options: Any) -> Iterator[None]:
    if case.is_alone:
        with cpu_only():
            yield
        return
    two_rings: dict[str, Any] = {"encoder_layer_list": case.encoder} if len(case.encoder) > 1 else {}
    vtp_plugin.apply(
        vtp_size_list=list(case.sizes),
        vtp_dp_list=list(case.dp_list) or None,
        device="cpu",
        layerwise_disaggregated=True,
        transport=case.transport,
        sites=case.sites or None,
        in_flight=case.in_flight,
        split_backward=case.split_backward,
        timeout_s=TIMEOUT_S,
        **two_rings,
        **options,
    )
    try:
        yield
    finally:
        vtp_plugin.revert()


@contextmanager
def _training(case: PictureCase, **options: Any) -> Iterator[Training]:
    with _applied(case, **options):
        setup = setup_of(case)
        start(setup)
        run = Training(setup)
        try:
            yield run
        finally:
            run.close()
            del run
            parallel_state.destroy_model_parallel()
            gc.collect()


def train(case: PictureCase) -> PictureResult:
    """Train a case on this rank."""
    init_gloo()
    result = PictureResult(losses=[], evaluations=[], norms=[], num_read=0, parts={})
    with _training(case) as run:
        for step in range(NUM_STEPS):
            if case.is_evaluated:
                with torch.no_grad():
                    result.evaluations.append(loss_of(run.run(step, forward_only=True)))
            sums, norm = run.step(step)
            result.losses.append(loss_of(sums))
            result.norms.append(norm)
        result.num_read = run.num_read
        if case.split_backward:
            result.num_split = num_split()
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        for name, parameter, axis in named_parts(run.chunks):
            result.parts[name] = axis, tp_rank, parameter.detach().numpy().copy()
    return result


def watch(case: PictureCase, *, leak: str = "") -> tuple[dict[str, int], list[tuple[str, str]], list[str]]:
    """Train two steps and look at what the edge sends.

    Args:
        case: what to train; the edge has one rank.
        leak: what rank 0 sends to rank 1 besides: ``pictures``, ``tokens``, ``labels`` or ``weights``, those of the
            encoder; or ``place``, by which rank 1 has a part of the encoder that belongs to the edge.

    Returns:
        How many tensors of each type and number of elements left this rank; what was found in them, and in which
        operation; names of this rank's parameters.
    """
    rank = init_gloo()
    with _training(case) as run:
        weights = [p.detach().clone() for n, p, _ in named_parts(run.chunks) if n.startswith("encoder.")]
        with Watch(home=[0]) as watched:
            for step in range(2):
                run.step(step)
                weights += [p.detach().clone() for n, p, _ in named_parts(run.chunks) if n.startswith("encoder.")]
            if leak and leak != "place":
                _leak(leak, rank, run.setup, weights)
        if leak == "place" and rank == 1:
            run.chunks[0].module.register_module("patches", torch.nn.Linear(1, 1))
        names = [name for name, _, _ in named_parts(run.chunks)]
    outgoing = [one for one in watched.outgoing if isinstance(one.values, torch.Tensor)] if rank == 0 else []
    batches = [draw_batch(run.setup, index) for index in range(2 * case.num_microbatches)]
    secrets = {name: [batch[name] for batch in batches] for name in ("pictures", "tokens", "labels")}
    if rank == 0:
        secrets["weights"] = [one for one in weights if not bool((one == one.flatten()[0]).all())]
    windows = {name: _windows(found) for name, found in secrets.items()}
    forms: dict[str, int] = {}
    for one in outgoing:
        key = f"{one.how} {str(one.values.dtype).removeprefix('torch.')} {one.values.numel()}"
        forms[key] = forms.get(key, 0) + 1
    found = [(one.how, name) for one in outgoing for name, some in windows.items() if _windows([one.values]) & some]
    return forms, sorted(set(found)), names


def refusal(case: PictureCase) -> str:
    """Let the encoder's configuration differ from the language model's; return this rank's error."""
    init_gloo()
    with _training(case) as run:
        run.config.calculate_per_token_loss = False
        try:
            run.step(0)
        except ConfigError as error:
            return str(error)
    return "nothing"


def _leak(what: str, rank: int, setup: Setup, weights: Sequence[torch.Tensor]) -> None:
    batch = draw_batch(setup, 1)
    # A matrix of the encoder's first linear layer, or memory of its shape.
    weight = torch.zeros(ENCODER_HIDDEN, NUM_PIXELS)
    if rank == 0:
        weight = next(one for one in weights if one.shape == weight.shape)
    values = {
        "weights": weight.t().double().contiguous(),
        "pictures": batch["pictures"][0, 1:3].double().t().contiguous(),
        "tokens": batch["tokens"][1].float(),
        "labels": batch["labels"][:, NUM_PATCHES:].int(),
    }[what]
    if rank == 0:
        dist.send(values, 1)
    elif rank == 1:
        dist.recv(torch.empty_like(values), 0)


def _windows(tensors: list[torch.Tensor]) -> set[bytes]:
    """List all runs of a few numbers along any dimension, as bytes; runs of one number say nothing."""
    found: set[bytes] = set()
    for tensor in tensors:
        for dim in range(tensor.dim()):
            row = tensor.double().movedim(dim, -1).flatten().numpy()
            if len(row) >= WINDOW:
                runs = np.lib.stride_tricks.sliding_window_view(row, WINDOW)
                found.update(run.tobytes() for run in runs[(runs != runs[:, :1]).any(axis=1)])
    return found
