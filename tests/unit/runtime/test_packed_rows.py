"""What may cross as the lengths of a packed row: where samples end, and nothing else that is made of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.runtime.comm.transfers import require_allowed
from vtp_plugin.runtime.step.companion_tensors import packed_rows, padded_ends


@pytest.mark.parametrize("ends", [[[0, 3, 7]], [[0, 3, 7, 7, 7]], [[0, 0, 3, 3, 7]], [0, 7]])
def test_ends_are_padded_to_one_length(ends: list[object]) -> None:
    padded = padded_ends({"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}, 8)
    assert padded.dtype == torch.int32 and len(padded) == 8
    assert padded.unique().tolist() == torch.tensor(ends).unique().tolist()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tokens": torch.tensor([[4, 5]])}, "a row without cu_seqlens; "),
        ((torch.tensor([[4, 5]]),), "a row without cu_seqlens; "),
        ({"cu_seqlens": torch.tensor([[0, 2]]), "cu_seqlens_padded": torch.tensor([[0, 4]])}, "cu_seqlens_padded; "),
        ({"cu_seqlens": torch.tensor([[0, 2], [0, 2]])}, "of the shape (2, 2); "),
        ({"cu_seqlens": torch.tensor([[417, 3, 981]])}, "of the shape (1, 3); "),
        ({"cu_seqlens": torch.tensor([[3, 7]])}, "of the shape (1, 2); "),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, "at most 7, the tokens of one row; "),
        ({"cu_seqlens": torch.tensor([[0]])}, "of the shape (1, 1); "),
        ({"cu_seqlens": torch.tensor([[]])}, "of the shape (1, 0); "),
        ({"cu_seqlens": torch.tensor([[0, *[1] * 8, 2]])}, "of the shape (1, 10); "),
    ],
)
def test_other_rows_are_refused_without_their_values(row: object, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        padded_ends(row, 8)
    assert words in str(refused.value) and "981" not in str(refused.value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, 1, 1),
        torch.zeros(8, 1, 1, dtype=torch.int64),
        torch.zeros(1, 8, dtype=torch.int32),
        torch.zeros(8, 1, 2, dtype=torch.int32),
    ],
)
def test_other_forms_do_not_leave_as_lengths(tensor: torch.Tensor) -> None:
    require_allowed(MessageKind.LENGTHS, torch.zeros(8, 1, 1, dtype=torch.int32))
    with pytest.raises(ConfigError, match="is no lengths"):
        require_allowed(MessageKind.LENGTHS, tensor)


LARGEST = 2**31 - 1


@pytest.mark.parametrize("ends", [[0, 3, 7, 7], [0, 7, 7, 7], [0, 0, 0, 0]])
def test_lengths_arrive_as_they_were_sent(ends: list[int]) -> None:
    companion = packed_rows(7)
    sent = companion.shaped(padded_ends({"cu_seqlens": torch.tensor([ends])}, 8)) if ends[-1] else None
    came = torch.tensor([*ends, *ends[-1:] * 4], dtype=torch.int32).view(8, 1, 1)
    assert sent is None or torch.equal(sent, came)
    given = companion.give(came)
    assert given["cu_seqlens"].shape == (1, 8) and given["cu_seqlens"].flatten().tolist() == came.flatten().tolist()
    assert given["max_seqlen"].tolist() == [max(b - a for a, b in pairwise(ends))]


@pytest.mark.parametrize(
    "ends",
    [
        [-1, 3],
        [0, -LARGEST],
        [0, LARGEST, -LARGEST - 1],
        [0, LARGEST],
        [0, 8],
        [0, 5, 3],
        [1, 2],
        [LARGEST] * 8,
        [-7] * 8,
    ],
)
def test_lengths_that_cannot_be_are_one_line(ends: list[int]) -> None:
    """Kernels would read memory there."""
    came = torch.tensor([*ends, *ends[-1:] * (8 - len(ends))], dtype=torch.int32).view(8, 1, 1)
    with pytest.raises(
        PeerError, match=r"^lengths of packed samples .*; .* 7, the tokens of a row, at most; "
    ) as caught:
        packed_rows(7).give(came)
    assert str(caught.value).isprintable() and caught.value.shared == str(caught.value)
