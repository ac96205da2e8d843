"""What the user asked for: one frozen object, made from keyword arguments of ``apply()`` or from ``--vtp-*`` flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from vtp_plugin.errors import ConfigError, LayoutError

DeviceName = Literal["auto", "cuda", "npu", "cpu"]
TransportName = Literal["auto", "rank0", "sliced"]
ScheduleName = Literal["stock", "planned"]
DpModeName = Literal["multiplex", "split"]
# These hold paths, which other sites do not read.
_LOCAL_FIELDS = ("audit",)
LogLevelName = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VtpConfig:
    """The plugin's options, validated in themselves (not yet against a world or a model).

    Attributes:
        size_list: tensor-parallel size of every pipeline stage, in stage order; ``"auto"`` takes one stage per node of
            the launcher; ``None`` leaves Megatron alone.
        cp_list: context-parallel size of every stage, in stage order; ``None`` is Megatron's one size for all.
        dp_list: data-parallel size of every stage, in stage order; ``None`` is one size for all, from the world's.
        dp_mode: how stages of different data-parallel sizes work together. ``"multiplex"`` lets a narrow stage run its
            microbatches in turn for each replica of a wide one, ``"split"`` lets it run larger ones, of which each
            replica gets a part.
        device: platform to run on; ``"auto"`` asks npu, then cuda, then cpu.
        transport: how activations cross a boundary. ``"rank0"`` goes through the leaders, ``"sliced"`` gives every link
            its share; ``"auto"`` takes rank0 between sites and where tensors are small, sliced elsewhere.
        transport_threshold_bytes: with ``transport="auto"``, tensors of at least so many bytes cross in slices where
            there is a choice, smaller ones through the leaders; ``None`` lets the run try both.
        sites: name of the site of every stage, in stage order; ``None`` is one site for all.
        timeout_s: a peer that does not answer for so long ends the run on every rank, in seconds.
        force: use the plugin's groups and communicator for a uniform list too (tests and benchmarks).
        data_parallel_size: replicas of every stage; only needed by ``size_list="auto"``, checked elsewhere.
        schedule: ``"stock"`` keeps Megatron's pipeline schedules; ``"planned"`` runs the same orders by the plugin's
            executor, which posts receives before the compute that precedes them and never waits in a send.
        layerwise_disaggregated: stage 0 holds the first and the last layers, with embedding, head and loss; the order
            is planned.
        audit: file that records every message between stages; each rank puts its number into the name.
        in_flight: in a U, the largest number of microbatches in flight: one for all stages, or one for each. ``None``
            is the number that keeps the busiest stage busy, plus two.
        costs: durations and links that a U's order is planned for, as ``name=value,..`` words (see
            :func:`vtp_plugin.schedule.cost.stated.parse_costs`); ``None`` measures them in the first steps.
        replan_share: share of the planned time of a U's step by which the real one may differ before its costs are
            measured again and its order is planned anew.
        log_level: least level of what the plugin says, see :mod:`vtp_plugin.log`.
        share_errors: let the texts of errors cross from this rank to other sites; each site decides for itself.
    """

    size_list: tuple[int, ...] | Literal["auto"] | None = None
    cp_list: tuple[int, ...] | None = None
    dp_list: tuple[int, ...] | None = None
    dp_mode: DpModeName = "multiplex"
    device: DeviceName = "auto"
    transport: TransportName = "auto"
    transport_threshold_bytes: int | None = None
    sites: tuple[str, ...] | None = None
    timeout_s: float = 600.0
    force: bool = False
    data_parallel_size: int | None = None
    schedule: ScheduleName = "stock"
    layerwise_disaggregated: bool = False
    audit: str | None = None
    in_flight: tuple[int, ...] | None = None
    costs: tuple[str, ...] | None = None
    replan_share: float = 0.25
    log_level: LogLevelName = "INFO"
    share_errors: bool = False

    def __post_init__(self) -> None:
        """Check every value that can be checked alone.

        Raises:
            ConfigError: a value breaks its rule.
        """
        for what, value, names in (
            ("device", self.device, DeviceName),
            ("transport", self.transport, TransportName),
            ("schedule", self.schedule, ScheduleName),
            ("dp mode", self.dp_mode, DpModeName),
            ("log level", self.log_level, LogLevelName),
        ):
            if value not in get_args(names):
                raise LayoutError(f"{what} {value!r} is unknown; use one of {', '.join(get_args(names))}")
        if self.sites is not None and isinstance(self.size_list, tuple) and len(self.sites) != len(self.size_list):
            raise LayoutError(
                f"vtp_sites {','.join(self.sites)!r} names {len(self.sites)} sites, the size list has "
                f"{len(self.size_list)} stages; name one site per stage, such as edge,cloud,cloud"
            )
        self._check_list("cp_list", self.cp_list, "context-parallel")
        self._check_list("dp_list", self.dp_list, "data-parallel")
        if self.dp_list is not None and self.data_parallel_size is not None:
            raise LayoutError(
                f"data-parallel size {self.data_parallel_size} and vtp_dp_list {','.join(map(str, self.dp_list))} say "
                "the same thing twice; give one of them"
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
        shown = ",".join(str(size) for size in sizes)
        if self.size_list == "auto":
            raise LayoutError(f"vtp_{name} {shown} needs a list of stages; write vtp_size_list out instead of 'auto'")
        if isinstance(self.size_list, tuple) and len(sizes) != len(self.size_list):
            raise LayoutError(
                f"vtp_{name} {shown} has {len(sizes)} entries, the size list has {len(self.size_list)} stages; "
                f"give one {what} size per stage"
            )

    @property
    def has_several_sites(self) -> bool:
        """Whether stages are at different sites."""
        return len(set(self.sites or ())) > 1

    @property
    def has_planned_schedule(self) -> bool:
        """Whether the plugin's executor runs the steps."""
        return self.schedule == "planned" or self.layerwise_disaggregated or self.has_unequal_dp

    @property
    def has_unequal_dp(self) -> bool:
        """Whether stages have different numbers of replicas."""
        return self.dp_list is not None and len(set(self.dp_list)) > 1


