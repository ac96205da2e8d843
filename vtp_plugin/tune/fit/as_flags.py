"""A list as flags of a command line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vtp_plugin.config.parse_values import format_value
from vtp_plugin.tune.fit.chosen import Chosen
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.search.evaluate import Candidate

OF_A_FIT = ("--vtp-size-list", "--vtp-stages", "--vtp-data-parallel-size", "--vtp-sites", "--vtp-node")
"""Flags that a fit decides, and those that are for it alone."""
_DIVISOR = "make_vocab_size_divisible_by"
_LARGEST = 16
"""Sizes up to this pad a vocabulary alike, whichever of them is in a list."""


def fitted_flags(
    chosen: Chosen, constraints: Constraints, *, num_predicting: int = 0, is_forced: bool = True
) -> tuple[str, ...]:
    """Write a list as the flags that a user would give for it.

    A list of equal sizes is used like any other: the next one may be unequal, and both store checkpoints alike.

    Args:
        chosen: the list.
        constraints: what the list had to satisfy.
        num_predicting: number of layers of multi-token prediction.
        is_forced: whether the plugin is used even if all sizes are equal.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=4, num_attention_heads=4)
    >>> constraints = Constraints(args=args, least_stages=1, most_stages=2)
    >>> print(*fitted_flags(Chosen(sizes=(2, 1), layers=(3, 1), num_replicas=1), constraints))
    --vtp-size-list 2,1 --vtp-force --make-vocab-size-divisible-by 256 --decoder-first-pipeline-num-layers 3
    """
    argv = ["--vtp-size-list", format_value(chosen.sizes), *["--vtp-force"] * is_forced]
    if multiple := vocabulary_multiple(chosen.sizes, constraints):
        argv += ["--make-vocab-size-divisible-by", str(multiple)]
    if any(chosen.sites):
        argv += ["--vtp-sites", ",".join(chosen.sites)]
    if chosen.in_flight:
        argv += ["--vtp-in-flight", format_value(chosen.in_flight)]
    if len(chosen.layers) > len(chosen.sizes):
        return (*argv, "--num-layer-list", format_value(chosen.layers))
    return (*argv, *layer_flags(chosen.layers, num_predicting))


def order_flags(candidate: Candidate, constraints: Constraints) -> tuple[str, ...]:
    """Write the order of a layout's microbatches as flags, besides how many are in flight.

    A U and an interleaved pipeline of whole backwards have an order of their own.

    Args:
        candidate: the layout.
        constraints: what it had to satisfy.
    """
    order, argv = candidate.order, list[str]()
    if order.is_planned and constraints.ends is None and (candidate.num_chunks == 1 or order.is_split):
        argv += ["--vtp-schedule", "planned"]
    return (*argv, *["--vtp-split-backward"] * order.is_split)


def stock_flags(chosen: Chosen) -> tuple[str, ...]:
    """Write a list of equal sizes as the flags of Megatron without the plugin.

    Args:
        chosen: the list.
    """
    argv = ("--tensor-model-parallel-size", str(chosen.sizes[0]))
    argv += ("--pipeline-model-parallel-size", str(len(chosen.sizes)))
    return argv + layer_flags(chosen.layers, 0)


def vocabulary_multiple(sizes: Sequence[int], constraints: Constraints) -> int | None:
    """Return a list's value of ``--make-vocab-size-divisible-by``; None where the vocabulary is padded already.

    Every list of a model pads it alike, since the padding enters the loss and the checkpoint. Megatron pads it to a
    multiple of the sizes of the first and the last stage. Here it is a multiple of all sizes that a stage could have,
    up to 16.

    Args:
        sizes: tensor-parallel sizes of the stages.
        constraints: what the list had to satisfy.
    """
    if getattr(constraints.args, "padded_vocab_size", None):
        return None
    ends = math.lcm(sizes[0], sizes[-1])
    divisor = getattr(constraints.args, _DIVISOR, None) or 128
    return divisor * all_sizes(constraints, ends) // ends


def vocabulary_line(sizes: Sequence[int], constraints: Constraints) -> Iterator[str]:
    """Say so, in one line, if a list's flags pad the vocabulary otherwise than Megatron would.

    Args:
        sizes: tensor-parallel sizes of the stages.
        constraints: what the list had to satisfy.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=4, num_attention_heads=4,
    ...     vocab_size=250)
    >>> [line] = vocabulary_line((2, 1), Constraints(args=args, least_stages=1, most_stages=2))
    >>> print(line.partition(";")[0])
    --make-vocab-size-divisible-by 256 pads the vocabulary to 512, Megatron alone to 256
    """
    args, ends = constraints.args, math.lcm(sizes[0], sizes[-1])
    multiple = vocabulary_multiple(sizes, constraints)
    if multiple is None:
        return
    usual, padded = ((getattr(args, _DIVISOR, None) or 128) * ends, multiple * ends)
    said = [f"a multiple of {number}" for number in (padded, usual)]
    loss = "the more the padding, the higher the loss of a new model"
    if number := getattr(args, "vocab_size", None):
        usual, padded = (-(-number // each) * each for each in (usual, padded))
        said = [str(padded), str(usual)]
        loss = f"a new model's loss begins {math.log(padded / usual):.3f} higher"
    if padded != usual:
        yield (
            f"--make-vocab-size-divisible-by {multiple} pads the vocabulary to {said[0]}, Megatron alone to {said[1]}; "
            f"so every layout of this model loads the checkpoints; padding counts in the softmax: {loss}; "
            "--padded-vocab-size keeps another size"
        )


def all_sizes(constraints: Constraints, ends: int) -> int:
    """Return the least common multiple of all sizes that a stage of a model can have, up to 16.

    Args:
        constraints: what a list must satisfy.
        ends: a multiple of the sizes of the first and the last stage, which may be larger.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(num_layers=4, micro_batch_size=1, global_batch_size=4, num_attention_heads=12)
    >>> all_sizes(Constraints(args=args, least_stages=1, most_stages=2), 2)
    12
    """
    return math.lcm(ends, *(size for size in range(1, _LARGEST + 1) if not constraints.problems_of_size(size)))


def layer_flags(layers: Sequence[int], num_predicting: int) -> tuple[str, ...]:
    """Write how many layers each stage holds as Megatron's flags, with those that most versions have.

    Args:
        layers: number of layers of every stage.
        num_predicting: number of layers of multi-token prediction, behind the last stage's.

    >>> layer_flags((2, 2), 0), layer_flags((1, 2, 2, 3), 0)[1::2], layer_flags((1, 2, 1, 3), 1)[1]
    ((), ('1', '3'), 'Et|tt|t|tttmL')
    """
    first, *between = layers
    if len(set(layers)) == 1:
        return ()
    first_words = ("--decoder-first-pipeline-num-layers", str(first))
    if len(layers) == 2:
        return first_words
    if len(set(between[:-1])) == 1:
        return (*first_words, "--decoder-last-pipeline-num-layers", str(layers[-1]))
    parts = ["t" * number for number in layers]
    return ("--pipeline-model-parallel-layout", f"E{'|'.join(parts)}{'m' * num_predicting}L")


def without(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Leave out flags, each with its value.

    >>> without(["--a", "1", "--b=2", "--c"], ["--a", "--b"])
    ['--c']
    """
    left: list[str] = []
    skips = False
    for word in argv:
        name = word.partition("=")[0]
        if skips:
            skips = False
        elif name in flags:
            skips = name == word
        else:
            left.append(word)
    return left
