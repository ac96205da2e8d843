"""Trains a small model, lets its states cross cuts of several depths, and measures what each attack names right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.leak.attacks import Inverter, labels_from_gradients, name_clusters, search_tokens, train_inverter
from vtp_plugin.leak.small_gpt import GPTSizes, SmallGPT, noisy, read_sequences, share, train

Start = Literal["published", "scratch", "recorded"]
STARTS: tuple[Start, ...] = ("published", "scratch")
NOISES = (0.1, 0.3)
# The right token of an exact search; what it misses says that the attack is broken, not that the cut holds.
LEAST_EXACT = 0.95
_NUM_TRIED = 256
_ALL = slice(None)
_INVERTERS = {"trained inverter": _ALL, "trained inverter, a tenth": slice(None, None, 10)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What one attack found.

    Attributes:
        start: where the private training began: at a base that is published, or at random weights of a known seed; or
            that the states were recorded.
        edge_layers: number of layers before the cut; for labels those behind the last one; 0 of a recorded run.
        name: what the reader knew, and did.
        share: tokens that were named right, from 0 to 1.
        loss_more: what noise on the line adds to the loss; None without noise.
    """

    start: Start
    edge_layers: int
    name: str
    share: float
    loss_more: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """What was measured.

    Attributes:
        num_trained_tokens: tokens that the inverter was trained on at most.
        by_frequency: share that naming the most frequent token reaches.
        attacks: one row for each start, depth and attack.
        sizes: the model, and the text that was held out; None of a recorded run.
        one_seed: tokens that are found with the start weights of one seed: a control, which must be all.
        num_of_seed: number of the tokens that were tried so.
    """

    num_trained_tokens: int
    by_frequency: float
    attacks: tuple[Attack, ...]
    sizes: GPTSizes | None = None
    one_seed: int = 0
    num_of_seed: int = 0


