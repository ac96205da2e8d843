"""Records the functions of Megatron and MindSpeed that ask process groups for their ranks, size or place, as they run.

Seen are ``ProcessGroup.size()`` and ``rank()``, the functions of ``torch.distributed`` that read a group's ranks (also
from inside others: a broadcast takes the place of its source from them), and the functions of ``parallel_state`` that
answer from a list of ranks or give out a group that reaches over the stages. Only while the plugin has made the groups.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from tests.group_queries.table import HOSTS, unknown_callers
from tests.support.hosts import host_name

FOREIGN = ("megatron", "mindspeed", "mindspeed_llm")
OWN = ("vtp_plugin", "tests", "examples", "benchmarks", "__main__")
# They ask on behalf of others.
ACCESSORS = {"get_pg_size", "get_pg_rank", "get_pg_src_rank"}
STATE = "megatron.core.parallel_state"
_READERS = ("get_process_group_ranks", "get_group_rank", "get_global_rank")
# Groups that reach over the stages, by the names of Megatron's globals; all others lie inside a stage.
OVER_STAGES = {
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "_MODEL_PARALLEL_GROUP": "model",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "experts",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "experts",
    "_EMBEDDING_GROUP": "embedding",
    "_POSITION_EMBEDDING_GROUP": "embedding",
}
# Functions of parallel_state that ask no group, and the groups that they speak of.
SPEAKERS = {
    "get_tensor_model_parallel_src_rank": "stage",
    "get_data_parallel_src_rank": "stage",
    "get_expert_model_parallel_src_rank": "stage",
    "get_context_parallel_global_ranks": "stage",
    "get_model_parallel_src_rank": "model",
    "get_model_parallel_group": "model",
    "get_intra_distributed_optimizer_instance_group": "optimizer",
    "get_expert_tensor_model_pipeline_parallel_group": "experts",
    "get_pipeline_model_parallel_group": "pipeline",
    "get_pipeline_model_parallel_first_rank": "pipeline",
    "get_pipeline_model_parallel_last_rank": "pipeline",
    "get_pipeline_model_parallel_next_rank": "pipeline",
    "get_pipeline_model_parallel_prev_rank": "pipeline",
    "get_embedding_group": "embedding",
    "get_position_embedding_group": "embedding",
    "is_rank_in_embedding_group": "embedding",
    "is_rank_in_position_embedding_group": "embedding",
}


class Query(NamedTuple):
    """One question: which function asks what of which kind of group."""

    caller: str
    kind: str
    asks: str


class Recorder:
    """The questions of one run."""

    def __init__(self) -> None:
        self._seen: set[tuple[CodeType, object, str]] = set()
        self._sides: dict[CodeType, str] = {}
        self.queries: set[Query] = set()

    def note(self, asks: str, kind: str | None = None, group: Any = None) -> None:
        """Note a question that the caller's caller asks, of a kind of groups or of one group."""
        frame = self._asker(sys._getframe(2))
        if frame is None:
            return
        key = frame.f_code, kind or id(group), asks
        if key not in self._seen and _has_own_groups():
            self._seen.add(key)
            found = kind or _kind_of(group)
            if found is not None:
                self.queries.add(Query(_name_of(frame), found, asks))

    def _asker(self, frame: FrameType | None) -> FrameType | None:
        """Return the first frame of Megatron or MindSpeed that asks for itself; None if the question is ours."""
        while frame is not None:
            side = self._sides.get(frame.f_code)  # a million questions a minute come from a few functions
            if side is None:
                side = self._sides[frame.f_code] = _side_of(frame)
            if side:
                return frame if side == "foreign" else None
            frame = frame.f_back
        return None


def _side_of(frame: FrameType) -> str:
    """Tell whose function runs in a frame: "own", "foreign", or "" if it asks on behalf of its caller."""
    name = frame.f_globals.get("__name__", "")
    root = name.partition(".")[0]
    if root in OWN and name != __name__:
        return "own"
    return "foreign" if root in FOREIGN and name != STATE and frame.f_code.co_name not in ACCESSORS else ""


def _has_own_groups() -> bool:
    from vtp_plugin.api import _Holder

    session = _Holder.session
    return session is not None and (session.is_active or any(one.plan.ends.are_bridged for one in session.pipelines))


def _kind_of(group: Any) -> str | None:
    """Tell which of Megatron's groups this is; None for the whole world, which is as in stock Megatron."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if group is dist.GroupMember.WORLD:
        return None
    for name, value in vars(parallel_state).items():
        if value is group or (isinstance(value, list) and any(one is group for one in value)):
            return OVER_STAGES.get(name, "stage")
    return "grid"  # of a module with a grid of its own, or one that a caller made


def _name_of(frame: FrameType) -> str:
    """Name a function by its module and the names that lead to it, without what it has inside."""
    code = frame.f_code
    if sys.version_info >= (3, 11):
        names = code.co_qualname
    else:
        from tests.group_queries.finder import qualname_at

        names = qualname_at(code.co_filename, code.co_firstlineno)
    return f"{frame.f_globals['__name__']}:{names.partition('.<locals>')[0]}"


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record what this process asks until the end of the context."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    recorder, undo = Recorder(), []
    group_class: Any = dist.ProcessGroup

    def replace(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    for name in ("size", "rank"):
        replace(group_class, name, _asking_method(recorder, getattr(group_class, name), name))
    functions = [(getattr(distributed_c10d, name), name, None) for name in _READERS]
    functions += [(vars(parallel_state).get(name), name, kind) for name, kind in SPEAKERS.items()]
    roots = (*FOREIGN, "torch")
    owners = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] in roots and module]
    asking = {
        name: (original, _asking_function(recorder, original, kind))
        for original, name, kind in functions
        if original is not None
    }
    for owner in owners:
        for name in asking.keys() & vars(owner).keys():
            original, function = asking[name]
            if vars(owner)[name] is original:
                replace(owner, name, function)
    try:
        yield recorder
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _asking_method(recorder: Recorder, original: Callable[[Any], int], asks: str) -> Callable[[Any], int]:
    def method(group: Any) -> int:
        recorder.note(asks, group=group)
        return original(group)

    return method


def _asking_function(recorder: Recorder, original: Callable[..., Any], kind: str | None) -> Callable[..., Any]:
    asks = original.__name__

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        # The functions of torch take the group first.
        recorder.note(asks, kind, None if kind else (args[0] if args else kwargs.get("group")))
        return original(*args, **kwargs)

    return function


@contextmanager
def refusing_unknown_callers(*, always: bool = False) -> Iterator[None]:
    """Record until the end of the context where VTP_TEST_QUERIES names a folder; then write down there what was asked.

    Args:
        always: record without that variable, too, on the hosts whose callers were all seen.

    Raises:
        AssertionError: a caller is not in the table. Not in the place of another error.
    """
    folder, leave = os.environ.get("VTP_TEST_QUERIES"), None
    if not folder and not (always and host_name() in HOSTS):
        yield
        return
    with recorded() as recorder:
        try:
            yield
        except SystemExit as error:
            leave = error
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / str(os.getpid())).open("a") as stream:
            stream.writelines(f"{query.caller}\t{query.kind}\t{query.asks}\n" for query in sorted(recorder.queries))
    if unknown := unknown_callers(recorder.queries):
        raise AssertionError("\n".join(unknown))
    if leave is not None:
        raise leave
