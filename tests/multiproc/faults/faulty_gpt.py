"""The example, with faults that strike in a phase of training, and a record of what the data set hands out.

It knows nothing of the plugin. Two files are named by the environment: faults that are armed, a JSON list of objects
with ``id``, ``node``, ``local_rank``, ``phase`` and ``kind``, which a test writes as a whole; and a log to which every
rank appends JSON lines: its beginning, the samples of each microbatch, and each strike, before it strikes. A fault
strikes once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ARMED, LOG, NODE, PAUSE = "TEST_ARMED_FAULTS", "TEST_FAULT_LOG", "TEST_NODE", "TEST_PAUSE_S"
PHASES = ("start-up", "forward", "between", "optimizer", "save")
KINDS = ("SIGKILL", "SIGSTOP", "exit", "exception")
CABLE = "cable pulled"
_PULLED_S = 3.0  # in which whoever reads the log pulls the cable of the node


def note(**entry: object) -> None:
    """Append a line to the log; it is on disk before this returns."""
    where = {"node": os.environ[NODE], "local_rank": int(os.environ["LOCAL_RANK"]), "rank": int(os.environ["RANK"])}
    line = json.dumps({**entry, **where, "pid": os.getpid(), "at_s": time.time()}) + "\n"
    number = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(number, line.encode())
    os.fsync(number)
    os.close(number)


def pass_phase(phase: str) -> None:
    """Strike if a fault is armed for this phase of this card."""
    armed = Path(os.environ[ARMED])
    if not armed.is_file():
        return
    for fault in json.loads(armed.read_text()):
        place = (fault["phase"], fault["node"], fault["local_rank"])
        if place == (phase, os.environ[NODE], int(os.environ["LOCAL_RANK"])):
            _strike(fault, armed.with_name(f"struck-{fault['id']}"))


def _strike(fault: dict[str, Any], once: Path) -> None:
    try:
        once.touch(exist_ok=False)
    except FileExistsError:
        return
    note(event="strike", **{key: fault[key] for key in ("id", "phase", "kind")})
    if fault["kind"] == "exit":
        os._exit(3)
    if fault["kind"] == "exception":
        raise RuntimeError(f"planted fault {fault['id']}")
    if fault["kind"] == CABLE:
        time.sleep(_PULLED_S)
        return
    os.kill(os.getpid(), getattr(signal, fault["kind"]))


def load_example() -> ModuleType:
    """Import the example, which is a script."""
    path = Path(__file__).parents[3] / "examples" / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("pretrain_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watch(example: ModuleType) -> None:
    """Let faults strike in the example's steps, and note the samples of every microbatch."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.optim import Adam, AdamW

    take = GPTDataset.__getitem__

    def numbered(self: Any, index: int | None) -> dict[str, Any]:
        return {**take(self, index), "index": torch.tensor(-1 if index is None else index)}

    GPTDataset.__getitem__ = numbered
    get_batch = example.get_batch

    def noted(iterator: Any, model: Any) -> Any:
        def read() -> Any:
            data = next(iterator)
            note(event="samples", step=example.get_args().curr_iteration + 1, samples=data.pop("index").tolist())
            return data

        return get_batch(_Iterator(read) if iterator is not None else None, model)

    example.get_batch = noted
    forward_step = example.forward_step

    def stepped(iterator: Any, model: Any) -> Any:
        time.sleep(float(os.environ.get(PAUSE, "0")))
        pass_phase("forward")
        output = forward_step(iterator, model)
        pass_phase("between")
        return output

    example.forward_step = stepped
    for owner, name, phase in (
        (Adam, "step", "optimizer"),
        (AdamW, "step", "optimizer"),
        (FileSystemWriterAsync, "prepare_write_data", "save"),
    ):
        if name in vars(owner):
            setattr(owner, name, _before(partial(pass_phase, phase), getattr(owner, name)))


class _Iterator:
    """An iterator that calls a function for what comes next."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self._read()


def _before(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


if __name__ == "__main__":
    note(event="begin")
    pass_phase("start-up")
    example = load_example()
    watch(example)
    example.datasets_provider.is_distributed = True
    args = example.parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = example.pretrain_cfg_container_from_args(args, example.gpt_config_from_args(args))
    kind = example.ModelType.encoder_or_decoder
    example.pretrain(
        config, example.datasets_provider, kind, example.forward_step, get_embedding_ranks=example.embedding_ranks
    )
    note(event="end")