def parse_size_list(value: str | Sequence[int] | None) -> tuple[int, ...] | Literal["auto"] | None:
    """Read a list of stage sizes from a flag's text or from a sequence of integers.

    >>> parse_size_list("1,4,4")
    (1, 4, 4)
    >>> parse_size_list([2])
    (2,)
    >>> parse_size_list("auto")
    'auto'

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    if value is None:
        return None
    if value == "auto":
        return "auto"
    return _sizes(_entries(value), name="vtp_size_list", what="tensor-parallel", example="1,4,4")


def parse_cp_list(value: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """Read the context-parallel size of every stage from a flag's text or from a sequence of integers.

    >>> parse_cp_list("1, 2,2")
    (1, 2, 2)

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    return (
        None if value is None else _sizes(_entries(value), name="vtp_cp_list", what="context-parallel", example="1,2,2")
    )


def parse_dp_list(value: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """Read the data-parallel size of every stage from a flag's text or from a sequence of integers.

    >>> parse_dp_list([1, 2])
    (1, 2)

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    return None if value is None else _sizes(_entries(value), name="vtp_dp_list", what="data-parallel", example="1,2,2")


def parse_in_flight(value: str | int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Read the most microbatches in flight, of all stages or of each, from a flag's text, a number or a sequence.

    >>> parse_in_flight("8"), parse_in_flight([8, 4, 4])
    ((8,), (8, 4, 4))

    Raises:
        ConfigError: an entry is not a whole number.
    """
    if value is None:
        return None
    entries = _entries((value,) if isinstance(value, int) else value)
    try:
        return tuple(int(str(entry)) for entry in entries)
    except ValueError:
        raise LayoutError(
            f"vtp_in_flight {','.join(map(str, entries))!r} is not a list of whole numbers; write one for all stages, "
            "or one for each, such as 8,4,4"
        ) from None


def parse_bytes(value: str | int | None) -> int | None:
    """Read a number of bytes, with or without a unit.

    >>> parse_bytes("256KiB"), parse_bytes("4MiB"), parse_bytes(1000), parse_bytes(None)
    (262144, 4194304, 1000, None)

    Raises:
        ConfigError: it is not a whole number of bytes, KiB or MiB.
    """
    if value is None:
        return None
    text = str(value).strip()
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("", 1)):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.isascii() and number.isdigit():
            return int(number) * factor
    raise LayoutError(f"{text!r} is not a number of bytes; write 262144, 256KiB or 4MiB")


