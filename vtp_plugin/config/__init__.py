"""What the user asked for: one frozen object, made from the keyword arguments of ``apply()`` and from flags.

``options`` declares the options, each once, in the words of ``flag``: its flag, its keyword, its help, how its value is
read, and whether ranks may differ in it. ``resolve`` adds the flags of a command line to keyword arguments, and makes
the plan that follows from both.

Words:
    flag: a word of the command line, as a field of the configuration declares it (``Flag``).
    compared: whether all ranks must have one value of a field (``ComparisonRule``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vtp_plugin.config.adapter_options import AdapterFields
from vtp_plugin.config.flag import DeviceName, Flag, Trust
from vtp_plugin.config.options import (
    DpModeName,
    Failure,
    LogLevelName,
    Saved,
    ScheduleFields,
    ScheduleName,
    StageFields,
    TransportFields,
    TransportName,
)
from vtp_plugin.errors import LayoutError
from vtp_plugin.util.text import question, said_of_attributes

__all__ = [
    "DeviceName",
    "DpModeName",
    "LogLevelName",
    "ScheduleName",
    "TransportName",
    "VtpConfig",
    "flags_of_fields",
    "read_keywords",
]


# A dataclass has the fields of its last base first.
@dataclass(frozen=True, kw_only=True)
class VtpConfig(Failure, Saved, AdapterFields, Trust, ScheduleFields, TransportFields, StageFields):
    """The plugin's options. Each is valid by itself; whether it fits the world and the model is checked later.

    The help of its flag says what a field means. Lists have one entry for every pipeline stage, in stage order.
    """

    def __post_init__(self) -> None:
        """Check the values that can be checked without the world and the model; raise ConfigError if one is wrong."""
        for flag in flags_of_fields():
            value = getattr(self, str(flag.field))
            if flag.choices and value not in flag.choices:
                what = str(flag.field).replace("_", " ")
                hint = question(str(value), flag.choices, most=1)
                raise LayoutError(f"{what} {value!r} is unknown; use one of {', '.join(flag.choices)}{hint}")
        if self.sites is not None and isinstance(self.size_list, tuple) and len(self.sites) != len(self.size_list):
            raise LayoutError(
                f"vtp_sites {','.join(self.sites)!r} names {len(self.sites)} sites, the size list has "
                f"{len(self.size_list)} stages; name one site per stage, such as edge,cloud,cloud"
            )
        if self.split_backward and not self.has_planned_schedule:
            raise LayoutError(
                "--vtp-split-backward with Megatron's schedules, whose backwards are whole; add --vtp-schedule "
                "planned, or leave it out"
            )
        if self.split_backward and self.bridges:
            raise LayoutError("--vtp-split-backward with --vtp-bridges: modules run whole backwards; leave one out")
        self.check_stages()
        self.check_transport()
        self.check_schedule()
        self.check_adapters()
        if self.lora_rank is not None and self.num_rings > 1:
            raise LayoutError(
                f"--vtp-lora-rank {self.lora_rank} with --vtp-encoder-layer-list; two rings have no adapters; leave "
                "one of them out"
            )
        self.check_saved()
        self.check_failure()

    @property
    def has_planned_schedule(self) -> bool:
        """Whether the plugin's executor runs the steps."""
        return self.schedule == "planned" or self.layerwise_disaggregated or self.has_unequal_dp

    @property
    def parts_of_u(self) -> tuple[int, ...] | None:
        """Layers of every part of a U; None where ``--num-layer-list`` does not say them."""
        return self.num_layer_list

    @property
    def has_own_edge(self) -> bool:
        """Whether the edge of a U is at another site than its cloud, so that its layers have a key of their own."""
        return self.layerwise_disaggregated and self.has_several_sites

    @property
    def is_forced(self) -> bool:
        """Whether the plugin's groups and communicator are in use even for stages of one size."""
        return self.force or self.has_planned_schedule


@functools.cache
def flags_of_fields() -> tuple[Flag, ...]:
    """List the flags of all fields, in their order.

    The name of a flag is ``--vtp-`` and the field's name, the keyword is the field's name, unless the field says
    otherwise. The names of a Literal type are the choices, where the field names none.

    >>> flag = flags_of_fields()[0]
    >>> flag.name, flag.keyword, flag.field
    ('--vtp-size-list', 'vtp_size_list', 'size_list')
    """
    types = get_type_hints(VtpConfig)
    said = {name: text for kind in VtpConfig.__mro__ for name, text in said_of_attributes(kind).items()}
    flags: list[Flag] = []
    for field in dataclasses.fields(VtpConfig):
        choices = get_args(types[field.name]) if get_origin(types[field.name]) is Literal else ()
        name = f"--vtp-{field.name.replace('_', '-')}"
        own = {"name": name, "keyword": field.name, "choices": choices, "help": said.get(field.name, "")}
        given: dict[str, Any] = {**own, **field.metadata}
        given["metavar"] = given["metavar"] or "|".join(given["choices"]) or None
        flags.append(Flag(**given, field=field.name))
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
