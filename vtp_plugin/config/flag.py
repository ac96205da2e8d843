"""What a flag is: its field, its values, and whether it may come from elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from vtp_plugin.errors import LayoutError
from vtp_plugin.util.text import argument_of


def declare(group: FlagGroup, compared: ComparisonRule, default: Any, metavar: str | None = None, **flag: Any) -> Any:
    """Declare a field, with what :func:`~vtp_plugin.config.flags_of_fields` cannot take from its name and type.

    What the option does is said by its class, among the attributes, if not by `help` among the others.

    Args:
        group: group of its flag in ``--help``.
        compared: whether all ranks must have one value.
        default: default value of the field and of the keyword.
        metavar: placeholder of its value in ``--help``; None for a switch or a list of choices.
        flag: other attributes of :class:`~vtp_plugin.config.flag.Flag`.
    """
    return dataclasses.field(
        default=default, metadata={"group": group, "compared": compared, "metavar": metavar, **flag}
    )


DeviceName = Literal["auto", "cuda", "npu", "cpu"]
"""What a run may be asked to train on."""


def parse_size_list(value: str | Sequence[int]) -> tuple[int, ...] | Literal["auto"]:
    """Read the tensor-parallel size of every stage from a flag's text or from a sequence of integers.

    >>> parse_size_list("1,4,4"), parse_size_list([2]), parse_size_list("auto")
    ((1, 4, 4), (2,), 'auto')

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    return "auto" if value == "auto" else _sizes(value, name="vtp_size_list", what="tensor-parallel", example="1,4,4")


def parse_stages(value: str | Sequence[int]) -> tuple[int, int]:
    """Read how many stages a pipeline may have, from a flag's text or from two integers.

    >>> parse_stages("2:4"), parse_stages("3"), parse_stages((1, 2))
    ((2, 4), (3, 3), (1, 2))

    Raises:
        ConfigError: it is no range of positive whole numbers.
    """
    entries = _entries(value.split(":") if isinstance(value, str) else value)
    shown = ":".join(entries)
    if len(entries) not in (1, 2) or not all(entry.isdecimal() and int(entry) > 0 for entry in entries):
        raise LayoutError(f"vtp_stages {shown!r} is no range of stages; write the fewest and the most, such as 2:4")
    least, most = int(entries[0]), int(entries[-1])
    if least > most:
        raise LayoutError(f"vtp_stages {shown} begins above its end; write the fewest stages first, such as 2:4")
    return least, most


def parse_cp_list(value: str | Sequence[int]) -> tuple[int, ...]:
    """Read the context-parallel size of every stage from a flag's text or from a sequence of integers.

    >>> parse_cp_list("1, 2,2")
    (1, 2, 2)

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    return _sizes(value, name="vtp_cp_list", what="context-parallel", example="1,2,2")


def parse_dp_list(value: str | Sequence[int]) -> tuple[int, ...]:
    """Read the data-parallel size of every stage from a flag's text or from a sequence of integers.

    >>> parse_dp_list([1, 2])
    (1, 2)

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    return _sizes(value, name="vtp_dp_list", what="data-parallel", example="1,2,2")


