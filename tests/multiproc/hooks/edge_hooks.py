"""What a cloud could find out about the edge's layers, and what reaches it: nothing here is part of the plugin."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training import get_args
from megatron.training.initialize import _set_random_seed

from tests.multiproc.hooks.in_place import Facts, after, around, before
from tests.multiproc.hooks.leak_watch import Outgoing, Watch, memory_of
from vtp_plugin.api import current_session

# The steps whose activations the cloud keeps, and how many words it tries at each place of a sequence.
_STEPS, _NUM_MICROBATCHES, _NUM_WORDS = (0, 10), 2, 256


def invert_edge(facts: Facts) -> Callable[[], None]:
    """Try to read tokens as the cloud can: by the first layers that ``--seed`` gives, from the activations it gets.

    Notes whether these are the edge's own layers, of how many tokens it is, and how many were read at each step.
    """
    facts["tokens_read"], facts["num_tokens"] = {}, {}
    made: list[tuple[Any, ...]] = []
    seen: list[tuple[torch.Tensor, ...]] = []

    @after(GPTModel, "__init__")
    def keep(_none: None, self: Any, *args: Any, **kwargs: Any) -> None:
        if self.pre_process:
            made.append((self, args, kwargs))

    @after(training, "setup_model_and_optimizer")
    def compare(*_args: Any, **_kwargs: Any) -> None:
        if made:
            chunk, of_chunk, by_name = made[0]
            seen_by_cloud = _drawn_from_the_seed(lambda: GPTModel(*of_chunk, **by_name))
            made[:] = [(chunk, seen_by_cloud)]
            pairs = zip(chunk.parameters(), seen_by_cloud.parameters(), strict=True)
            facts["are_of_the_seed"] = all(torch.equal(own, drawn) for own, drawn in pairs)
            chunk.register_forward_hook(note)

    def note(_chunk: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        seen.append(tuple(value.detach().clone() for value in (*args[:3], output)))

    def finish() -> None:
        for step in _STEPS if made else ():
            rows = seen[step * _NUM_MICROBATCHES : (step + 1) * _NUM_MICROBATCHES]
            facts["num_tokens"][step] = sum(row[0].numel() for row in rows)
            facts["tokens_read"][step] = sum(_num_read(made[0][1], *row) for row in rows)

    return finish


def _drawn_from_the_seed(make: Callable[[], Any]) -> Any:
    """Make a chunk as any process can that knows the flags; this one's random states come back."""
    tracker: Any = get_cuda_rng_tracker()
    states, own, host = tracker.get_states(), torch.cuda.get_rng_state(), torch.get_rng_state()
    options: Any = get_args()
    _set_random_seed(options.seed)
    chunk = make().eval()
    tracker.set_states(states)
    torch.cuda.set_rng_state(own)
    torch.set_rng_state(host)
    return chunk


@torch.no_grad()
def _num_read(
    chunk: Any, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, output: torch.Tensor
) -> int:
    """Read the tokens of a microbatch one after the other: the word whose activation is nearest; count the right ones.

    Args:
        chunk: what the cloud takes for the edge's first layers.
        tokens: the tokens ``[B, S]``; only to offer the right word among others, and to count.
        positions: their places.
        mask: of the attention.
        output: the activations ``[S, B, H]`` that the cloud got.
    """
    generator = torch.Generator().manual_seed(5)
    num_words = int(chunk.embedding.word_embeddings.weight.shape[0])
    num_right = 0
    for row, sample in enumerate(tokens):
        read = torch.zeros_like(sample)
        for place, right in enumerate(sample.tolist()):
            words = torch.randperm(num_words, generator=generator)[:_NUM_WORDS]
            words[0] = right
            tried = read.repeat(len(words), 1)
            tried[:, place] = words[torch.randperm(len(words), generator=generator)]
            drawn = chunk(tried, positions[:1].expand(len(words), -1), mask[:1])
            distances = (drawn[place] - output[place, row]).square().sum(-1)
            read[place] = tried[distances.argmin(), place]
            num_right += int(read[place] == right)
    return num_right


def note_edge(facts: Facts) -> None:
    """Note the start weights of this rank's chunks, with the dimension in which each is cut, and its random states."""

    @after(training, "setup_model_and_optimizer")
    def note(result: Any, *_args: Any, **_kwargs: Any) -> None:
        facts["weights"] = {
            f"{chunk} {name.removeprefix('module.')}": (
                weight.detach().float().numpy().copy(),
                weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None,
            )
            for chunk, model in enumerate(result[0])
            for name, weight in model.named_parameters()
        }
        tracker: Any = get_cuda_rng_tracker()
        facts["states"] = {name: bytes(state.tolist()) for name, state in tracker.get_states().items()}
        facts["states"]["device"] = bytes(torch.cuda.get_rng_state().tolist())
        facts["place"] = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank())


