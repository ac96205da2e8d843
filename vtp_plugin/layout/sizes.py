"""Checks of a layout's sizes; their messages show the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.errors import LayoutError


def check_positive(what: str, value: object) -> None:
    """Refuse what is not a whole number of at least 1.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{what} must be a positive integer, got {value!r}: give a number of at least 1")


def check_list(what: str, sizes: Sequence[int], tp_sizes: Sequence[int]) -> None:
    """Refuse a list that does not give every stage one size.

    Args:
        what: kind of the sizes, such as `data-parallel`.
        sizes: the list.
        tp_sizes: tensor-parallel size of every stage.

    Raises:
        ConfigError: the list has another length, or an entry is not a positive integer.
    """
    if len(sizes) != len(tp_sizes):
        raise LayoutError(
            f"{len(sizes)} {what} sizes {','.join(map(str, sizes))} meet {len(tp_sizes)} stages of tp sizes "
            f"{','.join(map(str, tp_sizes))}: give one size per stage"
        )
    for index, size in enumerate(sizes):
        check_positive(f"the {what} size of stage {index}", size)


def equal_dp(tp_sizes: Sequence[int], cp_sizes: Sequence[int], world_size: int) -> int:
    """Return the data-parallel size that fills the world if all stages have the same one.

    Raises:
        ConfigError: one replica's ranks do not divide the world; the text names the nearest worlds that fit.

    >>> equal_dp((1, 2), (1, 1), 6)
    2
    """
    size = sum(tp * cp for tp, cp in zip(tp_sizes, cp_sizes, strict=True))
    if world_size % size == 0:
        return world_size // size
    if len(set(cp_sizes)) == 1:
        shown, sums = str(cp_sizes[0]), f"sum(tp) * cp = {sum(tp_sizes)} * {cp_sizes[0]}"
    else:
        products = " + ".join(f"{tp} * {cp}" for tp, cp in zip(tp_sizes, cp_sizes, strict=True))
        shown, sums = ",".join(map(str, cp_sizes)), f"sum(tp * cp) = {products}"
    below = world_size // size * size
    worlds = f"{below} or {below + size}" if below else f"{size}"
    raise LayoutError(
        f"tp sizes {','.join(map(str, tp_sizes))} with context parallelism {shown} take {sums} = {size} ranks per "
        f"replica, which does not divide the world size {world_size}: start {worlds} processes, or change the sizes"
    )


def check_world(stages: Sequence[tuple[int, int, int]], world_size: int) -> None:
    """Refuse a world whose size is not the sum of the stages' sizes.

    Args:
        stages: tp, cp and dp size of every stage.
        world_size: number of ranks.

    Raises:
        ConfigError: they differ.
    """
    size = sum(tp * cp * dp for tp, cp, dp in stages)
    if size != world_size:
        products = " + ".join(f"{tp} * {cp} * {dp}" for tp, cp, dp in stages)
        raise LayoutError(
            f"tp * cp * dp over the stages is {products} = {size} ranks, the world size is {world_size}: start {size} "
            "processes, or change the sizes"
        )