def parse_ep_list(value: str | Sequence[int]) -> tuple[int, ...]:
    """Read the expert-parallel size of every stage from a flag's text or from a sequence of integers.

    >>> parse_ep_list("1,2")
    (1, 2)

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    return _sizes(value, name="vtp_ep_list", what="expert-parallel", example="1,2,2")


def parse_etp_list(value: str | Sequence[int]) -> tuple[int, ...]:
    """Read the tensor-parallel size of the experts of every stage from a flag's text or from a sequence of integers.

    >>> parse_etp_list((1, 1))
    (1, 1)

    Raises:
        ConfigError: an entry is not a positive integer, or the list is empty.
    """
    return _sizes(value, name="vtp_etp_list", what="expert tensor-parallel", example="1,1,1")


def parse_bridges(value: bool | str) -> bool | Literal["extended"]:
    """Read whether the plugin's bridges are asked for.

    >>> parse_bridges(True), parse_bridges("extended")
    (True, 'extended')

    Raises:
        ConfigError: it is another word.
    """
    if isinstance(value, bool):
        return value
    if value != "extended":
        raise LayoutError(f"vtp_bridges {value!r} is unknown; leave the value out, or say extended")
    return "extended"


def parse_steps(value: str | Sequence[int]) -> tuple[int, int]:
    """Read the first and the last of some steps.

    >>> parse_steps("2-21"), parse_steps([3, 3])
    ((2, 21), (3, 3))

    Raises:
        ConfigError: they are no two numbers, or there is no such step.
    """
    words = value.split("-") if isinstance(value, str) else [str(one) for one in value]
    if len(words) != 2 or not all(word.strip().isdigit() for word in words):
        raise LayoutError(f"vtp_trace_steps {value!r} must be the first and the last step, such as 2-21")
    first, last = map(int, words)
    if not 1 <= first <= last:
        raise LayoutError(f"vtp_trace_steps {first}-{last}: steps count from 1, and the last is not before the first")
    return first, last


def parse_in_flight(value: str | int | Sequence[int]) -> tuple[int, ...]:
    """Read the limit of microbatches in flight, one for all stages or one for each.

    >>> parse_in_flight("8"), parse_in_flight([8, 4, 4])
    ((8,), (8, 4, 4))

    Raises:
        ConfigError: an entry is not a whole number.
    """
    entries = _entries((value,) if isinstance(value, int) else value)
    try:
        return tuple(int(entry) for entry in entries)
    except ValueError:
        raise LayoutError(
            f"vtp_in_flight {','.join(entries)!r} is not a list of whole numbers; write one for all stages, or one for "
            "each, such as 8,4,4"
        ) from None


def parse_layer_list(value: str | Sequence[int], *, flag: str = "--num-layer-list") -> tuple[int, ...]:
    """Read numbers of layers of a U-shaped pipeline: the edge's first part, every cloud stage, the edge's last part.

    >>> parse_layer_list("1,3,3,1"), parse_layer_list("0,3,0")
    ((1, 3, 3, 1), (0, 3, 0))

    Raises:
        ConfigError: an entry is no whole number, or that of a cloud stage is 0. Whether the edge's may be is up to the
            model (:func:`~vtp_plugin.plan.layout.layer_lists.check_layers`).
    """
    entries = _entries(value)
    if not all(entry.isdecimal() for entry in entries) or not all(map(int, entries[1:-1])):
        raise LayoutError(
            f"{flag} {','.join(entries)!r}: every entry is the number of layers of one part, at least 1; "
            "write the edge's first part, every cloud stage, the edge's last part, such as 1,3,3,1"
        )
    return tuple(int(entry) for entry in entries)


def parse_bytes(value: str | int) -> int:
    """Read a number of bytes, with or without a unit.

    >>> parse_bytes("256KiB"), parse_bytes("4MiB"), parse_bytes(1000)
    (262144, 4194304, 1000)

    Raises:
        ConfigError: it is not a whole number of bytes, KiB, MiB or GiB.
    """
    text = str(value).strip()
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("", 1)):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.isascii() and number.isdigit():
            return int(number) * factor
    raise LayoutError(f"{text!r} is not a number of bytes; write 262144, 256KiB or 4MiB")


def parse_cost_words(value: str | Sequence[str]) -> tuple[str, ...]:
    """Split costs, one text or several, into words.

    >>> parse_cost_words("forward_ms=40,80,40 latency_ms=20")
    ('forward_ms=40,80,40', 'latency_ms=20')
    """
    return tuple((value if isinstance(value, str) else " ".join(value)).split())


def parse_sites(value: str | Sequence[str]) -> tuple[str, ...]:
    """Read the site of every stage from a flag's text or from a sequence of names.

    >>> parse_sites("edge, cloud,cloud")
    ('edge', 'cloud', 'cloud')

    Raises:
        ConfigError: a name is empty.
    """
    names = tuple(_entries(value))
    if not names or not all(names):
        raise LayoutError(
            f"vtp_sites {','.join(names)!r} has an empty name; name one site per stage, such as edge,cloud,cloud"
        )
    return names


def format_value(value: object) -> str:
    """Write a value in the syntax of its flag.

    >>> format_value((1, 4, 4)), format_value(600.0)
    ('1,4,4', '600.0')
    """
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def _entries(value: str | Sequence[object]) -> list[str]:
    """Return the entries of a list as texts: ``int()`` would take True and 2.0, which are no sizes."""
    return [str(part).strip() for part in (value.split(",") if isinstance(value, str) else value)]


def _sizes(value: str | Sequence[int], *, name: str, what: str, example: str) -> tuple[int, ...]:
    entries = _entries(value)
    if not entries:
        raise LayoutError(f"{name} is empty; give one {what} size per pipeline stage, such as {example}")
    for entry in entries:
        if not entry.isdecimal() or int(entry) < 1:
            raise LayoutError(
                f"{name} {','.join(entries)!r} has the entry {entry!r}, which is not a positive whole number; "
                f"write one {what} size per pipeline stage, such as {example}"
            )
    return tuple(int(entry) for entry in entries)


class FlagGroup(Enum):
    """The groups of flags; the value is the title of the group in ``--help``."""

    WHERE = "vtp_plugin: where (which ranks form which stage)"
    WHAT = "vtp_plugin: what crosses (how tensors get from stage to stage)"
    WHEN = "vtp_plugin: when (the order of a step)"
    TRUST = "vtp_plugin: trust (a run over several sites)"
    ADAPTERS = "vtp_plugin: adapters (LoRA)"
    SAVED = "vtp_plugin: checkpoints (which are kept, and which one is loaded)"
    FAILURE = "vtp_plugin: what a run says, and failure (ranks that stop or do not come)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRule:
    """Whether all ranks of a run must have one value of an option; :func:`same`, :func:`given` and :func:`own` make it.

    Attributes:
        name: name of the option in the error if ranks disagree; None if each rank may have its own value.
        reason: why each rank may have its own value.
        at_start: whether it is compared before anything is derived from it, since it decides how ranks find and treat
            each other.
        separator: text between the entries of a list.
        none: value that stands for an option that was not given.
        is_path: whether it names a file or a folder, which other sites must not read; then only whether it is given is
            compared.
    """

    name: str | None = None
    reason: str = ""
    at_start: bool = False
    separator: str = ","
    none: object = None
    is_path: bool = False

    def state(self, value: object) -> object:
        """Return a value in the form in which ranks compare it.

        >>> same("vtp_size_list").state((1, 2)), same("sites", none="").state(None), same("timeout_s").state(600.0)
        ('1,2', '', 600.0)
        >>> given("whether there is a trace").state("logs"), given("whether there is a trace").state(None)
        (True, False)
        """
        if self.is_path:
            return value is not None
        if isinstance(value, tuple):
            return self.separator.join(map(str, value))
        return self.none if value is None else value


def same(name: str, *, at_start: bool = False, separator: str = ",", none: object = None) -> ComparisonRule:
    """Make the rule that all ranks must have one value; the arguments are attributes of :class:`ComparisonRule`."""
    return ComparisonRule(name=name, at_start=at_start, separator=separator, none=none)


def given(name: str) -> ComparisonRule:
    """Make the rule that all ranks must give the option, or none, each with a value of its own."""
    return ComparisonRule(name=name, is_path=True)


def own(reason: str, *, is_path: bool = False) -> ComparisonRule:
    """Make the rule that each rank may have its own value; the arguments are attributes of :class:`ComparisonRule`."""
    return ComparisonRule(reason=reason, is_path=is_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag on the command line.

    Attributes:
        name: name on the command line, with its dashes.
        group: group in ``--help``.
        help: text in ``--help``.
        metavar: placeholder of the value in ``--help``; None for a switch.
        keyword: keyword of :func:`vtp_plugin.apply`; None if only the command line has the option.
        field: field of :class:`VtpConfig`; None if the flag is read elsewhere.
        type: turns one argument of the command line into a value.
        nargs: number of arguments, see :meth:`argparse.ArgumentParser.add_argument`; so is `const`.
        parse: turns the value of the flag or of the keyword into that of the field.
        choices: the values that the field may have; empty for any value.
        compared: whether all ranks must have one value of the field; None where there is no field.
    """

    name: str
    group: FlagGroup
    help: str
    metavar: str | None = None
    keyword: str | None = None
    field: str | None = None
    type: Callable[[str], object] = str
    nargs: str | None = None
    const: object = None
    parse: Callable[[Any], object] | None = None
    choices: tuple[str, ...] = ()
    compared: ComparisonRule | None = None

    @property
    def dest(self) -> str:
        """Name of its attribute among the parsed arguments."""
        return argument_of(self.name)

    def read(self, value: object) -> object:
        """Return the value of the field for what was given; None stays None."""
        return value if value is None or self.parse is None else self.parse(value)


