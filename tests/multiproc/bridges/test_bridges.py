"""Bridges between modules: every rank gets its part, forward and backward, bitwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.expected.bridge_values import Sizes
from tests.ordering.check import check
from tests.ordering.models import BUFFERED, MODELS, NCCL, RENDEZVOUS
from tests.ordering.trace import parse_trace
from tests.support.pool import Pool

pytest.importorskip("megatron.core.hyper_comm_grid", reason="this Megatron has no megatron.core.hyper_comm_grid")

from tests.multiproc.jobs.bridge_job import BridgeCase

pytestmark = pytest.mark.needs("bridges")

JOB = "tests.multiproc.jobs.bridge_job"


def grid(tp: int, cp: int, dp: int, sequence: str = "whole", *, is_sharded: bool = False) -> Sizes:
    return Sizes(tp=tp, cp=cp, dp=dp, sequence=sequence, is_sharded=is_sharded)


def assert_crossed(pool: Pool, *cases: BridgeCase) -> None:
    (world_size,) = {one.world_size for one in cases}
    problems = pool.run(world_size, f"{JOB}:cross", {"cases": cases})
    assert [problem for rank in problems for problem in rank] == []


def test_any_sizes_of_four_ranks_a_side(pool: Pool) -> None:
    pairs = [
        (grid(2, 1, 2), grid(4, 1, 1)),  # fan-in
        (grid(4, 1, 1), grid(1, 1, 4)),  # fan-out
        (grid(4, 1, 1), grid(4, 1, 1)),
        (grid(1, 2, 2), grid(2, 2, 1)),  # gradients of two context-parallel ranks add up
        (grid(2, 2, 1, "zigzag", is_sharded=True), grid(1, 2, 2, "plain")),
        (grid(4, 1, 1, is_sharded=True), grid(2, 2, 1, is_sharded=True)),
    ]
    three = [BridgeCase(src=src, dst=dst) for src, dst in pairs]
    # Images of different sizes, a text-only microbatch among them.
    two = [
        replace(one, num_dims=2, widths=((3, 0, 1, 2)[: one.num_units] if one.num_units == 4 else 4, 0, 2))
        for one in (replace(case, num_dims=2) for case in three)
        if "zigzag" not in (one.src.sequence, one.dst.sequence)
    ]
    assert_crossed(pool, *three, *two)


def test_sizes_that_do_not_divide(pool: Pool) -> None:
    pairs = [(grid(1, 1, 2), grid(1, 1, 3)), (grid(1, 1, 3), grid(2, 1, 1)), (grid(2, 1, 1), grid(3, 1, 1))]
    cases = [BridgeCase(src=src, dst=dst, num_dims=num_dims) for src, dst in pairs for num_dims in (2, 3)]
    uneven = [replace(cases[0], num_dims=2, widths=((1, 0, 2, 5, 1, 3), 2))]
    assert_crossed(pool, *cases, *uneven)


def test_large_messages_cross_in_portions(pool: Pool) -> None:
    """So that every message is cut; one of the shares has other lengths than the others."""
    base = BridgeCase(src=grid(1, 1, 1), dst=grid(2, 1, 1), rows=1 << 17, widths=(2, 1), is_combined=True)
    assert_crossed(pool, base, replace(base, dtype="bfloat16", axes="bsh", rows=1 << 18))
    wide = replace(base, src=grid(2, 1, 1), rows=1 << 18, widths=(1,), is_combined=False)
    batches = replace(base, src=grid(1, 1, 2), widths=((3, 1),), is_combined=False)
    tokens = replace(base, src=grid(1, 1, 2), num_dims=2, widths=((1 << 18, 3),), is_combined=False)
    assert_crossed(pool, wide, batches, tokens)


def test_axes_types_stages_and_the_middle_of_a_step(pool: Pool) -> None:
    base = BridgeCase(src=grid(1, 1, 2), dst=grid(2, 1, 1), widths=(1, 3, 2))
    assert_crossed(
        pool,
        *(replace(base, axes=axes, is_combined=True) for axes in ("bsh", "hsb", "sbh")),
        replace(base, dtype="bfloat16", is_combined=True),
        replace(base, is_fixed=True, widths=(2, 2), is_combined=True),
        replace(base, is_fixed=True, widths=(2, 2), num_dims=2),
        replace(base, src=grid(1, 1, 1), dst=grid(1, 1, 1), pp=(2, 2)),
        replace(base, rows=1),  # fewer rows than ranks
        replace(base, widths=(5, 1, 2), num_evaluated=1),
    )


def test_headers_cross_before_activations_whose_shape_is_not_known_and_never_before_gradients(
    pool: Pool, tmp_path: Path
) -> None:
    for is_fixed in (False, True):
        case = BridgeCase(src=grid(1, 1, 2), dst=grid(2, 1, 1), widths=(2, 2, 2), is_fixed=is_fixed)
        file = tmp_path / str(is_fixed)
        problems = pool.run(case.world_size, f"{JOB}:cross", {"cases": [case], "audit": str(file)})
        assert [problem for rank in problems for problem in rank] == []
        texts = [path.read_text() for path in sorted(tmp_path.iterdir()) if path.name.startswith(str(is_fixed))]
        assert len(texts) == case.world_size
        lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
        sent = [[line["cargo"] for line in rank if line.get("way") == "sent" and "total" not in line] for rank in lines]
        # Each of two replicas sends every header to both ranks, and gets no gradient with one.
        assert [kind.count("bridge header") for kind in sent] == ([0] * 4 if is_fixed else [6, 6, 0, 0])
        assert [kind.count("gradient") > 0 for kind in sent] == [False, False, True, True]


def test_it_has_what_megatrons_bridge_has(pool: Pool) -> None:
    """Every attribute, with groups of the same ranks."""
    pairs = [(grid(2, 1, 1), grid(2, 1, 1)), (grid(1, 1, 2), grid(2, 1, 1)), (grid(2, 1, 1), grid(1, 1, 2))]
    for rank, found in enumerate(pool.run(4, f"{JOB}:attributes", {"pairs": pairs})):
        for (src, dst), (stock, ours) in zip(pairs, found, strict=True):
            assert {"comm_map", "bridge_pg", "split", "per peer"} <= stock.keys()
            differ = {name: (value, ours.get(name)) for name, value in stock.items() if ours.get(name) != value}
            assert differ == {}, f"{src} -> {dst}, rank {rank}"


def test_colocated_it_refuses_by_default_what_megatrons_refuses(pool: Pool) -> None:
    names = ("tp", "cp", "pp", "dp")
    plain = ((2, 1, 1, 3), names, 0)
    wrong = [
        (plain, ((3, 1, 1, 2), names, 0)),
        (plain, ((2, 3, 1, 1), names, 0)),
        (plain, ((2, 1, 3, 1), names, 0)),
        (((2, 1, 1, 2), names, 0), ((2, 1, 1, 2), names, 2)),
        (plain, ((2, 1, 1, 2), names, 0)),
        (((6, 1), ("tp", "cp"), 0), plain),
    ]
    for found in pool.run(6, f"{JOB}:refusals", {"names": wrong}):
        for pair, (stock, ours) in zip(wrong, found, strict=True):
            assert stock == ours != "nothing", pair


def test_in_place(pool: Pool) -> None:
    pairs = [
        (grid(1, 1, 4), grid(2, 1, 2)),
        (grid(2, 1, 2), grid(1, 1, 4)),
        (grid(2, 1, 2), grid(2, 1, 2)),
        (grid(2, 1, 2, is_sharded=True), grid(4, 1, 1)),
        (grid(4, 1, 1), grid(1, 4, 1, "plain")),
        (grid(1, 2, 2), grid(2, 2, 1)),
        (grid(1, 1, 4), grid(1, 2, 2, is_sharded=True)),
    ]
    problems = pool.run(4, f"{JOB}:move_in_place", {"pairs": [(*pair, dims) for pair in pairs for dims in (2, 3)]})
    assert [problem for rank in problems for problem in rank] == []


def test_in_place_every_message_is_recorded_and_nothing_that_a_rank_has_travels(pool: Pool, tmp_path: Path) -> None:
    pairs = [(grid(1, 1, 4), grid(1, 4, 1), 3)]
    problems = pool.run(4, f"{JOB}:move_in_place", {"pairs": pairs, "audit": str(tmp_path / "audit")})
    assert [problem for rank in problems for problem in rank] == []
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    sent = [(line["cargo"], line["bytes"]) for line in lines if line.get("way") == "sent" and "total" not in line]
    # Each of four ranks has a quarter of [8, 8, 5] in float64, which goes to the three others; so does, on the way
    # back, each part of the sum to whom it belongs.
    quarter = 8 * 8 * 5 * 8 // 4
    headers = [("bridge header", 8 * 4)] * 12  # before, each rank tells each other what it has
    assert sorted(sent) == [("activation", quarter)] * 12 + headers + [("gradient", quarter)] * 12


def test_in_place_with_fixed_shapes_only_the_first_call_compares(pool: Pool, tmp_path: Path) -> None:
    kwargs = {"pairs": [(grid(1, 1, 4), grid(1, 4, 1), 3)], "audit": str(tmp_path / "audit"), "num_calls": 3}
    problems = pool.run(4, f"{JOB}:move_in_place", kwargs)
    assert [problem for rank in problems for problem in rank] == []
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    sent = [line["cargo"] for line in lines if line.get("way") == "sent" and "total" not in line]
    assert {kind: sent.count(kind) for kind in sent} == {"bridge header": 12, "activation": 36, "gradient": 36}


def test_in_place_with_sizes_that_do_not_divide(pool: Pool) -> None:
    pairs = [(grid(3, 1, 2), grid(2, 1, 3)), (grid(2, 1, 3), grid(1, 3, 2)), (grid(1, 2, 3), grid(3, 2, 1, "zigzag"))]
    problems = pool.run(6, f"{JOB}:move_in_place", {"pairs": [(*pair, 3) for pair in pairs]})
    assert [problem for rank in problems for problem in rank] == []


# The line that all ranks end with. Where a tensor is checked before each message, only those that hold it find it.
_TYPE = "a tensor of torch.bfloat16, the bridge is for torch.float32; set comm_dtype to the type of the module's output"
MISUSES = {
    "type": f"rank 0, 1: bridge source -> destination, forward: {_TYPE}",
    "hidden size": "ranks disagree: hidden size is 4 on rank 0 and 6 on rank 1; give both modules tensors of one type",
    "sequence": "ranks disagree: sequence length is 8 on rank 0 and 6 on rank 1; give both modules tensors of one type",
    "batch": "rank 0, 1: a share of 3 along the batch cannot be cut into 2 equal parts for the replicas of the other",
    "dimensions": "rank 0, 1: bridge source -> destination, forward: a tensor of shape (8, 4), the bridge is for 3",
    "overlap": "the modules at a bridge, of the ranks 0 to 1 and 1 to 2, have the ranks 1 in common; give them",
    "in place, copies": "bridge src -> dest, forward: the ranks' tensors do not fit together (type, rows,",
    "in place, batch": "a share of 3 along the batch cannot be cut into 2 equal parts",
    "in place, fixed": "bridge src -> dest, forward: a tensor of torch.float32 [3, 1, 6] (type, rows, columns, "
    "lengths) after one of torch.float32 [3, 1, 4]; leave has_fixed_shape out",
    "in place, default": "a ColocatedBridgeCommunicator with a spread other than whole copies needs extended=True",
}


def test_what_does_not_fit_is_one_line_on_all_ranks_before_anything_is_sent(pool: Pool) -> None:
    answers = pool.run(4, f"{JOB}:misuse", {"names": list(MISUSES)})
    for name, line in MISUSES.items():
        for rank, answer in enumerate(answers):
            assert answer[name].startswith(line), f"{name}, rank {rank}: {answer[name]}"
        assert len({answer[name] for answer in answers}) == 1


def test_a_gradient_must_have_the_shape_of_its_activation(pool: Pool) -> None:
    answers = pool.run(4, f"{JOB}:misuse", {"names": ["gradient"]})
    assert [answer["gradient"][:41] for answer in answers[:2]] == ["nothing", "nothing"]
    for answer in answers[2:]:
        assert "a tensor of shape (8, 2, 3), expected is (8, 2, 4)" in answer["gradient"]


COUNTED = [
    (grid(2, 1, 1), grid(2, 1, 1)),
    (grid(2, 1, 2), grid(4, 1, 1)),
    pytest.param(grid(4, 1, 1), grid(2, 1, 2), marks=pytest.mark.full),
    pytest.param(grid(1, 1, 4), grid(2, 1, 2), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("src", "dst"), COUNTED, ids=str)
def test_no_more_communicators_than_megatrons_bridge(pool: Pool, src: Sizes, dst: Sizes) -> None:
    case = BridgeCase(src=src, dst=dst, widths=(2, 1, 2), is_combined=True)
    counts: dict[str, tuple[int, int]] = {}
    for name, is_stock, as_device in (("stock", True, False), ("gloo", False, False), ("device", False, True)):
        kwargs = {"case": case, "is_stock": is_stock, "as_device": as_device}
        results = pool.run(case.world_size, f"{JOB}:count", kwargs)
        problems = [problem for problems, _, _ in results for problem in problems]
        # Megatron's bridge may give tensors that share memory, which ours never does.
        assert [one for one in problems if not is_stock or "no fresh leaf" not in one] == []
        groups = {(group, tuple(ranks)) for _, groups, _ in results for group, ranks in groups}
        traces = [parse_trace(text) for _, _, text in results]
        events = [event for trace in traces for event in trace.events if event.is_operation]
        # The barrier at the end of Megatron's constructor is among all ranks.
        used = {NCCL.communicator(event) for event in events if event.name != "barrier"}
        counts[name] = len(groups), len(used)
        if not is_stock:
            assert check(traces, MODELS if as_device else (BUFFERED, RENDEZVOUS)) == ()
    # One for each replica, and one for messages.
    assert counts["gloo"][0] == counts["stock"][0] == src.dp + dst.dp + 1
    # Devices need a queue for each direction: one more group, no more communicators.
    assert counts["device"][0] == counts["stock"][0] + 1
    assert counts["device"][1] <= counts["stock"][1], counts
