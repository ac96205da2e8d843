"""The attacks: what a reader of the states at a cut can make of them, by what the reader knows.

Search over the vocabulary follows SipIt (arXiv 2510.15511, section 4): a causal model's state of a position depends on
the tokens up to there alone, so tokens are found one after another. The trained inverter follows arXiv 2501.05965: a
small network learns tokens from states, of texts that the reader knows.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from vtp_plugin.leak.small_gpt import Cache, Layer, SmallGPT

# Candidates that are tried at once, and how near a state is taken for the same one, as a share of its length.
_AT_ONCE = 64
_SAME = 1e-3


@torch.no_grad()
def search_tokens(
    model: SmallGPT, num_layers: int, states: torch.Tensor, inverter: Inverter, *, num_tried: int | None = None
) -> torch.Tensor:
    """Find the tokens whose states are nearest, position by position, with the weights that the reader knows.

    Args:
        model: the model as the reader knows it.
        num_layers: number of layers before the cut.
        states: what crossed, `[N, S, H]`.
        inverter: says which candidates are likely; the reader trains it on states of the same layers.
        num_tried: number of candidates for each position, the likeliest first; None tries further ones until a state is
            the same.

    Returns:
        Tokens, `[N, S]`.
    """
    number, length, _ = states.shape
    layers = [layer for layer in model.layers[:num_layers] if isinstance(layer, Layer)]
    nothing = [states.new_zeros(number, layer.num_heads, 0, states.shape[2] // layer.num_heads) for layer in layers]
    cache: Cache = [(one, one) for one in nothing]
    found = []
    for position in range(length):
        wanted = states[:, position]
        order = inverter(wanted).argsort(1, descending=True)[:, :num_tried]
        best, least = torch.zeros(number, dtype=torch.long), torch.full((number,), torch.inf)
        open_rows = torch.arange(number)
        for candidates in order.split(_AT_ONCE, 1):
            own = candidates[open_rows]
            tried, _ = _extend(model, layers, own, position, [(k[open_rows], v[open_rows]) for k, v in cache])
            distance, index = (tried - wanted[open_rows, None]).norm(dim=-1).min(1)
            is_nearer = distance < least[open_rows]
            rows = open_rows[is_nearer]
            least[rows] = distance[is_nearer]
            best[rows] = own.gather(1, index[:, None])[is_nearer, 0]
            open_rows = open_rows[least[open_rows] > _SAME * wanted[open_rows].norm(dim=-1)]
            if not len(open_rows):
                break
        found.append(best)
        _, kept = _extend(model, layers, best[:, None], position, cache)
        cache = [
            (torch.cat([keys, key], 2), torch.cat([values, value], 2))
            for (keys, values), (key, value) in zip(cache, kept, strict=True)
        ]
    return torch.stack(found, 1)


def _extend(
    model: SmallGPT, layers: list[Layer], tokens: torch.Tensor, position: int, cache: Cache
) -> tuple[torch.Tensor, Cache]:
    states, kept = model.words(tokens) + model.places.weight[position], list[tuple[torch.Tensor, torch.Tensor]]()
    for layer, before in zip(layers, cache, strict=True):
        states, own = layer.extend(states, before)
        kept.append(own)
    return states, kept


class Inverter(nn.Module):
    """A network that learns which token a state `[..., H]` belongs to."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, vocab)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return a score of every token."""
        return self.outer(functional.gelu(self.inner(self.norm(states))))


def train_inverter(states: torch.Tensor, tokens: torch.Tensor, vocab: int, num_steps: int = 600) -> Inverter:
    """Train an inverter on states `[N, H]` whose tokens `[N]` the reader knows."""
    inverter = Inverter(states.shape[-1], vocab)
    optimizer, chance = torch.optim.AdamW(inverter.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        batch = torch.randint(len(tokens), (512,), generator=chance)
        optimizer.zero_grad()
        functional.cross_entropy(inverter(states[batch]), tokens[batch]).backward()
        optimizer.step()
    return inverter.requires_grad_(requires_grad=False)


def name_clusters(
    states: torch.Tensor, counts: torch.Tensor, num_clusters: int = 256, num_rounds: int = 8
) -> torch.Tensor:
    """Cluster states `[N, H]`, and name the clusters by how often tokens occur in texts that everybody has.

    Args:
        states: what crossed.
        counts: how often each token occurs elsewhere, `[V]`.
        num_clusters: number of clusters.
        num_rounds: rounds of k-means.

    Returns:
        A token for each state, `[N]`.
    """
    chance = torch.Generator().manual_seed(0)
    centres = states[torch.randperm(len(states), generator=chance)[:num_clusters]].clone()
    nearest = torch.zeros(len(states), dtype=torch.long)
    for _ in range(num_rounds):
        nearest = torch.cdist(states, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, states)
        sizes = nearest.bincount(minlength=len(centres))
        centres = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), centres)
    by_size = nearest.bincount(minlength=len(centres)).argsort(descending=True)
    names = torch.empty_like(by_size)
    names[by_size] = counts.argsort(descending=True)[: len(by_size)]
    return names[nearest]


def labels_from_gradients(model: SmallGPT, gradients: torch.Tensor) -> torch.Tensor:
    """Name the label of each position from the gradient of the states that the edge's last part sends back.

    The gradient of the scores is negative at the label alone; behind an output layer the label's row of it points
    against the gradient.

    Args:
        model: the model as the reader knows it.
        gradients: gradient at the cut before the last part, `[N, S, H]`.
    """
    return (-(gradients @ model.head.weight.T)).argmax(-1)
