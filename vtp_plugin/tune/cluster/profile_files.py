"""Reads and writes the files of ``profile``, for one kind of card or for links; a cluster's file names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.tune.cluster.machines import Links, Origin, Part, Time
from vtp_plugin.tune.cluster.speed import Link
from vtp_plugin.tune.cluster.toml_table import Table, read_file

_FORMAT = 1
_OF_A_LINK = {"latency_us", "gbyte_per_s", "at_once", "source"}
_ALL_REDUCE, _SUMS = "all_reduce", "sums"
"""Key of the measured all-reduces, and its old name, which files may still have."""


def features(model: GPTModel, *, itemsize_bytes: int, topk: int) -> dict[str, object]:
    """List the properties of a model that the times of its parts depend on, besides sizes and lengths.

    Args:
        model: the whole model; its number of layers does not matter.
        itemsize_bytes: bytes of one element of an activation.
        topk: number of experts of a token.

    >>> model = GPTModel(num_layers=1, num_predicting=0, hidden=8, heads=2, groups=2, kv_channels=4, ffn=16, vocab=16,
    ...     num_positions=0, is_gated=False, has_bias=False, has_qkv_bias=False, has_norm_bias=False,
    ...     has_query_norm=False, is_tied=True)
    >>> found = features(model, itemsize_bytes=2, topk=1)
    >>> found["hidden"], found["itemsize_bytes"], "num_layers" in found, "topk" in found
    (8, 2, False, False)
    """
    found: dict[str, object] = {"itemsize_bytes": itemsize_bytes}
    for name, value in asdict(model).items():
        if isinstance(value, dict):
            found |= {f"{name}_{key}": each for key, each in value.items() if key != "layers"}
        elif value is not None and name not in ("num_layers", "num_predicting"):
            found[name] = value
    return found | ({"topk": topk} if model.experts is not None else {})


def check_origins(origins: Iterable[Origin], wanted: Mapping[str, object]) -> None:
    """Reject times of another model, or of several versions of Megatron.

    Args:
        origins: origins of all times of a cluster.
        wanted: properties that the model must have had, see :func:`features`.

    Raises:
        ConfigError: they do not fit.

    >>> check_origins([Origin(name="a", device="", megatron="0.19", model={"hidden": 8})], {"hidden": 8})
    """
    first: Origin | None = None
    for origin in origins:
        for name in sorted({*origin.model, *wanted}):
            got, need = origin.model.get(name), wanted.get(name)
            if got != need:
                raise ConfigError(
                    f"{origin.name} was measured with another model: {name} {got}, here {need}; profile this model"
                )
        first = first or origin
        if origin.megatron != first.megatron:
            raise ConfigError(
                f"{origin.name} was measured with Megatron {origin.megatron}, {first.name} with {first.megatron}; "
                "profile all devices with the one of the run"
            )


def read_profile(path: Path) -> tuple[Origin, tuple[Time, ...]]:
    """Read the times of a card.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    return read_file(path, lambda top: _read(top, path.name))


def _read(top: Table, name: str) -> tuple[Origin, tuple[Time, ...]]:
    number = top.count("format")
    if number != _FORMAT:
        raise ConfigError(f"format {number} is another version's, this vtp_plugin reads {_FORMAT}; profile again")
    model = top.table("model")
    origin = Origin(
        name=name,
        device=top.text("device"),
        megatron=top.text("megatron"),
        model={key: model.value(key) for key in model},
    )
    return origin, tuple(read_time(each) for each in top.tables("times"))


def read_time(table: Table) -> Time:
    """Read one time."""
    part = next((one for one in get_args(Part) if one == table.text("part")), None)
    if part is None:
        known = ", ".join(get_args(Part))
        raise ConfigError(f"{table.name}.part is {table.text('part')!r}; it is one of {known}")
    time = Time(
        part=part,
        tp=table.count("tp"),
        micro_batch_size=table.count("micro_batch_size"),
        seq_length=table.count("seq_length"),
        forward_s=table.number("forward_ms") / 1e3,
        backward_s=table.number("backward_ms", 0.0) / 1e3,
        is_recomputed=table.flag("recomputed"),
        weights_s=table.number("weights_ms") / 1e3 if "weights_ms" in table else None,
    )
    table.done()
    if time.weights_s is not None and time.weights_s > time.backward_s:
        raise ConfigError(f"{table.path('weights_ms')} must not be above backward_ms, of which it is a part")
    return time


