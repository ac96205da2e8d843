"""ms-swift's arguments, rows and model: on all ranks arguments have the largest size, the model has the stage's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vtp_plugin.errors import refuse
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.swift import known_swift
from vtp_plugin.patches.swift.checkpoints import PADDED_VOCABULARY
from vtp_plugin.plan.layout.layer_lists import layout_of
from vtp_plugin.session import Session
from vtp_plugin.util.undo import replaced


@replaces(known_swift.ARGUMENTS, id="swift-arguments", when=Moment.SWIFT)
def _read(session: Session, original: Callable[[Any], None], args: Any) -> None:
    """Run `MegatronArguments.__post_init__` with the number of stages and the largest of their sizes.

    Why: it switches sequence parallelism off where the one size is 1, and counts stages, before there are groups.

    Remove when: ms-swift takes a list of tensor-parallel sizes.
    """
    refuse(known_swift.problems_of_request(session.config))
    sizes = session.config.size_list
    assert isinstance(sizes, tuple)
    refuse(_contradictions(args, sizes))
    if len(set(sizes)) > 1 or session.config.layerwise_disaggregated:
        refuse(known_swift.problems_of_arguments(args))
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = max(sizes), len(sizes)
    if (layers := session.config.num_layer_list) is not None:
        refuse(_contradicting_layout(args, layers))
        args.pipeline_model_parallel_layout = layout_of(layers)
    original(args)


def _contradictions(args: Any, sizes: tuple[int, ...]) -> list[str]:
    """Say which sizes of ms-swift's flags are not those of the list.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(tensor_model_parallel_size=4, pipeline_model_parallel_size=1)
    >>> print(*_contradictions(args, (1, 2)))
    --tensor_model_parallel_size 4 contradicts --vtp-size-list 1,2; leave it out, or give 2
    """
    wanted = {"tensor_model_parallel_size": max(sizes), "pipeline_model_parallel_size": len(sizes)}
    return [
        f"--{name} {given} contradicts --vtp-size-list {','.join(map(str, sizes))}; leave it out, or give {size}"
        for name, size in wanted.items()
        if (given := getattr(args, name)) not in (1, size)
    ]


def _contradicting_layout(args: Any, layers: tuple[int, ...]) -> list[str]:
    """Say that ms-swift's flag for layers has others than the list of a U.

    >>> from types import SimpleNamespace
    >>> print(*_contradicting_layout(SimpleNamespace(pipeline_model_parallel_layout="Et|ttL"), (1, 2, 1)))
    --pipeline_model_parallel_layout Et|ttL contradicts --num-layer-list 1,2,1; leave it out, or give Et|tt|tL|
    """
    given, wanted = args.pipeline_model_parallel_layout, layout_of(layers)
    shown = f"--pipeline_model_parallel_layout {given} contradicts --num-layer-list {','.join(map(str, layers))}"
    return [] if given in (None, wanted) else [f"{shown}; leave it out, or give {wanted}"]


@replaces(known_swift.GROUPS, id="swift-groups", when=Moment.SWIFT)
def _make_groups(session: Session, original: Callable[[Any], None], args: Any) -> None:
    """Run `_initialize_mpu`; then let the world be as large as if all stages had the largest size.

    Why: its caller divides the number of ranks by one size of all stages to count replicas.

    Remove when: ms-swift takes a list of tensor-parallel sizes.
    """
    original(args)
    layout = session.planned.layout
    args.world_size = args.tensor_model_parallel_size * layout.num_stages * layout.dp_sizes[0] * layout.cp_sizes[0]
    # What is saved says it.
    args.vtp_size_list = [*layout.tp_sizes]


@replaces(known_swift.ROWS, id="swift-rows", when=Moment.SWIFT)
def _row_multiple(session: Session, original: Callable[[Any], int | None], args: Any) -> int | None:
    """Run `get_padding_to` for the least common multiple of all sizes.

    Why: with sequence parallelism every stage cuts the rows of a microbatch, so its number is a multiple of all sizes.

    Remove when: ms-swift takes a list of tensor-parallel sizes.
    """
    multiple = math.lcm(*session.planned.layout.tp_sizes)
    with replaced(args, tensor_model_parallel_size=multiple):
        return original(args)


@replaces(known_swift.MODEL, id="swift-model", when=Moment.SWIFT)
def _configure(session: Session, original: Callable[[Any, Any], Any], args: Any, hf_config: Any) -> Any:
    """Run `get_mcore_model_config` with the stage's own size, and pad the vocabulary for the first and last stage.

    Why: it copies the one size into the model's configuration, from which layers and slices of weights are made.

    Remove when: ms-swift takes a list of tensor-parallel sizes.
    """
    layout, own = session.planned.layout, session.planned.own
    size = layout.tp_sizes[own.stage]
    with replaced(args, tensor_model_parallel_size=size, sequence_parallel=args.sequence_parallel and size > 1):
        config = original(args, hf_config)
    if not layout.is_uniform:
        refuse(known_swift.problems_of_model(config))
    multiple = layout.vocab_multiple((0, session.planned.loss_stage))
    config.padded_vocab_size = -(-config.padded_vocab_size // multiple) * multiple
    setattr(args, PADDED_VOCABULARY, config.padded_vocab_size)
    return config
