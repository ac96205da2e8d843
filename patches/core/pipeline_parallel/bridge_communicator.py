"""`bridge-communicator`: bridges between modules on disjoint ranks go over our channels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import bridge_communicator
from megatron.core.pipeline_parallel.bridge_communicator import CommRole, RankCommInfo

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import subclasses
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, SequenceCut, boundary_ranks, require_disjoint
from vtp_plugin.plan.layout.stage_grid import StageRanks
from vtp_plugin.runtime.bridges.colocated import BatchAxes
from vtp_plugin.runtime.bridges.separate import Bridge, BridgeGroups, open_bridge, open_bridge_groups
from vtp_plugin.session import Session
from vtp_plugin.session.stage_comm_grid import watch_for_modules


class _Grid:
    """A grid as Megatron's constructor can read it: without the name `cp`, since it refuses all sizes but 1."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.dim_names = ["context" if name == "cp" else name for name in grid.dim_names]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def _gen_rank_enum(self, dims: Sequence[str]) -> list[list[int]]:
        return self._grid._gen_rank_enum(["cp" if name == "context" else name for name in dims])


def current_class(get_session: Callable[[], Session]) -> type:
    """Return our bridge: the one that stands in Megatron's place, or else a new subclass of Megatron's."""
    found = bridge_communicator.BridgeCommunicator
    return found if found.__module__ == __name__ else bridge_class(get_session, found)


# Two uses of the name must give one class.
@functools.cache
def bridge_class(get_session: Callable[[], Session], original: type) -> type:
    """Make the subclass that sends between two modules of any grids over the plugin's channels."""
    # Messages show Megatron's name; the module says whose class it is.
    names = {"__qualname__": original.__qualname__, "__module__": __name__, "__doc__": _OverChannels.__doc__}
    return type(original.__name__, (_OverChannels, original), {**names, "get_session": staticmethod(get_session)})