def write_profile(origin: Origin, times: Iterable[Time]) -> str:
    """Give the text of a profile.

    >>> time = Time(part="head", tp=1, micro_batch_size=2, seq_length=8, forward_s=0.25, backward_s=0.5)
    >>> print(write_profile(Origin(name="", device="a card", megatron="0.19.0", model={"hidden": 8}), [time]))
    # Written by `python -m vtp_plugin profile`; name it in a cluster's file: `[cards.NAME] profile = "FILE"`.
    format = 1
    device = "a card"
    megatron = "0.19.0"
    <BLANKLINE>
    [model]
    hidden = 8
    <BLANKLINE>
    [[times]]
    part = "head"
    tp = 1
    micro_batch_size = 2
    seq_length = 8
    forward_ms = 250.0
    backward_ms = 500.0
    <BLANKLINE>
    """
    lines = [
        '# Written by `python -m vtp_plugin profile`; name it in a cluster\'s file: `[cards.NAME] profile = "FILE"`.'
    ]
    lines += _rows({"format": _FORMAT, "device": origin.device, "megatron": origin.megatron})
    lines += ["", "[model]", *_rows(origin.model)]
    for time in times:
        row: dict[str, object] = {"part": time.part, "tp": time.tp}
        row |= {"micro_batch_size": time.micro_batch_size, "seq_length": time.seq_length}
        row |= {"recomputed": True} if time.is_recomputed else {}
        row |= {"forward_ms": _ms(time.forward_s)} | (
            {} if time.part == "update" else {"backward_ms": _ms(time.backward_s)}
        )
        row |= {} if time.weights_s is None else {"weights_ms": _ms(time.weights_s)}
        lines += ["", "[[times]]", *_rows(row)]
    return "\n".join([*lines, ""])


def read_links(table: Table) -> Links:
    """Read links: each kind of link has one for all, or one for each name."""
    across = {}
    for name in table.table("across", is_optional=True):
        sites = sorted(name.split())
        if len(sites) != 2:
            raise ConfigError(f'{table.path("across")}."{name}" must name two sites, such as "edge cloud"')
        across[sites[0], sites[1]] = _link(table.table("across").table(name))
    given = [key for key in (_ALL_REDUCE, _SUMS) if key in table]
    if len(given) > 1:
        raise ConfigError(f"[{table.path(_SUMS)}] is the old name of [{table.path(_ALL_REDUCE)}]; give one of them")
    sums = table.table(given[0] if given else _ALL_REDUCE, is_optional=True)
    kinds = {"": sums} | {kind: sums.table(kind) for kind in sums if not kind.isdecimal()}
    return Links(
        inside=_by_name(table, "inside"),
        between=_by_name(table, "between"),
        across=across,
        sums={kind: found for kind, each in kinds.items() if (found := _by_number(each))},
    )


def _by_number(table: Table) -> dict[int, Link]:
    return {int(number): _link(table.table(number)) for number in table if number.isdecimal()}


def _by_name(links: Table, name: str) -> dict[str, Link]:
    """Read links by name, and one for all others, whose numbers stand in the table itself."""
    table = links.table(name, is_optional=True)
    found = {key: _link(table.table(key)) for key in table if key not in _OF_A_LINK}
    return found | ({"": _link(table)} if set(table) & _OF_A_LINK else {})


def _link(table: Table) -> Link:
    link = Link(
        latency_s=table.number("latency_us") / 1e6,
        bytes_per_s=table.number("gbyte_per_s") * 1e9,
        at_once=table.count("at_once") if "at_once" in table else None,
    )
    table.text("source", "")  # for people
    table.done()
    if link.bytes_per_s <= 0:
        raise ConfigError(f"{table.name}.gbyte_per_s must be above 0")
    return link


def write_links(links: Links) -> str:
    """Give the text of a file of links.

    >>> line, sums = Link(latency_s=0.02, bytes_per_s=1e8, at_once=1), {2: Link(latency_s=2e-5, bytes_per_s=1e9)}
    >>> print(write_links(Links(across={("cloud", "edge"): line}, sums={"": sums})))
    # Written by `python -m vtp_plugin profile --links`; name it in a cluster's file: `[links] profile = "FILE"`.
    <BLANKLINE>
    [across."cloud edge"]
    latency_us = 20000.0
    gbyte_per_s = 0.1
    at_once = 1
    <BLANKLINE>
    [all_reduce.2]
    latency_us = 20.0
    gbyte_per_s = 1.0
    <BLANKLINE>
    """
    lines = [
        '# Written by `python -m vtp_plugin profile --links`; name it in a cluster\'s file: `[links] profile = "FILE"`.'
    ]
    tables = [*_tables("inside", links.inside), *_tables("between", links.between)]
    tables += _tables("across", {" ".join(sites): link for sites, link in links.across.items()})
    for kind, each in links.sums.items():
        of_kind = f"{_ALL_REDUCE}.{json.dumps(kind)}" if kind else _ALL_REDUCE
        tables += [(f"{of_kind}.{number}", link) for number, link in each.items()]
    for name, link in tables:
        row: dict[str, object] = {"latency_us": _rounded(1e6 * link.latency_s)}
        row |= {"gbyte_per_s": _rounded(link.bytes_per_s / 1e9)}
        row |= {} if link.at_once is None else {"at_once": link.at_once}
        lines += ["", f"[{name}]", *_rows(row)]
    return "\n".join([*lines, ""])


def _tables(name: str, links: Mapping[str, Link]) -> Iterator[tuple[str, Link]]:
    for key, link in links.items():
        yield f"{name}.{json.dumps(key)}" if key else name, link


def _rows(values: Mapping[str, Any]) -> Iterator[str]:
    """Write keys and values; texts, whole numbers and truth values are the same in TOML as in JSON."""
    for key, value in values.items():
        yield f"{key} = {json.dumps(value)}"


def _ms(seconds: float) -> float:
    return _rounded(1e3 * seconds)


def _rounded(value: float) -> float:
    """Round to what a measurement is worth.

    >>> _rounded(123.456789), _rounded(0.00012345678)
    (123.457, 0.000123457)
    """
    return float(f"{value:.6g}")
