"""What the user asked for: one frozen object, made from the keyword arguments of ``apply()`` and from flags.

A field of :class:`VtpConfig` declares an option once: its flag, its keyword, its help, and how its value is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.ground.flag import Flag, FlagGroup
from vtp_plugin.ground.values import (
    format_value,
    parse_bridges,
    parse_bytes,
    parse_cost_words,
    parse_cp_list,
    parse_dp_list,
    parse_ep_list,
    parse_etp_list,
    parse_in_flight,
    parse_layer_list,
    parse_sites,
    parse_size_list,
)

DeviceName = Literal["auto", "cuda", "npu", "cpu"]
TransportName = Literal["auto", "rank0", "sliced", "divided"]
ScheduleName = Literal["stock", "planned"]
DpModeName = Literal["multiplex", "split"]
LogLevelName = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
# These hold paths, which other sites must not read.
_LOCAL_FIELDS = ("audit",)


def _option(group: FlagGroup, default: Any, help: str, metavar: str | None = None, **flag: Any) -> Any:
    """Declare a field, with what :func:`flags_of_fields` cannot take from its name and type."""
    return dataclasses.field(default=default, metadata={"group": group, "help": help, "metavar": metavar, **flag})


_where = functools.partial(_option, FlagGroup.WHERE)
_what = functools.partial(_option, FlagGroup.WHAT)
_when = functools.partial(_option, FlagGroup.WHEN)
_trust = functools.partial(_option, FlagGroup.TRUST)
_failure = functools.partial(_option, FlagGroup.FAILURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VtpConfig:
    """The plugin's options. Each is valid by itself; whether it fits the world and the model is checked later.

    The help of its flag says what a field means. Lists have one entry for every pipeline stage, in stage order.
    """

    size_list: tuple[int, ...] | Literal["auto"] | None = _where(
        None,
        "tensor-parallel size of every pipeline stage, first stage first; or 'auto': node k of the launcher is stage k",
        "1,4,4",
        keyword="vtp_size_list",
        parse=parse_size_list,
    )
    cp_list: tuple[int, ...] | None = _where(
        None,
        "context-parallel size of every stage; default: --context-parallel-size on all",
        "1,2,2",
        keyword="vtp_cp_list",
        parse=parse_cp_list,
    )
    dp_list: tuple[int, ...] | None = _where(
        None,
        "data-parallel size (number of replicas) of every stage; default: one size for all, from the number of ranks",
        "1,2,2",
        keyword="vtp_dp_list",
        parse=parse_dp_list,
    )
    ep_list: tuple[int, ...] | None = _where(
        None,
        "expert-parallel size of every stage; default: --expert-model-parallel-size on all",
        "1,2,2",
        keyword="vtp_ep_list",
        parse=parse_ep_list,
    )
    etp_list: tuple[int, ...] | None = _where(
        None,
        "tensor-parallel size of the experts of every stage; default: --expert-tensor-parallel-size on all, or else "
        "each stage's own tensor-parallel size",
        "1,1,1",
        keyword="vtp_etp_list",
        parse=parse_etp_list,
    )
    data_parallel_size: int | None = _where(
        None, "replicas of every stage; needed with '--vtp-size-list auto' only", "N", type=int
    )
    device: DeviceName = _where(
        "auto",
        "device to train on, one kind for the whole run; auto (default) asks in this order: npu, cuda, cpu",
    )
    force: bool = _where(False, "use the plugin for stages of one size too (for tests and benchmarks)")
    layerwise_disaggregated: bool = _where(
        False,
        "U-shaped pipeline: stage 0, the edge, holds the first and the last layers, with embedding, head, loss and "
        "data; give the layers by --num-layer-list, or by --pipeline-model-parallel-layout with one part more than "
        "stages",
        name="--layerwise-disaggregated-training",
    )
    num_layer_list: tuple[int, ...] | None = _where(
        None,
        "U-shaped pipeline: layers of the edge's first part, of every cloud stage, and of the edge's last part",
        "1,3,3,1",
        name="--num-layer-list",
        parse=parse_layer_list,
    )
    encoder_layer_list: tuple[int, ...] | None = _where(
        None,
        "U-shaped pipeline with an encoder whose middle layers are in the cloud, too: two rings. Layers of its first "
        "part on the edge, of its part on every cloud stage, and of its last part on the edge, which is where the "
        "first part of the language model is",
        "1,3,3,1",
        parse=functools.partial(parse_layer_list, flag="--vtp-encoder-layer-list"),
    )
    transport: TransportName = _what(
        "auto",
        "how tensors cross between stages: rank0 goes through one rank of each stage, sliced gives every link its "
        "share, divided cuts also between stages of one size; auto (default) takes rank0 between sites and for small "
        "tensors; for others a run tries what there is at its start and takes the fastest",
    )
    transport_threshold_bytes: int | None = _what(
        None,
        "with --vtp-transport auto: tensors of this size and more cross in slices if there is a choice, smaller ones "
        "by rank0, and the run tries nothing; bytes, or a number with KiB or MiB",
        "4MiB",
        name="--vtp-transport-threshold",
        parse=parse_bytes,
    )
    dp_mode: DpModeName = _what(
        "multiplex",
        "how stages of different data-parallel sizes work together: multiplex (default) lets a narrow stage run its "
        "microbatches in turn for each replica of a wide one; split lets it run larger microbatches, and each replica "
        "of the wide one gets a part (--micro-batch-size then holds for the widest stage)",
    )
    bridges: bool | Literal["extended"] = _what(
        False,
        "put the plugin's bridges between modules (MIMO) in the place of Megatron's, also without a list; 'extended' "
        "lets the colocated one take what Megatron's refuses",
        "extended",
        **{"nargs": "?", "const": True, "parse": parse_bridges},
    )
    schedule: ScheduleName = _when(
        "stock",
        "stock (default) keeps Megatron's pipeline schedules; planned runs the same orders, but posts every receive "
        "before the compute that precedes it, and no compute waits for a send; with --vtp-bridges also the orders of "
        "several modules",
    )
    in_flight: tuple[int, ...] | None = _when(
        None,
        "U-shaped pipeline: most microbatches in flight on each stage, or one number for all. A stage keeps that many "
        "activations of each of its chunks. Default: the number that keeps the busiest stage busy, plus two. Modules "
        "in a planned order: on each stage of all modules, encoders first, to let an encoder run ahead",
        "8,4,4",
        parse=parse_in_flight,
    )
    costs: tuple[str, ...] | None = _when(
        None,
        "U-shaped pipeline: the durations and links that the order is planned for, such as forward_ms=40,80,40 "
        "latency_ms=20. Default: the first steps measure them, and the run prints them as this flag.",
        "KEY=VALUE",
        nargs="+",
        parse=parse_cost_words,
    )
    replan_share: float = _when(
        0.25,
        "U-shaped pipeline: a run that measured its costs measures them again and plans a new order, at most three "
        "times, if a step is longer or shorter than planned by more than this share; default 0.25, inf for never",
        "0.25",
        type=float,
    )
    sites: tuple[str, ...] | None = _trust(
        None, "site of every stage; default: all in one", "edge,cloud,cloud", parse=parse_sites
    )
    share_errors: bool = _trust(
        False,
        "several sites: let the other sites read the texts of this rank's errors and the values of its arguments; "
        "without it they read the type of an error and where it happened. Each site decides for itself",
    )
    audit: str | None = _trust(
        None,
        "record every message between stages, one JSON object a line; rank 3 writes FILE with .rank3 before its "
        "suffix; sites may differ",
        "FILE",
    )
    timeout_s: float = _failure(
        600.0,
        "a rank that does not answer for this long ends the run on all ranks; default 600",
        "SECONDS",
        type=float,
    )
    log_level: LogLevelName = _failure(
        "INFO",
        "how much the plugin says: DEBUG, INFO (default), WARNING or ERROR. INFO comes from rank 0 and from the first "
        "rank of every other site, DEBUG from all ranks",
        "INFO",
    )

    def __post_init__(self) -> None:
        """Check the values that can be checked without the world and the model; raise ConfigError if one is wrong."""
        for flag in flags_of_fields():
            value = getattr(self, str(flag.field))
            if flag.choices and value not in flag.choices:
                what = str(flag.field).replace("_", " ")
                raise LayoutError(f"{what} {value!r} is unknown; use one of {', '.join(flag.choices)}")
        if self.sites is not None and isinstance(self.size_list, tuple) and len(self.sites) != len(self.size_list):
            raise LayoutError(
                f"vtp_sites {','.join(self.sites)!r} names {len(self.sites)} sites, the size list has "
                f"{len(self.size_list)} stages; name one site per stage, such as edge,cloud,cloud"
            )
        self._check_list("cp_list", self.cp_list, "context-parallel")
        self._check_list("dp_list", self.dp_list, "data-parallel")
        self._check_list("ep_list", self.ep_list, "expert-parallel")
        self._check_list("etp_list", self.etp_list, "expert tensor-parallel")
        if self.num_layer_list is not None and not self.layerwise_disaggregated:
            raise LayoutError("--num-layer-list is for --layerwise-disaggregated-training; give both or none")
        if self.encoder_layer_list is not None and not self.layerwise_disaggregated:
            raise LayoutError("--vtp-encoder-layer-list is for --layerwise-disaggregated-training; give both or none")
        if self.dp_list is not None and self.data_parallel_size is not None:
            raise LayoutError(
                f"data-parallel size {self.data_parallel_size} and vtp_dp_list {format_value(self.dp_list)} say the "
                "same thing twice; give one of them"
            )
        if not 0 < self.timeout_s < float("inf"):
            raise LayoutError(f"timeout of {self.timeout_s} s must be positive and finite; leave it out for 600 s")
        if self.transport_threshold_bytes is not None and self.transport != "auto":
            raise LayoutError(
                f"a transport threshold of {self.transport_threshold_bytes} bytes is for the transport auto, not for "
                f"{self.transport}; give one of them"
            )
        if not self.replan_share > 0:
            raise LayoutError(
                f"replan share {self.replan_share} must be positive, such as 0.25 for a quarter; inf never plans anew"
            )
        if self.data_parallel_size is not None and self.data_parallel_size < 1:
            raise LayoutError(f"data-parallel size {self.data_parallel_size} must be at least 1; leave it out for 1")

    def _check_list(self, name: str, sizes: tuple[int, ...] | None, what: str) -> None:
        if sizes is None:
            return
        shown = format_value(sizes)
        if self.size_list == "auto":
            raise LayoutError(f"vtp_{name} {shown} needs a list of stages; write vtp_size_list out instead of 'auto'")
        if isinstance(self.size_list, tuple) and len(sizes) != len(self.size_list):
            raise LayoutError(
                f"vtp_{name} {shown} has {len(sizes)} entries, the size list has {len(self.size_list)} stages; "
                f"give one {what} size per stage"
            )

    @property
    def num_rings(self) -> int:
        """How often a microbatch passes the cloud of a U-shaped pipeline; 0 for other pipelines."""
        return 0 if not self.layerwise_disaggregated else 1 if self.encoder_layer_list is None else 2

    @property
    def has_several_sites(self) -> bool:
        """Whether stages are at different sites."""
        return len(set(self.sites or ())) > 1

    @property
    def has_planned_schedule(self) -> bool:
        """Whether the plugin's executor runs the steps."""
        return self.schedule == "planned" or self.layerwise_disaggregated or self.has_unequal_dp

    @property
    def is_forced(self) -> bool:
        """Whether the plugin's groups and communicator are in use even for stages of one size."""
        return self.force or self.has_planned_schedule

    @property
    def has_unequal_dp(self) -> bool:
        """Whether stages have different numbers of replicas."""
        return self.dp_list is not None and len(set(self.dp_list)) > 1