def parse_cost_words(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Split costs into words, from a text or a sequence of texts.

    >>> parse_cost_words("forward_ms=40,80,40 latency_ms=20")
    ('forward_ms=40,80,40', 'latency_ms=20')
    """
    return None if value is None else tuple((value if isinstance(value, str) else " ".join(value)).split())


def _entries(value: str | Sequence[int]) -> list[object]:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)


def choose_cp_sizes(cp_list: Sequence[int] | None, context_parallel_size: int, *, num_stages: int) -> tuple[int, ...]:
    """Give every stage its context-parallel size, from our list and Megatron's one size.

    >>> choose_cp_sizes(None, 2, num_stages=3), choose_cp_sizes((1, 2), 2, num_stages=2)
    ((2, 2, 2), (1, 2))

    Raises:
        ConfigError: both are given, and Megatron's is not the largest of the list.
    """
    if cp_list is None:
        return (context_parallel_size,) * num_stages
    if context_parallel_size not in (1, max(cp_list)):
        raise LayoutError(
            f"--context-parallel-size {context_parallel_size} contradicts --vtp-cp-list "
            f"{','.join(str(size) for size in cp_list)}; leave it out or give the largest size of the list, "
            f"{max(cp_list)}"
        )
    return tuple(cp_list)


def parse_sites(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Read the site of every stage from a flag's text or from a sequence of names.

    >>> parse_sites("edge, cloud,cloud")
    ('edge', 'cloud', 'cloud')

    Raises:
        ConfigError: a name is empty.
    """
    if value is None:
        return None
    names = tuple(name.strip() for name in (value.split(",") if isinstance(value, str) else value))
    if not names or not all(names):
        raise LayoutError(
            f"vtp_sites {','.join(names)!r} has an empty name; name one site per stage, such as edge,cloud,cloud"
        )
    return names


def _sizes(entries: Sequence[object], *, name: str, what: str, example: str) -> tuple[int, ...]:
    shown = ",".join(str(entry) for entry in entries)
    if not entries:
        raise LayoutError(f"{name} is empty; give one {what} size per pipeline stage, such as {example}")
    numbers = []
    for entry in entries:
        try:
            # By way of its text: True and 2.0 are numbers to int(), but not sizes.
            number = int(str(entry))
        except ValueError:
            number = 0
        if number < 1:
            raise LayoutError(
                f"{name} {shown!r} has the entry {str(entry)!r}, which is not a positive whole number; "
                f"write one {what} size per pipeline stage, such as {example}"
            )
        numbers.append(number)
    return tuple(numbers)


def merge(base: VtpConfig, flags: Mapping[str, object]) -> VtpConfig:
    """Add the flags that were given (value not ``None``) to what ``apply()`` was told.

    >>> merge(VtpConfig(size_list=(1, 2)), {"device": "cpu", "size_list": None}).device
    'cpu'

    Raises:
        ConfigError: a flag contradicts a keyword argument.
    """
    default = VtpConfig()
    changes: dict[str, object] = {}
    for name, value in flags.items():
        if value is None:
            continue
        told = getattr(base, name)
        if told != getattr(default, name) and told != value:
            text = (
                f"apply() was told {name}={_shown(told)}, the command line says {_shown(value)}; give it in one place"
            )
            raise ConfigError(text, shared=None if name in _LOCAL_FIELDS else text)
        changes[name] = value
    return dataclasses.replace(base, **changes)


def _shown(value: object) -> str:
    return ",".join(str(v) for v in value) if isinstance(value, tuple) else str(value)