class _OverChannels:
    """Megatron's bridge between two modules on disjoint ranks, over the plugin's channels.

    The arguments of Megatron's class, its methods and its attributes stay. Beyond it: context-parallel and
    data-parallel sizes of any kind, all links at once, no wait for a send, and these keywords, equal on all ranks.

    Args:
        src_sequence: what the context-parallel ranks of the source hold: ``"whole"``, ``"plain"`` or ``"zigzag"``.
        dest_sequence: how the destination's context-parallel ranks cut a sequence.
        src_sharded: whether its tensor-parallel ranks hold slices (sequence parallelism).
        dest_sharded: whether the destination's tensor-parallel ranks hold slices.
        fixed_shape: shape of the share of one replica of the source, whole, of every microbatch; then no headers
            cross.
        has_gradient: whether gradients come back; ``False`` for a frozen encoder. Where Megatron's multi-module
            communicator makes the bridge, set these two as attributes instead, on all ranks, before the first message.
    """

    # What the subclass is made with, and what Megatron's constructor sets.
    get_session: Callable[[], Session]
    comm_dtype: torch.dtype | None
    current_rank: int
    dim_mapping: dict[str, int]
    tensor_ndim: int
    src_grid_broadcast_pg: dist.ProcessGroup | None
    dest_grid_broadcast_pg: dist.ProcessGroup | None
    src_grid_broadcast_ranks: list[int]
    dest_grid_broadcast_ranks: list[int]
    src_tp_leaders: list[int]
    dest_tp_leaders: list[int]
    _bridge_pg_cache: ClassVar[dict[str, Any]]
    _broadcast_pg_cache: ClassVar[dict[str, Any]]

    def __init__(
        self,
        src_grid: Any,
        dest_grid: Any,
        dim_mapping: dict[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        src_module_name: str | None = None,
        dest_module_name: str | None = None,
        tensor_ndim: int = 3,
        *,
        src_sequence: str = "whole",
        dest_sequence: str = "whole",
        src_sharded: bool = False,
        dest_sharded: bool = False,
        fixed_shape: Sequence[int] | None = None,
        has_gradient: bool = True,
    ) -> None:
        grids = (src_grid, dest_grid)
        ranges = [range(grid.rank_offset, grid.rank_offset + grid.size) for grid in grids]
        require_disjoint(*ranges)
        self._session = self.get_session()
        watch_for_modules(self._session)
        groups: tuple[BridgeGroups, ...] = ()
        if ranges[0] != ranges[1]:
            ends = [
                bridge_end(grid, is_src, sequence, is_sharded)
                for grid, is_src, sequence, is_sharded in (
                    (src_grid, True, src_sequence, src_sharded),
                    (dest_grid, False, dest_sequence, dest_sharded),
                )
            ]
            name = f"{src_module_name or 'source'} -> {dest_module_name or 'destination'}"
            # Before Megatron's own, since torch knows of groups that a rank is not in only the last one.
            groups = open_bridge_groups(
                BridgeSpec.between(name, *ends, num_dims=tensor_ndim),
                cache=self._bridge_pg_cache,
                platform=self._session.choose_platform(),
                timeout_s=self._session.ranks.timeout_s,
            )
        base: Any = super()
        base.__init__(
            _Grid(at_boundary(src_grid, is_last=True)),
            _Grid(at_boundary(dest_grid, is_last=False)),
            dim_mapping,
            comm_dtype,
            src_module_name,
            dest_module_name,
            tensor_ndim,
        )
        self.src_grid, self.dest_grid = src_grid, dest_grid
        self._has_gradient, self._fixed_shape = has_gradient, fixed_shape
        self.vtp_bridge = self._open(groups, fixed_shape, has_gradient)

    @property
    def has_gradient(self) -> bool:
        """Whether gradients come back over the bridge."""
        return self._has_gradient

    @has_gradient.setter
    def has_gradient(self, value: bool) -> None:
        self._has_gradient = value
        if self.vtp_bridge is not None:
            self.vtp_bridge.has_gradient = value

    @property
    def fixed_shape(self) -> Sequence[int] | None:
        """Shape of the share of one replica of the source, of every microbatch; None where headers say it."""
        return self._fixed_shape

    @fixed_shape.setter
    def fixed_shape(self, value: Sequence[int] | None) -> None:
        self._fixed_shape = value
        if self.vtp_bridge is not None:
            self.vtp_bridge.fixed_shape = value

    def _open(
        self, groups: Sequence[BridgeGroups], fixed_shape: Sequence[int] | None, has_gradient: bool
    ) -> Bridge | None:
        if not any(self.current_rank in one.spec.members for one in groups):
            return None
        spec = groups[0].spec
        is_src = self.current_rank in spec.src.ranks
        forward, backward = open_bridge(
            groups,
            stage_group=self.src_grid_broadcast_pg if is_src else self.dest_grid_broadcast_pg,
            platform=self._session.choose_platform(),
            monitor=self._session.ranks.monitor,
            audit=self._session.start.open_audit(self._session.config, self.current_rank),
        )
        order = (self.dim_mapping["s"], self.dim_mapping["b"], self.dim_mapping["h"])
        return Bridge(
            forward,
            backward,
            axes=BatchAxes(num_dims=self.tensor_ndim, order=order),
            dtype=self.comm_dtype or torch.get_default_dtype(),
            fixed_shape=fixed_shape,
            has_gradient=has_gradient,
            agree=self._session.ranks.agreement(
                f"the first message of the {spec.name.partition(',')[0]}", spec.participants
            ),
        )

    @classmethod
    def _get_or_create_broadcast_pg(cls, ranks_list: list[list[int]]) -> dist.ProcessGroup | None:
        key = str(sorted(tuple(ranks) for ranks in ranks_list))
        if key not in cls._broadcast_pg_cache:
            # Megatron names NCCL; the world's backend is the one of its device.
            cls._broadcast_pg_cache[key], _ = dist.new_subgroups_by_enumeration(ranks_list)
        return cls._broadcast_pg_cache[key]

    @classmethod
    def _get_or_create_bridge_pg(cls, ranks: list[int]) -> None:
        """Open no group: nothing crosses in Megatron's."""

    @property
    def bridge_pg(self) -> dist.ProcessGroup | None:
        """Megatron's group of the leaders, which carries nothing. The first use opens it, on all ranks together."""
        leaders = sorted({*self.src_tp_leaders, *self.dest_tp_leaders})
        if str(leaders) not in self._bridge_pg_cache:
            self._bridge_pg_cache[str(leaders)] = dist.new_group(leaders)
        return self._bridge_pg_cache[str(leaders)]

    @bridge_pg.setter
    def bridge_pg(self, group: None) -> None:
        """Let Megatron's constructor set it."""

    def build_comm_map(self, src_tp_leaders: list[int], dest_tp_leaders: list[int]) -> None:
        """Fill `comm_map` as Megatron does; where the replicas do not divide, by what they have in common."""
        counts = len(src_tp_leaders), len(dest_tp_leaders)
        if max(counts) % min(counts) == 0:
            base: Any = super()
            base.build_comm_map(src_tp_leaders, dest_tp_leaders)
            return
        self.comm_map = _comm_map(self, src_tp_leaders, dest_tp_leaders)

    def send_forward(self, tensor_to_send: torch.Tensor) -> None:
        """Send this rank's part of an activation; all ranks of the source's last stage call it."""
        if bridge := self._on("src", "send_forward"):
            bridge.send_forward(tensor_to_send, split_sizes(tensor_to_send))

    def post_recv_forward(self) -> None:
        """Post the receive of the next activation, before the compute that hides it; `recv_forward` takes it."""
        if bridge := self._on("dest", "post_recv_forward"):
            bridge.post_forward()

    def recv_forward(self) -> torch.Tensor | None:
        """Return the next activation, a fresh leaf; all ranks of the destination's first stage call it."""
        bridge = self._on("dest", "receive_forward")
        return None if bridge is None else bridge.recv_forward()

    def send_backward(self, grad_tensor: torch.Tensor) -> None:
        """Send the gradient of the oldest activation that has none yet."""
        if bridge := self._on("dest", "send_backward"):
            bridge.send_backward(grad_tensor, split_sizes(grad_tensor))

    def recv_backward(self) -> torch.Tensor | None:
        """Return the gradient of the oldest activation that has none yet; None for a frozen encoder."""
        bridge = self._on("src", "receive_backward")
        return None if bridge is None else bridge.take_backward(bridge.post_backward())

    def send_forward_recv_backward(
        self, input_tensor: torch.Tensor, grad_shape: tuple[int, ...] | None = None
    ) -> torch.Tensor | None:
        """Send an activation, and return the gradient of an earlier one; `grad_shape` is not used."""
        bridge = self._on("src", "send_forward_recv_backward")
        if bridge is None:
            return None
        return bridge.exchange_forward(input_tensor, split_sizes(input_tensor))

    def send_backward_recv_forward(
        self, grad_tensor: torch.Tensor, forward_shape: tuple[int, ...] | None = None
    ) -> torch.Tensor | None:
        """Send the gradient of an earlier activation, and return the next one; `forward_shape` is not used."""
        bridge = self._on("dest", "send_backward_recv_forward")
        if bridge is None:
            return None
        return bridge.exchange_backward(grad_tensor, split_sizes(grad_tensor))

    def _on(self, end: str, method: str) -> Bridge | None:
        """Return the bridge of a rank that may call a method; None in a stage that is not at the bridge."""
        grid = self.src_grid if end == "src" else self.dest_grid
        if not self.is_current_rank_in_grid(grid):
            name = {"src": "source", "dest": "destination"}[end]
            raise ValueError(f"[Bridge Communicator] [{method}] Rank {self.current_rank} is not in the {name} grid.")
        if self.src_grid.rank_offset == self.dest_grid.rank_offset:
            raise ConfigError(
                f"[Bridge Communicator] [{method}] both modules are on the same ranks; use a "
                "ColocatedBridgeCommunicator"
            )
        ranks = self.src_grid_broadcast_ranks if end == "src" else self.dest_grid_broadcast_ranks
        return self.vtp_bridge if self.current_rank in ranks else None


@subclasses(
    "megatron.core.pipeline_parallel.bridge_communicator:BridgeCommunicator",
    id="bridge-communicator",
    when=Moment.BRIDGES,
    versions=">=0.19,<0.20",
    aliases=("megatron.core.pipeline_parallel.multimodule_communicator:BridgeCommunicator",),
)
def _in_this_run(session: Session, original: type) -> type:
    """Make the subclass that belongs to the applied plugin.

    Why: its methods send whole tensors between leaders, one after another, and need sizes that divide; a subclass sends
    every overlap over its own link.

    Remove when: Megatron's bridge takes a communicator as its pipelines do.
    """
    return bridge_class(lambda: session, original)


def bridge_end(grid: Any, is_last: bool, sequence: str, is_sharded: bool) -> BridgeEndpoint:
    """Describe one module at a bridge: the last stage of its grid, or the first.

    Raises:
        ConfigError: the word for the sequence is unknown, or the grid has a dimension that bridges do not know.
    """
    if sequence not in tuple(SequenceCut):
        raise ConfigError(f"sequence {sequence!r} of a bridge's end; use one of {', '.join(SequenceCut)}")
    stage = at_boundary(grid, is_last=is_last)
    ranks = boundary_ranks(stage.shape, stage.dim_names, stage.rank_offset, is_last=is_last)
    return BridgeEndpoint(ranks=ranks, sequence=SequenceCut(sequence), is_sharded=is_sharded)


def at_boundary(grid: Any, *, is_last: bool) -> Any:
    """Return the grid of a module, or of its stage at the bridge where stages differ."""
    return grid.boundary(is_last=is_last) if isinstance(grid, StageRanks) else grid


def split_sizes(tensor: torch.Tensor) -> list[int] | None:
    """Return the number of tokens of every sample, which MimoModel notes where samples differ."""
    sizes = getattr(tensor, "_mimo_bridge_split_sizes", None)
    return None if sizes is None else [int(size) for size in sizes]


def _comm_map(bridge: Any, sources: list[int], destinations: list[int]) -> dict[int, Any]:
    """Say who sends to whom, leader by leader, where one replica has samples of several on the other side."""
    grids = (bridge.src_grid, bridge.dest_grid)
    infos = {
        rank: RankCommInfo(role=CommRole.MEMBER)
        for grid in grids
        for rank in range(grid.rank_offset, grid.rank_offset + grid.size)
    }
    num_src, num_dst = len(sources), len(destinations)
    for i, src in enumerate(sources):
        # Replica i holds the fractions i / num_src to (i + 1) / num_src of the batch.
        first, stop = i * num_dst // num_src, -(-(i + 1) * num_dst // num_src)
        infos[src] = RankCommInfo(role=CommRole.SENDER, send_to_ranks=destinations[first:stop])
    for j, dst in enumerate(destinations):
        first, stop = j * num_src // num_dst, -(-(j + 1) * num_src // num_dst)
        infos[dst] = RankCommInfo(role=CommRole.RECEIVER, recv_from_ranks=sources[first:stop])
    return infos
