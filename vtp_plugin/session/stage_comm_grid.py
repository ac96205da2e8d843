"""A grid whose stages differ in size, bound to torch.distributed and to the plugin's channels.

Stages may differ in all three sizes. Where their numbers of replicas differ, the batch of a microbatch is cut among the
replicas of every stage again, as at a bridge: each has its even share of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch.distributed as dist

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import Writes
from vtp_plugin.plan.layout.stage_grid import StageRanks
from vtp_plugin.runtime.comm.model_group import ModelGroup
from vtp_plugin.runtime.comm.process_groups import close_groups, settle
from vtp_plugin.session.request import watch_for_modules
from vtp_plugin.session.session import Session


class StageCommGrid(StageRanks):
    """The grid of a module whose pipeline stages have sizes of their own.

    It has the interface of Megatron's ``HyperCommGrid``, which it replaces in ``module_to_grid_map``. ``shape``
    is that of this rank's stage, with the module's number of stages; on ranks outside it is that of the first stage.
    ``size`` counts all ranks of the module. A group along ``pp`` has one rank of every stage; one along ``tp`` and
    ``pp`` holds the module once, and is a :class:`~vtp_plugin.runtime.comm.model_group.ModelGroup` where the stages
    have different numbers of replicas. All ranks of the world create the same groups in the same order.

    Attributes:
        shape: lengths of ``tp``, ``cp``, ``dp`` and ``pp``.
        backend: backend of the groups; None is the world's.
    """

    # Set by the subclass.
    get_session: Callable[[], Session]
    know_group: Callable[[Writes, dist.ProcessGroup, Sequence[int], dist.ProcessGroup], AbstractContextManager[None]]

    def __init__(self, stages: Sequence[Sequence[int]], rank_offset: int = 0, backend: str | None = None) -> None:
        """Describe the grid.

        Args:
            stages: tensor-, context- and data-parallel size of every stage.
            rank_offset: first global rank of the grid.
            backend: backend of the groups; None is the world's.

        Raises:
            ConfigError: the sizes are wrong, or the plugin's bridges are not applied.
            RuntimeError: torch.distributed is not initialised, or the grid does not fit the world.
        """
        super().__init__(stages, rank_offset)
        session = self.get_session()
        if not session.applied.has_bridges:
            raise ConfigError(
                "StageCommGrid needs the plugin's communicator between stages; call vtp_plugin.apply(bridges=True) "
                "first"
            )
        if not dist.is_initialized():
            raise RuntimeError("a grid needs the world: call torch.distributed.init_process_group first")
        if rank_offset + self.size > dist.get_world_size():
            raise RuntimeError(
                f"the grid {self.describe()} does not fit a world of {dist.get_world_size()} ranks: make it smaller or "
                "start more processes"
            )
        self._session = session
        self._known_groups = ExitStack()
        self.shape = self.shape_at(dist.get_rank())
        self.backend = backend
        self._pgs: dict[tuple[str, frozenset[str]], dist.ProcessGroup | None] = {}
        self._pipelines: list[dist.ProcessGroup] = []
        self._whole_stages: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None = None
        self._has_own_tp = False

    def create_pg(self, dims: str | Sequence[str], *, view: str | None = None, **kwargs: Any) -> Any:
        """Create the groups along some dimensions, and return this rank's; along `pp` open the channels as well.

        Args:
            dims: one dimension or several, in any order.
            view: a registered view.
            kwargs: options for torch's ``new_group`` (timeout, pg_options, group_desc).

        Raises:
            KeyError: the groups have been created, or the view is unknown.
            ConfigError: a dimension is unknown.
        """
        key = self.stored_under(dims, view)
        if key in self._pgs and not (key == _TP and self._has_own_tp):
            raise KeyError(f"process group {dims} of view {key[0]!r} has already been created: use get_pg")
        ranks = self.get_rank_enum(dims, view=view)
        if key == _TP and self._has_own_tp:
            self._has_own_tp = False
        elif key == _PP:
            self._pgs[key] = self._create_pipelines(ranks, kwargs)
        elif self.place(dims, self.rank_offset, view=view) is not None:
            self._pgs[key] = self._create_model_group(dims, view)
        else:
            own, _ = dist.new_subgroups_by_enumeration(ranks, backend=self.backend, **kwargs)
            self._pgs[key] = own if isinstance(own, dist.ProcessGroup) else None
        return self._pgs[key]

    def get_pg(self, dims: str | Sequence[str], *, view: str | None = None) -> Any:
        """Return this rank's group along some dimensions; along `pp` the first that it is in.

        Raises:
            KeyError: the group has not been created, or the view is unknown.
        """
        key = self.stored_under(dims, view)
        if key not in self._pgs:
            raise KeyError(f"process group {dims} of view {key[0]!r} has not been created: call create_pg first")
        return self._pgs[key]

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank belongs to the grid."""
        return self.contains(dist.get_rank())

    def destroy(self) -> None:
        """End all groups and channels of this rank."""
        self._session.close_module(self._pgs.pop(_PP, None))
        self._known_groups.close()
        groups = [*self._pgs.values(), *self._pipelines, *(self._whole_stages or ())]
        settle(self._session.choose_platform())
        close_groups(group for group in groups if not isinstance(group, ModelGroup))
        self._pipelines.clear()
        self._pgs.clear()
        self._whole_stages = None

    def _create_model_group(self, dims: str | Sequence[str], view: str | None) -> ModelGroup | None:
        """Make the group that counts every stage once, out of the groups of each whole stage and of their leaders."""
        if self._whole_stages is None:
            inside = [list(self.layout.stage_ranks(stage)) for stage in range(self.layout.num_stages)]
            own, _ = dist.new_subgroups_by_enumeration(inside, backend=self.backend)
            leaders = dist.new_group([self.layout.leader(stage) for stage in range(len(inside))], backend=self.backend)
            self._whole_stages = (
                own if isinstance(own, dist.ProcessGroup) else None,
                leaders if isinstance(leaders, dist.ProcessGroup) else None,
            )
        whole_stage, leaders = self._whole_stages
        rank = dist.get_rank()
        place = self.place(dims, rank, view=view) if self.contains(rank) else None
        if place is None or whole_stage is None:
            return None
        group = ModelGroup(
            place,
            stage_leader=self.layout.leader(self.layout.stage_of(rank)),
            whole_stage_group=whole_stage,
            leaders_group=leaders,
        )
        self._known_groups.enter_context(self.know_group(self._session.writes, group, group.ranks, whole_stage))
        return group

    def _create_pipelines(self, ranks: Sequence[Sequence[int]], options: Any) -> dist.ProcessGroup | None:
        """Make the pipeline groups, and the channels, whose collectives run in the tensor-parallel group."""
        if _TP not in self._pgs:
            self.create_pg("tp")
            self._has_own_tp = True
        for pipeline in ranks:
            group = dist.new_group(list(pipeline), backend=self.backend, **options)
            if isinstance(group, dist.ProcessGroup):
                self._pipelines.append(group)
        watch_for_modules(self._session)
        self._session.open_module(self.layout, stage_group=self._pgs[_TP], pipeline_groups=tuple(self._pipelines))
        return next(iter(self._pipelines), None)


_TP, _PP = (("base", frozenset({name})) for name in ("tp", "pp"))
