"""What may leave a rank, and the record of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.message_kind import MESSAGE_FORMS, HeaderCodec, MessageKind
from vtp_plugin.runtime.comm.transfers import Audit, require_allowed

ACTIVATION = torch.zeros(8, 2, 4)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        (MessageKind.ACTIVATION, ACTIVATION),
        (MessageKind.GRADIENT, ACTIVATION.bfloat16()),
        (MessageKind.PROBE, ACTIVATION),
        (MessageKind.SHAPE_HEADER, torch.tensor([8, 2, 4, 0])),
        (MessageKind.TIED_EMBEDDING, ACTIVATION[0]),
        (MessageKind.WARM_UP, torch.zeros(1)),
    ],
)
def test_closed_list(kind: MessageKind, tensor: torch.Tensor) -> None:
    require_allowed(kind, tensor)


TOKENS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize("kind", list(MessageKind))
@pytest.mark.parametrize(
    "tensor",
    [TOKENS, TOKENS.unsqueeze(-1), TOKENS.to(torch.int32), TOKENS.bool(), TOKENS.flatten().float()],
    ids=["tokens", "tokens-with-a-hidden-dimension", "int32", "mask", "flat-floats"],
)
def test_samples_are_nothing_that_may_leave(kind: MessageKind, tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=f"is no {kind}, and nothing else may leave"):
        require_allowed(kind, tensor)


def test_loss_mask_is_no_activation() -> None:
    with pytest.raises(ConfigError):
        require_allowed(MessageKind.ACTIVATION, torch.ones(2, 8))


def test_record_names_every_message_and_ends_with_totals(tmp_path: Path) -> None:
    audit = Audit(str(tmp_path / "logs" / "audit.jsonl"), rank=3)
    audit.note("sent", MessageKind.ACTIVATION, ACTIVATION, 5, "boundary 0->1, forward")
    audit.note("sent", MessageKind.ACTIVATION, ACTIVATION, 6, "boundary 0->1, forward")
    audit.note("received", MessageKind.GRADIENT, ACTIVATION.bfloat16(), 5, "boundary 0->1, backward")
    path = tmp_path / "logs" / "audit.rank3.jsonl"
    assert len(path.read_text().splitlines()) == 3, "lines must be there while the run goes on"
    audit.close()
    audit.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "way": "sent",
        "cargo": "activation",
        "peer": 5,
        "shape": [8, 2, 4],
        "dtype": "float32",
        "bytes": 256,
        "place": "boundary 0->1, forward",
    }
    assert lines[3:] == [
        {"total": "gradient", "way": "received", "messages": 1, "bytes": 128},
        {"total": "activation", "way": "sent", "messages": 2, "bytes": 512},
    ]


def test_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--vtp-audit"):
        Audit(str(tmp_path / "file" / "audit.jsonl"), rank=0)


def test_a_header_is_as_long_as_its_codec_makes_it() -> None:
    assert MESSAGE_FORMS[MessageKind.SHAPE_HEADER].num_elements == HeaderCodec().length
