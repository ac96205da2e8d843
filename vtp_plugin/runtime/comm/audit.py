"""What may leave a rank over the plugin's channels, and a record of what has left.

Every message between stages passes :func:`require_allowed`, at the one place where channels post to the backend. With
``--vtp-audit FILE`` it is also recorded there, one JSON object on each line.
"""

from __future__ import annotations

import atexit
from collections import Counter
from pathlib import Path

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.message_kind import MESSAGE_FORMS, MessageKind
from vtp_plugin.runtime.health.line_file import LineFile


def require_allowed(kind: MessageKind, tensor: torch.Tensor) -> None:
    """Refuse to send a tensor that does not have the form of its kind of message.

    Token ids and labels are integers; loss masks and positions have no hidden dimension. So none of them passes for an
    activation or a gradient.

    >>> require_allowed(MessageKind.ACTIVATION, torch.zeros(8, 2, 4))
    >>> require_allowed(MessageKind.ACTIVATION, torch.zeros(8, 2, 4, dtype=torch.int64))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vtp_plugin.errors.ConfigError: a torch.int64 tensor of shape (8, 2, 4) is no activation, and nothing else may ...

    Raises:
        ConfigError: the tensor has another form.
    """
    dtype = "floating point" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    is_allowed = MESSAGE_FORMS[kind].fits(dtype, tensor.shape, tensor.numel())
    if not is_allowed:
        raise ConfigError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is no {kind}, and nothing else may leave this "
            "rank here; return an activation [S, B, H] from the stage"
        )


def audit_path(path: str, rank: int) -> Path:
    """Return the path of one rank's file.

    >>> str(audit_path("logs/audit.jsonl", 3))
    'logs/audit.rank3.jsonl'
    """
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


class Audit:
    """Record of the messages that this rank exchanged with other stages.

    A line is written when its message is posted, so the record of a run that is killed is complete up to there. Totals
    of every kind of message follow at the end. Lines are appended to an existing file.

    Args:
        path: path that the user gave; the rank's number is put into the file's name.
        rank: this rank.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._file = LineFile(audit_path(path, rank), option=f"--vtp-audit {path}", is_continued=True)
        self._num_messages: Counter[tuple[str, MessageKind]] = Counter()
        self._num_bytes: Counter[tuple[str, MessageKind]] = Counter()
        atexit.register(self.close)

    def note(self, way: str, kind: MessageKind, tensor: torch.Tensor, peer: int, position: str) -> None:
        """Record one message.

        Args:
            way: ``"sent"`` or ``"received"``.
            kind: kind of the message.
            tensor: memory that is sent, or that will be filled.
            peer: global rank that receives or sends it.
            position: boundary and direction.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        self._num_messages[way, kind] += 1
        self._num_bytes[way, kind] += num_bytes
        self._file.write(
            {
                "way": way,
                "cargo": kind,
                "peer": peer,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "bytes": num_bytes,
                "place": position,
            }
        )

    def close(self) -> None:
        """Write the totals and close the file; idempotent."""
        atexit.unregister(self.close)
        if self._file.is_closed:
            return
        for (way, kind), count in sorted(self._num_messages.items()):
            self._file.write({"total": kind, "way": way, "messages": count, "bytes": self._num_bytes[way, kind]})
        self._file.close()
