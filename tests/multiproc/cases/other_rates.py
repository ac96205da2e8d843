"""Rates that a resumed run has in place of those with which it was saved; no torch, so that tests import it."""

from __future__ import annotations

OTHER: dict[str, float] = {"lr": 1e-3, "min_lr": 2e-4, "weight_decay": 0.2}
"""By argument; a run is saved with other ones."""
OTHER_DECOUPLED: dict[str, float] = {"decoupled_lr": 5e-3, "decoupled_min_lr": 1e-3}
"""Of the embedding and the output layer, where they have rates of their own."""


def flags(rates: dict[str, float]) -> list[str]:
    """Give the flags of rates.

    >>> flags({"min_lr": 2e-4})
    ['--min-lr', '0.0002']
    """
    return [word for name, rate in rates.items() for word in (f"--{name.replace('_', '-')}", str(rate))]