def watch_key(facts: Facts) -> Callable[[], None]:
    """Look for the edge's key in all that leaves this rank of the sizes 2,1; say whether the edge, the cloud got it."""
    edge = range(2 * int(os.environ["WORLD_SIZE"]) // 3)
    watches = [Watch(home=edge), Watch(home=[])]
    watches[1].watch_stores()
    for watch in watches:
        watch.__enter__()

    def finish() -> None:
        for watch in reversed(watches):
            watch.__exit__(None, None, None)
        session = current_session()
        assert session is not None
        stored = [item for item in watches[1].outgoing if item.how.startswith("store")]
        facts["num_messages"] = (len(watches[0].outgoing), len(stored))
        secrets = [key for key in (session.edge_seed.root, session.edge_seed._key) if key is not None]
        facts["is_in"] = {
            name: any(_holds(item, key) for key in secrets for item in items)
            for name, items in (("cloud", watches[0].outgoing), ("edge", watches[1].outgoing), ("store", stored))
        }
        facts["edge_key"] = session.edge_seed.root

    return finish


def _holds(item: Outgoing, key: bytes) -> bool:
    """Tell whether a key is in what left: as bytes, as numbers of any width, as text, or a half of it."""
    values, memory = item.values, item.memory
    if not isinstance(values, bytes) and values.dtype.itemsize > 1:
        memory += bytes(values.to(torch.uint8).flatten().tolist())
    parts = [key, key[:16], key[-16:]]
    return any(form in memory for part in parts for form in (part, part.hex().encode(), str([*part])[1:-1].encode()))


def count_world(facts: Facts) -> None:
    """Note how many collectives over all ranks each save makes, without those of Megatron's timers around it."""
    from vtp_plugin.checkpoint.save import saving

    counts: list[int] = []
    facts["world_collectives"] = []

    def counted(original: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        if counts and (group is None or group is dist.group.WORLD):
            counts[-1] += 1
        return original(*args, **kwargs)

    for name in ("barrier", "all_gather_object", "all_gather", "all_reduce", "broadcast", "broadcast_object_list"):
        around(dist, name)(counted)
    around(dist, "gather_object")(counted)
    before(saving.Savings, "begin")(lambda *_: counts.append(0))
    after(saving.Savings, "end")(lambda *_: facts["world_collectives"].append(counts.pop()))


def watch_weights(facts: Facts) -> Callable[[], None]:
    """Search all that leaves the edge, rank 0, for names and values of its weights and its optimizer's states."""
    planted: dict[str, bytes] = {}
    watch = Watch(home=[0])
    watch.watch_stores()
    watch.__enter__()

    @after(training, "train_step")
    def note(_result: Any, _step: Any, _data: Any, model: Any, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        for chunk in model:
            for name, weight in chunk.named_parameters():
                planted[name.removeprefix("module.")] = name.removeprefix("module.").encode()
                planted[f"values of {name}"] = _piece(weight)
        for number, state in enumerate(optimizer.optimizer.state.values()):
            planted.update({f"state {number} {name}": _piece(values) for name, values in state.items()})

    def finish() -> None:
        watch.__exit__(None, None, None)
        pieces = {name: piece for name, piece in planted.items() if len({*piece}) > 8}
        sent = [item.memory for item in watch.outgoing]
        facts["num_planted"] = len(pieces)
        found = {name: [data[:400] for data in sent if piece in data] for name, piece in pieces.items()}
        facts["crossed"] = {name: data for name, data in found.items() if data}

    return finish if os.environ["RANK"] == "0" else lambda: watch.__exit__(None, None, None)


def send_a_weight(facts: Facts) -> None:
    """Tell all ranks one weight of the edge after each step."""

    @after(training, "train_step")
    def send(_result: Any, _step: Any, _data: Any, model: Any, *_args: Any, **_kwargs: Any) -> None:
        weight = next(model[-1].parameters()) if os.environ["RANK"] == "0" else torch.zeros(1)
        dist.broadcast_object_list([weight.detach().numpy().tobytes()], 0)


def _piece(values: torch.Tensor) -> bytes:
    return memory_of(values)[:64]


def be_an_hour_ahead(facts: Facts) -> None:
    """Let the clock of all ranks but the first, which is the edge's, be an hour ahead."""
    if os.environ["RANK"] != "0":
        around(time, "time")(lambda original: original() + 3600.0)
        around(time, "time_ns")(lambda original: original() + 3600 * 10**9)
