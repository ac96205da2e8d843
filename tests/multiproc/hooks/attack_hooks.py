"""What a rank of the other site can try, and runs without one of the guards: controls, in which it works.

Each attack is made by rank 1, the cloud's first, from inside a run that starts as any other.
"""

from __future__ import annotations

import builtins
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_model
from torch.distributed import distributed_c10d

from tests.multiproc.cases.attacks import ATTACKER, ESCAPES, LONG_BYTES, MARKER
from tests.multiproc.hooks.in_place import Facts, Hook, after, around, before
from vtp_plugin.patches import activation
from vtp_plugin.plan.boundary import message_kind
from vtp_plugin.runtime.comm.plain_data import PlainData
from vtp_plugin.util import log
from vtp_plugin.util import text as printable


def _by_attacker(act: Callable[[], None]) -> Hook:
    """Let only the attacker's rank do something."""

    def hook(facts: Facts) -> None:
        if int(os.environ["RANK"]) == ATTACKER:
            act()

    return hook


def _when_connected(install: Callable[[], None]) -> None:
    """Do something once the process groups exist, and before anything is sent over them."""
    after(dist, "init_process_group")(lambda *_args, **_kwargs: install())


class _Calls:
    """Pickled, it makes whoever reads it call a function."""

    def __init__(self, function: Callable[..., Any], argument: str) -> None:
        self._call = function, (argument,)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return self._call


def _send_objects(made: Callable[[Any], tuple[bytes, int | None]]) -> None:
    """Send other objects than those that are due, as torch alone would.

    Args:
        made: returns the pickle of an object, and the length that is announced instead of the pickle's.
    """

    def write(obj: Any, device: Any, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, announced = made(obj)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().to(device)
        return tensor, torch.tensor([len(data) if announced is None else announced], device=device)

    def install() -> None:
        distributed_c10d._object_to_tensor = write

    _when_connected(install)


def _call_system() -> None:
    command = f"echo $RANK >> {Path(MARKER).absolute()}"
    _send_objects(lambda obj: (pickle.dumps(_Calls(os.system, command)), None))


def _call_eval() -> None:
    text = f"__import__('os').system('echo $RANK >> {Path(MARKER).absolute()}')"
    _send_objects(lambda obj: (pickle.dumps(_Calls(builtins.eval, text)), None))


def _announce_much() -> None:
    _send_objects(lambda obj: (pickle.dumps(obj), LONG_BYTES))


def _send_escapes() -> None:
    harmless = "x" * len(ESCAPES)
    # Its own writer would refuse the text.
    data = PlainData().write([harmless]).replace(harmless.encode(), ESCAPES.encode())
    _send_objects(lambda obj: (data, None))


def _lie_in_headers() -> None:
    @around(message_kind.HeaderCodec, "encode")
    def encode(original: Any, *args: Any) -> tuple[int, ...]:
        return (1 << 40, *original(*args)[1:])


def vary_lengths(facts: Facts) -> None:
    """Let headers cross on all ranks, as where samples have lengths of their own."""

    @after(gpt_model.GPTModel, "__init__")
    def vary(_none: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
        self.config.variable_seq_lengths = True


def _raise_escapes() -> None:
    """Fail with a text that a terminal obeys, which this site shares."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{ESCAPES} {'x' * (1 << 20)}")

    training.train_step = fail


def without_objects_guard(facts: Facts) -> None:
    """Let torch unpickle what it gets on all ranks, and note the longest tensor that it makes for objects."""
    activation.close_objects = lambda session: None
    facts["longest"] = 0

    @before(torch, "empty")
    def note(*size: Any, **options: Any) -> None:
        if options.get("dtype") is torch.uint8 and size and isinstance(size[0], int):
            facts["longest"] = max(facts["longest"], size[0])


def without_bounds_of_headers(facts: Facts) -> None:
    message_kind.Expected.require_bounded = lambda self, sent, num_elements: None


def without_plain_texts(facts: Facts) -> None:
    printable.plain = log.plain = lambda text: text


call_system, call_eval = _by_attacker(_call_system), _by_attacker(_call_eval)
announce_much, send_escapes = _by_attacker(_announce_much), _by_attacker(_send_escapes)
lie_in_headers, raise_escapes = _by_attacker(_lie_in_headers), _by_attacker(_raise_escapes)
