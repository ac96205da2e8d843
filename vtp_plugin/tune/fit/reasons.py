"""Explains the chosen layout: what would have been better, and why that was not possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from vtp_plugin.config.parse_values import format_value
from vtp_plugin.errors import LayoutError, ShortageError
from vtp_plugin.host.rules.checks.divisibility import nearest_multiples
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.fit.as_flags import about_padding
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.fit.fit_problem import fit_problem
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.find_best import find_best

_MOST_ADDED = 64


def describe(layouts: Sequence[Candidate], constraints: Constraints) -> tuple[str, ...]:
    """Say what was chosen and why, one line each.

    Args:
        layouts: the chosen layout, and behind it that of every other number of replicas.
        constraints: what they had to satisfy.
    """
    fitted, *others = layouts
    num_cards = sum(node.num_cards for node, _ in fitted.spare_cards)
    return (
        f"chosen: --vtp-size-list {format_value(fitted.sizes)}, layers {format_value(fitted.layers)}, "
        f"{_replicas(fitted.num_replicas)}; uses {fitted.num_cards} of {num_cards} devices",
        *_whole_nodes(fitted, constraints),
        *_spares(fitted, constraints),
        *_rivals(fitted, others),
        *(text for text in [about_padding(fitted.sizes, constraints)] if text),
    )


def _replicas(number: int) -> str:
    return f"{number} replica{'s'[: number > 1]}"


def _whole_nodes(fitted: Candidate, constraints: Constraints) -> Iterator[str]:
    """Say why a node is no single stage."""
    nodes = [node for node, _ in fitted.spare_cards]
    for number in sorted({node.num_cards for node in nodes if node.num_cards}, reverse=True):
        names = [node.name for node in nodes if node.num_cards == number]
        who = f"{names[0]} has {number} devices" if len(names) == 1 else f"{len(names)} nodes have {number} devices"
        size, rest = divmod(number, constraints.cp)
        if rest:
            yield f"{who}, no multiple of --context-parallel-size {constraints.cp}; {rest} of them stay idle"
        elif problems := constraints.problems_of_size(size):
            why = problems[0].replace(f"stage 0 has TP {size}, which", f"TP {size}")
            yield f"{who}, but no stage can have tensor-parallel size {size}: {why}"


def _spares(fitted: Candidate, constraints: Constraints) -> Iterator[str]:
    """Say which devices are spare, and whether more stages would use them."""
    spare = {node.name: number for node, number in fitted.spare_cards if number}
    if not spare:
        return
    shown = ", ".join(f"{number} of {name}" for name, number in [*spare.items()][:4])
    if len(spare) > 4:
        shown += f" and {sum([*spare.values()][4:])} more"
    nodes, num_stages = [node for node, _ in fitted.spare_cards], len(fitted.sizes)
    for most in range(constraints.most_stages + 1, min(constraints.most_stages + 8, constraints.num_layers) + 1):
        wider = dataclasses.replace(constraints, most_stages=most, num_replicas=fitted.num_replicas)
        better = find_best(fit_problem(nodes, wider)).best
        if better and better[0].num_cards > fitted.num_cards:
            yield (
                f"spare devices: {shown}; --vtp-stages {constraints.least_stages}:{most} would use "
                f"{better[0].num_cards} devices, as --vtp-size-list {format_value(better[0].sizes)}"
            )
            return
    number = _replicas(fitted.num_replicas)
    yield f"spare devices: {shown}; no layout of {num_stages} or more stages with {number} uses them"


def _rivals(fitted: Candidate, others: Sequence[Candidate]) -> Iterator[str]:
    """Compare with other numbers of replicas, the nearest ones."""
    for one in sorted(others, key=lambda one: (one.step_s, one.num_replicas))[:2]:
        yield (
            f"{_replicas(one.num_replicas)} of {format_value(one.sizes)}, layers {format_value(one.layers)}: "
            f"{one.num_cards} devices, a simulated step takes {one.step_s / fitted.step_s:.2f} times as long"
        )


def why_nothing(nodes: Sequence[Node], constraints: Constraints) -> LayoutError:
    """Say why no layout fits, and the nearest number of devices, or the nearest model, that would.

    Args:
        nodes: the nodes that are there.
        constraints: what a layout had to satisfy.

    Returns:
        The error; a :class:`~vtp_plugin.errors.ShortageError` where more devices would do.
    """
    num_cards = sum(node.num_cards for node in nodes)
    have = f"{'+'.join(str(node.num_cards) for node in nodes) or 0} devices"
    stages = f"--vtp-stages {constraints.least_stages}:{constraints.most_stages}"
    if constraints.num_layers < constraints.least_stages - (1 if constraints.ends else 0):
        return LayoutError(
            f"--num-layers {constraints.args.num_layers} with {stages}; every stage needs a layer; use "
            f"{constraints.least_stages + sum(constraints.ends or ())} layers or fewer stages"
        )
    if problems := constraints.problems_of_size(1):
        return LayoutError(problems[0])
    number = constraints.num_replicas or 1
    if constraints.problems_of_replicas(number):
        unit, batch = int(constraints.args.micro_batch_size) * number, int(constraints.args.global_batch_size)
        choices = " or ".join(map(str, nearest_multiples(batch, unit)))
        return LayoutError(
            f"--global-batch-size {batch}; {unit} ({_replicas(number)} times --micro-batch-size "
            f"{constraints.args.micro_batch_size}) must divide it and all batches; use {choices}"
        )
    least = constraints.cp * constraints.least_stages * number
    if num_cards < least or not any(node.num_cards >= constraints.cp for node in nodes):
        return ShortageError(
            f"{have}; {_replicas(number)} of at least {constraints.least_stages} stages ({stages}) "
            f"with context-parallel size {constraints.cp} need {least}; add "
            f"{max(least - num_cards, 1)}, or lower the first number of --vtp-stages"
        )
    added = _enough(nodes, constraints)
    more = f"add {added} on {nodes[-1].name}" if added else f"even {_MOST_ADDED} more would not be enough"
    what = "the model's memory" if constraints.held_bytes is not None else "the experts or the nodes"
    kind = ShortageError if added else LayoutError
    return kind(f"{have}; no layout within {stages} fits {what}; {more}, or allow more stages, or fewer replicas")


def _enough(nodes: Sequence[Node], constraints: Constraints) -> int:
    """Count the devices that the last node needs more; 0 if no number up to a limit is enough."""
    *others, last = nodes
    for added in range(1, _MOST_ADDED + 1):
        more = dataclasses.replace(last, num_cards=last.num_cards + added)
        if find_best(fit_problem([*others, more], constraints)).best:
            return added
    return 0
