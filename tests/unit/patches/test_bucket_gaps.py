"""Where parameters lie once their buckets are joined without padding."""

from __future__ import annotations

from types import SimpleNamespace

from vtp_plugin.patches.core.optimizer.distrib_optimizer import _without_padding


def test_what_follows_a_padded_bucket_moves_by_its_padding() -> None:
    """Three buckets: 10 of 12 numbers, 8 of 8, 5 of 8."""
    offsets, sizes = (0, 12, 20), (10, 8, 5)
    buckets = [SimpleNamespace(offset=at, numel_unpadded=size) for at, size in zip(offsets, sizes, strict=True)]
    places = {"e": (21, 25, 2), "d": (20, 21, 2), "c": (12, 20, 1), "b": (4, 10, 0), "a": (0, 4, 0)}
    joined = _without_padding(SimpleNamespace(buckets=buckets, param_index_map=places))
    assert joined == {"e": (19, 23, 2), "d": (18, 19, 2), "c": (10, 18, 1), "b": (4, 10, 0), "a": (0, 4, 0)}
    assert list(joined) == list(places)  # Megatron numbers what it stores in this order
