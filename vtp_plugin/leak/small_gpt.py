"""A small GPT in plain torch, its tokenizer and its text, on which attacks are tried within minutes.

The text is the one that Python carries for ``help()``: real English with code, the same on every machine for one
version of Python.
"""

from __future__ import annotations

import pydoc_data.topics
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of the positions before, `[N, heads, S, channels]`, by layer."""

_PIECES = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSizes:
    """Sizes of a small GPT, and of its training.

    Attributes:
        num_layers: number of layers.
        width: H.
        vocab: number of tokens; the most frequent pieces of the text, then single characters.
        length: S of every sequence.
        num_held_out: number of sequences that no training sees.
        num_epochs: how often a training sees all others.
    """

    num_layers: int = 6
    width: int = 128
    vocab: int = 4096
    length: int = 24
    num_held_out: int = 200
    num_epochs: int = 4


class Tokenizer:
    """Words, runs of punctuation and of white space; what is rare is spelt, character by character.

    >>> tokenizer = Tokenizer("a bb a bb c", 5)
    >>> tokenizer.encode("a bb cc")
    [1, 4, 0, 3, 3]
    """

    def __init__(self, text: str, vocab: int) -> None:
        characters = sorted(set(text))
        pieces = Counter(piece for piece in _PIECES.findall(text) if len(piece) > 1)
        kept = [piece for piece, _ in sorted(pieces.items(), key=lambda one: (-one[1], one[0]))]
        self._numbers = {piece: number for number, piece in enumerate((characters + kept)[:vocab])}

    def encode(self, text: str) -> list[int]:
        """Cut a text into the numbers of its tokens."""
        return [*self._encoded(text)]

    def _encoded(self, text: str) -> Iterator[int]:
        for piece in _PIECES.findall(text):
            if piece in self._numbers:
                yield self._numbers[piece]
            else:
                yield from (self._numbers[character] for character in piece)


def read_sequences(sizes: GPTSizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences to train on, and those that are held out, `[N, S + 1]` each, from the whole text."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    numbers = torch.tensor(Tokenizer(text, sizes.vocab).encode(text))
    rows = numbers[: len(numbers) // (sizes.length + 1) * (sizes.length + 1)].view(-1, sizes.length + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[sizes.num_held_out :], rows[: sizes.num_held_out]


class Layer(nn.Module):
    """A layer: attention to all positions before, then a feed-forward part, each behind a norm."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Run whole sequences `[N, S, H]`."""
        query, key, value = self._heads(states)
        return self._behind(states, functional.scaled_dot_product_attention(query, key, value, is_causal=True))

    def extend(
        self, states: torch.Tensor, before: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Run candidates `[N, C, H]` for one more position, which see what is before it, and each itself alone.

        Returns:
            Their states, and their keys and values.
        """
        query, key, value = self._heads(states)
        scale = query.shape[-1] ** -0.5
        scores = torch.cat([query @ before[0].transpose(2, 3), (query * key).sum(-1, keepdim=True)], -1) * scale
        weights = scores.softmax(-1)
        mixed = weights[..., :-1] @ before[1] + weights[..., -1:] * value
        return self._behind(states, mixed), (key, value)

    def _heads(self, states: torch.Tensor) -> list[torch.Tensor]:
        whole = self.qkv(self.norm1(states))
        return [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in whole.chunk(3, -1)]

    def _behind(self, states: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        states = states + self.proj(mixed.transpose(1, 2).flatten(2))
        return states + self.down(functional.gelu(self.up(self.norm2(states))))


class SmallGPT(nn.Module):
    """A GPT with learned positions and an output layer of its own."""

    def __init__(self, sizes: GPTSizes, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.sizes = sizes
        self.words, self.places = nn.Embedding(sizes.vocab, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.layers = nn.ModuleList([Layer(sizes.width) for _ in range(sizes.num_layers)])
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocab, bias=False)
        nn.init.normal_(self.words.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)

    def states(self, tokens: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return what comes out of the first layers, `[N, S, H]`."""
        states = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers[:num_layers]:
            states = layer(states)
        return states

    def logits(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """Run the layers from ``first`` on, and the output layer."""
        for layer in self.layers[first:]:
            states = layer(states)
        return self.head(self.norm(states))

    def loss(self, rows: torch.Tensor, cut: int = 0, noise: float = 0.0) -> torch.Tensor:
        """Return the mean loss of rows `[N, S + 1]`; with noise on the states at a cut, as a share of their size."""
        states = self.states(rows[:, :-1], cut)
        if noise:
            states = noisy(states, noise)
        return functional.cross_entropy(self.logits(states, cut).flatten(0, 1), rows[:, 1:].flatten())


def noisy(states: torch.Tensor, noise: float) -> torch.Tensor:
    """Add noise of this share of the states' own size; the same for the same shape."""
    drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    return states + noise * states.square().mean().sqrt() * drawn


def train(model: SmallGPT, rows: torch.Tensor, num_epochs: int, lr: float = 1e-3) -> SmallGPT:
    """Train a model in batches of 64, and return it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):
            optimizer.zero_grad()
            model.loss(rows[batch]).backward()
            optimizer.step()
    return model.requires_grad_(requires_grad=False)


def share(found: torch.Tensor, tokens: torch.Tensor | Sequence[int]) -> float:
    """Return how many tokens were named right, from 0 to 1."""
    return (found == torch.as_tensor(tokens)).double().mean().item()