@functools.cache
def flags_of_fields() -> tuple[Flag, ...]:
    """List the flags of all fields, in their order.

    The name of a flag is ``--vtp-`` and the field's name, the keyword is the field's name, unless the field says
    otherwise. The names of a Literal type are the choices.

    >>> flag = flags_of_fields()[0]
    >>> flag.name, flag.keyword, flag.field
    ('--vtp-size-list', 'vtp_size_list', 'size_list')
    """
    types = get_type_hints(VtpConfig)
    flags: list[Flag] = []
    for field in dataclasses.fields(VtpConfig):
        choices = get_args(types[field.name]) if get_origin(types[field.name]) is Literal else ()
        name = f"--vtp-{field.name.replace('_', '-')}"
        given: dict[str, Any] = {"name": name, "keyword": field.name, **field.metadata}
        given["metavar"] = given["metavar"] or "|".join(choices) or None
        flags.append(Flag(**given, field=field.name, choices=choices))
    return tuple(flags)


def read_keywords(keywords: Mapping[str, object]) -> VtpConfig:
    """Make the options from the keyword arguments of ``apply()``.

    >>> read_keywords({"vtp_size_list": "1,2", "force": True}).size_list
    (1, 2)

    Raises:
        ConfigError: a value breaks its rule.
    """
    flags = [flag for flag in flags_of_fields() if flag.keyword in keywords]
    values: dict[str, Any] = {str(flag.field): flag.read(keywords[str(flag.keyword)]) for flag in flags}
    return VtpConfig(**values)


def merge(base: VtpConfig, flags: Mapping[str, object]) -> VtpConfig:
    """Add flags to what ``apply()`` was given; a flag with the value ``None`` was not given.

    >>> merge(VtpConfig(size_list=(1, 2)), {"device": "cpu", "size_list": None}).device
    'cpu'

    Raises:
        ConfigError: a flag contradicts a keyword argument.
    """
    default, changes = VtpConfig(), {name: value for name, value in flags.items() if value is not None}
    for name, value in changes.items():
        given = getattr(base, name)
        if given not in (getattr(default, name), value):
            both = f"apply() was given {name}={format_value(given)}, the command line says {format_value(value)}"
            text = f"{both}; give it in one place"
            raise ConfigError(text, shared=None if name in _LOCAL_FIELDS else text)
    return dataclasses.replace(base, **changes)
