"""Weights that follow from a key: equal where torch's own would be, and unknown without the key."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.runtime.step import keyed_draws
from vtp_plugin.runtime.step.keyed_draws import KeyedDraws, keyed_seed, keyed_state

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def _draw_all() -> list[torch.Tensor]:
    """Draw as Megatron's, torch's and other layers do, of one start state."""
    torch.manual_seed(1234)
    weights = [torch.empty(8, 6), torch.empty(4, 4, dtype=torch.bfloat16), torch.empty(7)]
    torch.nn.init.normal_(weights[0], mean=0.0, std=0.02)
    torch.nn.init.xavier_uniform_(weights[1])
    torch.nn.init.trunc_normal_(weights[2], std=0.3)
    generator = torch.Generator().manual_seed(3)
    weights += [torch.nn.Linear(3, 5).weight.detach(), torch.randn(4), torch.randperm(9), torch.rand(3)]
    weights += [torch.empty(3).uniform_(generator=generator), torch.rand(3, generator=generator)]
    kaiming = torch.nn.Parameter(torch.empty(3, 4))
    torch.nn.init.kaiming_uniform_(kaiming, a=math.sqrt(5))
    return [*weights, kaiming.detach()]


def _drawn(key: bytes) -> list[torch.Tensor]:
    with KeyedDraws(key):
        return _draw_all()


def test_all_follows_from_the_key_and_nothing_else() -> None:
    plain, one, again, other = _draw_all(), _drawn(KEY), _drawn(KEY), _drawn(OTHER)
    for number, values in enumerate(zip(one, again, plain, other, strict=True)):
        assert torch.equal(values[0], values[1]), number
        assert not torch.equal(values[0], values[2]) and not torch.equal(values[0], values[3]), number
        assert values[0].dtype == values[2].dtype and values[0].shape == values[2].shape


def test_torchs_own_generators_move_on_as_without_it() -> None:
    states: list[torch.Tensor] = []
    for draw in (_draw_all, lambda: _drawn(KEY)):
        draw()
        states.append(torch.default_generator.get_state())
    assert torch.equal(*states)


def test_values_are_equal_exactly_where_torchs_would_be() -> None:
    """Ranks of one stage have one state where they draw the same weight, and others where they draw slices."""

    def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        return torch.empty(20).normal_(), torch.empty(20).normal_()

    with KeyedDraws(KEY):
        first, second = draw(1)
        same, slices = draw(1), draw(2)
    assert torch.equal(first, same[0]) and torch.equal(second, same[1])
    assert not torch.equal(first, second) and not torch.equal(first, slices[0])


def test_distributions_are_those_that_were_asked_for() -> None:
    with KeyedDraws(KEY):
        normal = torch.empty(200, 500).normal_(3.0, 0.5)
        uniform = torch.empty(100_000).uniform_(-1.0, 2.0)
    assert normal.mean().item() == pytest.approx(3.0, abs=0.01) and normal.std().item() == pytest.approx(0.5, abs=0.01)
    assert -1.0 <= uniform.min() < -0.99 < 1.99 < uniform.max() <= 2.0
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)


def test_the_whole_state_comes_from_the_key() -> None:
    """Not from a seed, of which torch takes 32 bits: no seed gives two equal words of such a state."""
    words = keyed_state(KEY, b"label")[24 : 24 + 8 * 624].view(torch.int64)
    drawn = hashlib.shake_256(b"vtp_plugin weights:" + KEY + b"label").digest(4 * 624)
    assert words.tolist() == [int.from_bytes(drawn[at : at + 4], "little") for at in range(0, len(drawn), 4)]
    # mt19937's own rule for the second word of a state that a seed has made.
    first, second = words[:2].tolist()
    assert second != (1812433253 * (first ^ (first >> 30)) + 1) % 2**32
    assert len({keyed_seed(key, label) for key in (KEY, OTHER) for label in (b"a", b"b")}) == 4


def test_a_tensor_that_is_described_only_stays_so() -> None:
    with KeyedDraws(KEY):
        assert torch.empty(3, device="meta").normal_().is_meta
        assert torch.randn(3, device="meta").is_meta


@pytest.mark.parametrize("change", [lambda state: state[:100], lambda state: state.roll(8)], ids=["short", "moved"])
def test_another_form_of_the_state_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Other(torch.Generator):
        def get_state(self) -> torch.Tensor:
            return change(super().get_state())

    monkeypatch.setattr(keyed_draws.torch, "Generator", Other)
    with pytest.raises(ConfigError, match=r"in another form than --vtp-edge-seed can write; .* give --vtp-edge-seed s"):
        keyed_state(KEY, b"")