option = functools.partial(declare, FlagGroup.TRUST)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Options about a run over several sites.

    Attributes:
        sites: site of every stage; default: all in one
        share_errors: several sites: let the other sites read the texts of this rank's errors and the values of its
            arguments; without it they read the type of an error and where it happened. Each site decides for itself
        edge_seed: U of two sites: what the edge's own layers are drawn from (embedding, its layers, head). random
            (default): a key of 256 bits, which only the edge's ranks get, and which is kept beside its checkpoints;
            shared: --seed, which the cloud has too, so it can draw these layers and read tokens from activations; FILE:
            a key of your own, of 16 bytes or more, in a file of mode 0600, so that a run can be repeated
        audit: record every message between stages, one JSON object a line; rank 3 writes FILE with .rank3 before its
            suffix; sites may differ
        record_crossing: U: on the cloud, keep the first 256 activations that come from the edge, as numpy files, for
            'leak --recorded', which measures what they give away; the edge's own ranks ignore it
        link_is_protected: several sites on several machines: something that the plugin does not see, such as IPsec or
            MACsec, encrypts all ways between them, those of InfiniBand and of the devices' own ports too. Without it a
            public address on an interface that is no VPN is rejected, NCCL goes by sockets, and HCCL is not supported
    """

    sites: tuple[str, ...] | None = option(
        same("sites", at_start=True, none=""), None, "edge,cloud,cloud", parse=parse_sites
    )
    share_errors: bool = option(
        own("each site decides for itself"),
        False,
    )
    edge_seed: str | None = option(own("only the edge draws from it", is_path=True), None, "random|shared|FILE")
    audit: str | None = option(own("each machine has its own files", is_path=True), None, "FILE")
    record_crossing: str | None = option(own("only the cloud of a U writes there", is_path=True), None, "FOLDER")

    link_is_protected: bool = option(
        same("vtp_link_is_protected", at_start=True),
        False,
    )

    @property
    def has_several_sites(self) -> bool:
        """Whether stages are at different sites."""
        return len(set(self.sites or ())) > 1