def measure(sizes: GPTSizes, edge_layers: Sequence[int], say: Callable[[str], None]) -> Leak:
    """Measure what a cut behind so many layers gives away.

    Args:
        sizes: the model, and the text.
        edge_layers: depths of the cut.
        say: told what is done next, a line each.

    Raises:
        ConfigError: a depth leaves no layer behind the cut.
        RuntimeError: the exact search misses tokens: the attack is broken, and says nothing.
    """
    if wrong := [number for number in edge_layers if not 0 < number < sizes.num_layers]:
        raise ConfigError(f"--edge-layers {wrong[0]} of {sizes.num_layers} layers; give 1 to {sizes.num_layers - 1}")
    rows, held_out = read_sequences(sizes)
    counts = rows.flatten().bincount(minlength=sizes.vocab)
    start = SmallGPT(sizes, seed=0)
    own, first = held_out[:2, :-1], edge_layers[0]
    seen = start.states(own, first).detach()
    one_seed = (search_tokens(start, first, seen, _taught(start, first, rows)[0]) == own).sum().item()
    half = len(rows) // 2
    found: list[Attack] = []
    for name in STARTS:
        known, own_rows = copy.deepcopy(start), rows
        if name == "published":
            say("trains a base on the half of the text that is public")
            known, own_rows = train(known, rows[:half], sizes.num_epochs), rows[half:]
        say(f"trains the private model, {name}")
        private = copy.deepcopy(known).requires_grad_()
        private = train(private, own_rows, max(1, sizes.num_epochs // 2), lr=3e-4 if name == "published" else 1e-3)
        for number in edge_layers:
            say(f"reads what crosses behind {number} layers, {name}")
            found += _attacks(name, number, private, known, rows, held_out, counts)
        gradients = _gradients(private, sizes.num_layers - 1, held_out)
        labels = share(labels_from_gradients(known, gradients), held_out[:, 1:])
        found.append(Attack(start=name, edge_layers=1, name="labels from the last gradient", share=labels))
    return Leak(
        sizes=sizes,
        num_trained_tokens=rows[:, :-1].numel(),
        by_frequency=share(counts.argmax().expand(held_out[:, :-1].shape), held_out[:, :-1]),
        one_seed=int(one_seed),
        num_of_seed=own.numel(),
        attacks=tuple(found),
    )


def measure_recorded(folder: Path, tokens_path: Path) -> Leak:
    """Measure what the activations of a recorded run give away to readers who know no weights.

    Nine tenths of the rows teach the inverter, and say how often tokens occur; the others are read.

    Args:
        folder: what ``--vtp-record-crossing`` has written on one rank, ``[S, B, H]`` each.
        tokens_path: the tokens of these rows, in the order of the files, ``[N, S]``.

    Raises:
        ConfigError: a file is missing or no numpy array, or the tokens are not those of the activations.
    """
    files = sorted(folder.glob("rank*.npy"))
    ranks = {file.name.split("-")[0] for file in files}
    if len(ranks) != 1:
        found = ", ".join(sorted(ranks)) or "none"
        raise ConfigError(f"--recorded {folder}: files of one rank are needed, found: {found}; keep those of one")
    states = torch.cat([_read_array(file).float().transpose(0, 1) for file in files])
    tokens = _read_array(tokens_path).long()
    if tokens.shape != states.shape[:2]:
        raise ConfigError(
            f"--tokens {tokens_path}: shape {list(tokens.shape)}, the activations have {list(states.shape[:2])} (rows "
            "and positions); give the tokens of the same samples in the same order"
        )
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    taught, read = order[len(order) // 10 :], order[: max(1, len(order) // 10)]
    vocab = int(tokens.max()) + 1
    public, known, wanted = tokens[taught].flatten(), states[taught].flatten(0, 1), tokens[read].flatten()
    crossed, counts = states[read].flatten(0, 1), public.bincount(minlength=vocab)
    rows = {
        name: share(train_inverter(known[part], public[part], vocab)(crossed).argmax(-1), wanted)
        for name, part in _INVERTERS.items()
    }
    rows["clusters by frequency"] = share(name_clusters(crossed, counts), wanted)
    return Leak(
        num_trained_tokens=len(public),
        by_frequency=share(counts.argmax().expand(wanted.shape), wanted),
        attacks=tuple(Attack(start="recorded", edge_layers=0, name=name, share=one) for name, one in rows.items()),
    )


def _read_array(path: Path) -> torch.Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}; give a numpy file of numbers") from None


def _attacks(
    start: Start,
    number: int,
    private: SmallGPT,
    known: SmallGPT,
    rows: torch.Tensor,
    held_out: torch.Tensor,
    counts: torch.Tensor,
) -> Iterator[Attack]:
    tokens = held_out[:, :-1]
    with torch.no_grad():
        states = private.states(tokens, number)

    def row(name: str, found: torch.Tensor, wanted: torch.Tensor = tokens, loss_more: float | None = None) -> Attack:
        is_right = share(found.view(wanted.shape), wanted)
        return Attack(start=start, edge_layers=number, name=name, share=is_right, loss_more=loss_more)

    inverters = _taught(private, number, rows, *_INVERTERS.values())
    own = inverters[0]
    named = search_tokens(private, number, states, own)
    exact = row("weights known", named)
    if exact.share < LEAST_EXACT:
        raise RuntimeError(f"the exact search behind {number} layers finds {exact.share:.1%}; the attack is broken")
    yield exact
    yield row("weights known, of another text", named, tokens.roll(1, 0))
    (taught,) = _taught(known, number, rows)
    yield row("start known", search_tokens(known, number, states, taught, num_tried=_NUM_TRIED))
    for name, inverter in zip(_INVERTERS, inverters, strict=True):
        yield row(name, inverter(states).argmax(-1))
    yield row("clusters by frequency", name_clusters(states.flatten(0, 1), counts))
    loss = private.loss(held_out).item()
    for noise in NOISES:
        more = private.loss(held_out, number, noise).item() - loss
        found = search_tokens(private, number, noisy(states, noise), own, num_tried=_NUM_TRIED)
        yield row(f"weights known, noise {noise:g}", found, loss_more=more)


def _taught(model: SmallGPT, number: int, rows: torch.Tensor, *parts: slice) -> list[Inverter]:
    """Train inverters on the states behind so many layers of texts that a reader has: one on all, or on each part."""
    states, tokens = model.states(rows[:, :-1], number).detach().flatten(0, 1), rows[:, :-1].flatten()
    return [train_inverter(states[part], tokens[part], model.sizes.vocab) for part in parts or (_ALL,)]


def _gradients(model: SmallGPT, cut: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss at a cut, `[N, S, H]`."""
    states = model.states(rows[:, :-1], cut).detach().requires_grad_()
    logits = model.logits(states, cut)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").backward()
    assert states.grad is not None
    return states.grad
