"""`colocated-bridge`: a bridge between modules on the same ranks takes any sizes and any spread, where asked to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.comm import colocated_communicator
from megatron.core.models.mimo.comm.colocated_communicator import BridgeDirection

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import subclasses
from vtp_plugin.patches.core.pipeline_parallel.bridge_communicator import bridge_end, split_sizes
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.runtime.bridges.colocated import BatchAxes, ColocatedBridge
from vtp_plugin.session import Session
from vtp_plugin.session.stage_comm_grid import watch_for_modules


def current_class(get_session: Callable[[], Session]) -> type:
    """Return our bridge: the one that stands in Megatron's place, or else a new subclass of Megatron's."""
    found = colocated_communicator.ColocatedBridgeCommunicator
    return found if found.__module__ == __name__ else colocated_class(get_session, found)


# Two uses of the name must give one class.
@functools.cache
def colocated_class(get_session: Callable[[], Session], original: type) -> type:
    """Make the subclass that also takes what Megatron's class refuses."""
    names = {"__qualname__": original.__qualname__, "__module__": __name__, "__doc__": _Colocated.__doc__}
    return type(original.__name__, (_Colocated, original), {**names, "get_session": staticmethod(get_session)})


class _Colocated:
    """Megatron's bridge between two modules on the same ranks, for any sizes and spreads of theirs.

    Without ``extended`` it takes and refuses what Megatron's class does, and moves it in the same way. Its input must
    be the same on all tensor-parallel ranks of a replica then.

    Args:
        extended: take any data-parallel and context-parallel sizes, and the shardings that follow; default is what
            ``apply(bridges=...)`` says.
        src_sequence: what the context-parallel ranks of the source hold: ``"whole"``, ``"plain"`` or ``"zigzag"``.
        dest_sequence: how the destination's context-parallel ranks cut a sequence.
        src_sharded: whether its tensor-parallel ranks hold slices (sequence parallelism).
        dest_sharded: whether the destination's tensor-parallel ranks hold slices.
        has_fixed_shape: every call is like the first one, and only that one compares what the ranks have; of use where
            more than Megatron's class can do is done.
    """

    # What the subclass is made with, and what Megatron's methods set.
    get_session: Callable[[], Session]
    src_dp_size: int
    dest_dp_size: int
    src_tp_size: int
    dest_tp_size: int
    rank_to_src_pos: dict[int, tuple[int, int]]
    rank_to_dest_pos: dict[int, tuple[int, int]]
    _build_gather_groups: Callable[..., list[list[int]]]
    _build_rank_mappings: Callable[[], None]
    _extract_parallelism_info: Callable[[], None]

    def __init__(
        self,
        src_grid: Any,
        dest_grid: Any,
        src_module_name: str = "src",
        dest_module_name: str = "dest",
        dim_mapping: dict[str, int] | None = None,
        *,
        extended: bool | None = None,
        src_sequence: str = "whole",
        dest_sequence: str = "whole",
        src_sharded: bool = False,
        dest_sharded: bool = False,
        has_fixed_shape: bool = False,
    ) -> None:
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self.has_fixed_shape = has_fixed_shape
        self.src_module_name, self.dest_module_name = src_module_name, dest_module_name
        self.dim_mapping = dim_mapping or {"b": 0, "s": 1, "h": 2}
        self.current_rank = dist.get_rank()
        self._session = self.get_session()
        self.extended = self._session.config.bridges == "extended" if extended is None else extended
        names_spread = (src_sequence, dest_sequence, src_sharded, dest_sharded) != ("whole", "whole", False, False)
        if names_spread and not self.extended:
            raise ConfigError(
                "a ColocatedBridgeCommunicator with a spread other than whole copies needs extended=True, or "
                "vtp_plugin.apply(bridges='extended')"
            )
        self._is_wide = self.extended and (names_spread or self._is_refused())
        self._validate_grids()
        self._extract_parallelism_info()
        self.gather_pg: dist.ProcessGroup | None = None
        self.gather_group_ranks: list[list[int]] = []
        small, large = sorted((self.src_dp_size, self.dest_dp_size))
        self.scale = large // small
        self.direction = BridgeDirection.EQUAL
        if large > small:
            is_fan_in = self.src_dp_size > self.dest_dp_size
            self.direction = BridgeDirection.FAN_IN if is_fan_in else BridgeDirection.FAN_OUT
        self._vtp: ColocatedBridge | None = None
        if self._is_wide:
            ends = ((src_grid, src_sequence, src_sharded), (dest_grid, dest_sequence, dest_sharded))
            self._open(*(bridge_end(grid, False, sequence, is_sharded) for grid, sequence, is_sharded in ends))
            return
        self._build_rank_mappings()
        if large > small:
            self._open_gathers()

    def _open_gathers(self) -> None:
        """Open the groups of Megatron's class, on the world's backend."""
        is_fan_in = self.direction is BridgeDirection.FAN_IN
        self.gather_group_ranks = self._build_gather_groups(
            iter_size=min(self.src_dp_size, self.dest_dp_size),
            sibling_tp_size=self.src_tp_size if is_fan_in else self.dest_tp_size,
            scale=self.scale,
            rank_to_pos=self.rank_to_src_pos if is_fan_in else self.rank_to_dest_pos,
        )
        self.gather_pg, _ = dist.new_subgroups_by_enumeration(self.gather_group_ranks)

    def _open(self, src: Any, dst: Any) -> None:
        """Open one group of all ranks, and describe the way between the two layouts."""
        num_dims = max(self.dim_mapping.values()) + 1
        name = f"{self.src_module_name} -> {self.dest_module_name}"
        spec = BridgeSpec.between(name, src, dst, num_dims=num_dims)
        ranks = sorted(src.members)
        watch_for_modules(self._session)
        self.gather_group_ranks = [ranks]
        group = dist.new_group(ranks)
        if self.current_rank not in ranks:
            return
        self.gather_pg = group
        order = (self.dim_mapping["s"], self.dim_mapping["b"], self.dim_mapping["h"]) if num_dims == 3 else (0, 1, 2)
        run, audit = self._session, self._session.start.open_audit(self._session.config, self.current_rank)
        axes = BatchAxes(num_dims=num_dims, order=order)
        self._vtp = ColocatedBridge(
            spec, group, axes, run.choose_platform(), run.ranks.monitor, audit, has_fixed_shape=self.has_fixed_shape
        )

    def _is_refused(self) -> bool:
        """Tell whether Megatron's class refuses the grids."""
        base: Any = super()
        try:
            base._validate_grids()
        except ValueError:
            return True
        return False

    def _validate_grids(self) -> None:
        """Refuse what Megatron's class refuses; with ``extended`` only what is no pair of layouts of the same ranks."""
        if not self._is_wide:
            base: Any = super()
            base._validate_grids()
            return
        for what in ("size", "rank_offset"):
            values = [getattr(grid, what) for grid in (self.src_grid, self.dest_grid)]
            if values[0] != values[1]:
                raise ConfigError(
                    f"the grids of a colocated bridge have the {what} {values[0]} and {values[1]}; give both modules "
                    "the same ranks"
                )
        for grid in (self.src_grid, self.dest_grid):
            missing = [name for name in ("tp", "dp") if name not in grid.dim_names]
            sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
            if missing or sizes.get("pp", 1) > 1:
                raise ConfigError(
                    f"a colocated bridge needs grids with tp and dp, of one pipeline stage; this one is {sizes}"
                )

    def communicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor from the layout of the source to that of the destination, also for gradients."""
        if self._vtp is None:
            base: Any = super()
            return base.communicate(tensor)
        return self._vtp.communicate(tensor, split_sizes(tensor))


@subclasses(
    "megatron.core.models.mimo.comm.colocated_communicator:ColocatedBridgeCommunicator",
    id="colocated-bridge",
    when=Moment.BRIDGES,
    versions=">=0.19,<0.20",
    aliases=("megatron.core.models.mimo.model.base:ColocatedBridgeCommunicator",),
)
def _in_this_run(session: Session, original: type) -> type:
    """Make the subclass that belongs to the applied plugin.

    Why: its constructor supports neither context parallelism nor sizes that do not divide, and its method slices; a
    subclass moves any spread to any other.

    Remove when: Megatron's class takes any pair of grids.
    """
    return colocated_class(lambda: session, original)
