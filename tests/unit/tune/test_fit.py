"""What is fitted to cards in cases worked out by hand, what is refused, and how ``plan --have`` shows it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vtp_plugin.cli.main import main
from vtp_plugin.errors import ConfigError, ShortageError
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.cluster.read_cluster import HeldPart
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.fit.fit_layout import describe, fit, in_order
from vtp_plugin.tune.search.evaluate import Candidate

MODEL = {
    "num_layers": 12,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "seq_length": 8192,
    "sequence_parallel": True,
    "num_attention_heads": 64,
    "group_query_attention": True,
    "num_query_groups": 8,
}


def ask(stages: str, **changes: Any) -> Constraints:
    least, most = map(int, stages.split(":"))
    of_ask = {name: changes.pop(name) for name in [*changes] if name in Constraints.__dataclass_fields__}
    return Constraints(args=SimpleNamespace(**{**MODEL, **changes}), least_stages=least, most_stages=most, **of_ask)


def nodes(*cards: int, **same: Any) -> list[Node]:
    return [Node(name=f"n{i}", num_cards=number, **same) for i, number in enumerate(cards)]


def lines(layouts: tuple[Candidate, ...], wanted: Constraints) -> str:
    return "\n".join(describe(layouts, wanted))


def test_six_cards_become_two_stages_with_layers_two_to_one() -> None:
    wanted = ask("1:2", num_replicas=1)
    fitted, *rivals = fit(nodes(6), wanted)
    spare = [number for _, number in fitted.spare_cards]
    assert (fitted.sizes, fitted.layers, spare) == ((4, 2), (8, 4), [0])
    assert "n0 has 6 devices, but no stage can have tensor-parallel size 6: --num-attention-heads 64" in lines(
        (fitted, *rivals), wanted
    )


def test_a_damaged_replica_is_left_out_or_all_shrink_whichever_is_faster() -> None:
    """Two stages on four nodes, of which one has lost cards.

    12 layers can be moved away, 8 and 4: 12 cards of two replicas beat 8 of one. Two layers cannot: the stage with
    one card would compute one for 17 microbatches, of three cards each stage computes a third for 34.
    """
    shrunk, *others = fit(nodes(4, 4, 4, 2), ask("2:2", global_batch_size=32))
    rivals = {one.num_replicas: one for one in others}
    assert (shrunk.sizes, shrunk.layers, shrunk.num_replicas) == ((4, 2), (8, 4), 2)
    assert rivals[1].sizes == (4, 4) and rivals[1].step_s > shrunk.step_s
    few = {"num_layers": 2, "num_attention_heads": 3, "group_query_attention": False, "seq_length": 9}
    left_out, *others = fit(nodes(3, 3, 3, 1), ask("2:2", global_batch_size=34, **few))
    rivals = {one.num_replicas: one for one in others}
    assert (left_out.sizes, left_out.num_replicas, left_out.step_s) == ((3, 3), 1, pytest.approx(35))
    assert (rivals[2].sizes, rivals[2].step_s) == ((3, 1), pytest.approx(52))


def test_stages_of_sites_follow_the_sites() -> None:
    cloud = [Node(name=f"c{i}", num_cards=4, site="cloud") for i in range(2)]
    edge = Node(name="z", num_cards=1, site="edge")
    fitted, *_ = fit([*cloud, edge], ask("3:3", sites=("edge", "cloud")))
    assert (fitted.sizes, fitted.sites) == ((1, 4, 4), ("edge", "cloud", "cloud"))


def test_a_u_keeps_the_layers_of_its_edge() -> None:
    cloud = [Node(name="c0", num_cards=4, site="cloud"), Node(name="c1", num_cards=2, site="cloud")]
    wanted = ask("2:3", sites=("edge", "cloud"), ends=(2, 1), num_replicas=1)
    fitted, *_ = fit([*cloud, Node(name="e", num_cards=2, site="edge")], wanted)
    assert (fitted.sizes, fitted.layers) == ((2, 4, 2), (2, 6, 3, 1))
    with pytest.raises(ConfigError, match="site edge has no device left; the edge holds the data"):
        fit([*cloud, Node(name="e", num_cards=0, site="edge")], wanted)


def test_a_u_whose_edge_has_all_layers_leaves_none_for_the_cloud() -> None:
    given = [Node(name="c", num_cards=4, site="cloud"), Node(name="e", num_cards=2, site="edge")]
    with pytest.raises(ConfigError, match="--num-layers 3 with --vtp-stages 2:3; every stage needs a layer"):
        fit(given, ask("2:3", sites=("edge", "cloud"), ends=(2, 1), num_layers=3))


def test_experts_must_fit_the_replicas() -> None:
    """Four copies of a stage's ranks are wanted where experts are shared by four."""
    wanted = ask("1:1", num_experts=8, moe_ffn_hidden_size=64, ep=4, etp=1, hidden_size=64)
    fitted, *_ = fit(nodes(2, 2), wanted)
    assert fitted.sizes[0] * fitted.num_replicas == 4


def test_memory_moves_layers_away_from_a_small_card() -> None:
    given = [Node(name="a", num_cards=2, memory_bytes=100), Node(name="b", num_cards=2, memory_bytes=20)]
    wanted = ask("2:2", num_replicas=1, held_bytes=lambda part: 5 * (part.end - part.start))
    assert fit(given, wanted)[0].layers == (8, 4)


@pytest.mark.parametrize(
    ("cards", "changes", "text"),
    [
        ((1, 1), {"stages": "3:4"}, "1\\+1 devices; 1 replica of at least 3 stages .* need 3; add 1"),
        ((), {"stages": "1:1"}, "0 devices; 1 replica of at least 1 stages .* need 1; add 1"),
        ((4,), {"stages": "2:2", "num_layers": 1}, "--num-layers 1 with --vtp-stages 2:2; every stage needs a layer"),
        (
            (4,),
            {"stages": "1:1", "global_batch_size": 15, "micro_batch_size": 2},
            "--global-batch-size 15; 2 .1 replica times --micro-batch-size 2. must .* use 14 or 16",
        ),
        (
            (2, 2),
            {"stages": "1:1", "num_replicas": 3},
            "--global-batch-size 16; 3 .3 replicas times --micro-batch-size 1. must .* use 15 or 18",
        ),
        ((8,), {"stages": "1:1", "seq_length": 6, "cp": 2}, "--seq-length 6 .*so 4 must divide it; use 4 or 8"),
        ((2,), {"stages": "1:1", "num_replicas": 4}, "2 devices; 4 replicas of at least 1 stages .* need 4; add 2"),
        (
            (2, 1),
            {"stages": "2:2", "held_bytes": lambda part: 3 * (part.end - part.start), "memory": 17},
            "2\\+1 devices; no layout within --vtp-stages 2:2 fits the model's memory; even 64 more would not be",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(cards: tuple[int, ...], changes: Any, text: str) -> None:
    given = dict(changes)
    memory = given.pop("memory", None)
    with pytest.raises(ConfigError, match=text) as found:
        fit(nodes(*cards, memory_bytes=memory), ask(given.pop("stages"), **given))
    # No later start may be kept from going on with more cards.
    assert isinstance(found.value, ShortageError) is (" add " in text) is not found.value.is_final


def test_a_site_without_cards_is_a_shortage_unless_it_is_the_edge_of_a_u() -> None:
    edge, cloud = Node(name="e", num_cards=1, site="edge"), Node(name="c", num_cards=2, site="cloud")
    no_edge, no_cloud = replace(edge, num_cards=0), replace(cloud, num_cards=0)
    plain = ask("2:2", sites=("edge", "cloud"))
    u_shaped = replace(plain, ends=(2, 1))
    for given, wanted in (((no_edge, cloud), plain), ((edge, no_cloud), plain), ((edge, no_cloud), u_shaped)):
        with pytest.raises(ShortageError, match="has no device left; it has at least one stage; bring one back"):
            fit(given, wanted)
    with pytest.raises(ConfigError, match="site edge has no device left") as found:
        fit((no_edge, cloud), u_shaped)
    assert found.value.is_final


def test_the_nearest_number_of_cards_is_named() -> None:
    """A stage of one card holds four layers, one of two eight: twelve need three."""

    def held(part: HeldPart) -> Any:
        return (part.end - part.start) / part.tp

    with pytest.raises(ShortageError, match="add 1 on n1"):
        fit(nodes(1, 1, memory_bytes=4), ask("2:2", num_replicas=1, held_bytes=held))


def test_nodes_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="kinds of devices are mixed: cuda on a, npu on b; a run has one kind"):
        in_order([Node(name="a", num_cards=1, kind="cuda"), Node(name="b", num_cards=1, kind="npu")], ())
    with pytest.raises(ConfigError, match="2 nodes are called a"):
        in_order([Node(name="a", num_cards=1), Node(name="a", num_cards=1)], ())
    with pytest.raises(ConfigError, match="site 'fog' of a is none of --vtp-sites edge,cloud"):
        in_order([Node(name="a", num_cards=1, site="fog")], ("edge", "cloud"))


def test_spare_cards_are_explained() -> None:
    """Three cards do not divide a sequence of 8,192: a third stage would take the last one."""
    wanted = ask("2:2", num_replicas=1)
    text = lines(fit(nodes(4, 3), wanted), wanted)
    assert "spare devices: 1 of n1; --vtp-stages 2:3 would use 7 devices, as --vtp-size-list 4,2,1" in text


FLAGS = shlex.split(
    "--num-layers 24 --hidden-size 256 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
    "--seq-length 8192 --max-position-embeddings 8192 --sequence-parallel --micro-batch-size 1 --global-batch-size 64 "
    "--vocab-size 32000"
)


def test_plan_shows_what_is_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--have", "8,6,8", "--vtp-stages", "4:4", "--vtp-data-parallel-size", "1", *FLAGS])
    text = capsys.readouterr().out
    assert text.startswith("chosen: --vtp-size-list 8,4,2,8, layers ") and "uses 22 of 22 devices" in text
    assert "node 1 has 6 devices, but no stage can have tensor-parallel size 6" in text
    main(["plan", "--json", "--have", "edge:1,cloud:4", "--vtp-stages", "2", "--vtp-sites", "edge,cloud", *FLAGS])
    plan = json.loads(capsys.readouterr().out)
    assert plan["fit"]["sizes"] == [stage["tp"] for stage in plan["stages"]] == [1, 4]
    assert [stage["site"] for stage in plan["stages"]] == ["edge", "cloud"]


def test_plan_shows_what_to_start_for_what_is_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of the command are a plan of the same ranks, each on the node that the fit gave it."""
    for words in (
        ("8,6,8", "--vtp-stages", "4:4"),
        ("3,3", "--vtp-stages", "2"),
        ("4,4", "--context-parallel-size", "2"),
    ):
        main(["plan", "--json", "--have", *words, "--vtp-data-parallel-size", "2", *FLAGS])
        plan = json.loads(capsys.readouterr().out)
        started = {rank: node["node"] for node in plan["launch"]["nodes"] for rank in node["ranks"]}
        assert sorted(started) == [*range(plan["world_size"])]
        for stage, names in zip(plan["stages"], plan["fit"]["nodes"], strict=True):
            of_replica = stage["tp"] * stage["cp"]
            assert [started[rank] for rank in stage["ranks"]] == [name for name in names for _ in range(of_replica)]
        flags = shlex.split(plan["launch"]["nodes"][0]["commands"][0].partition(" FLAGS ")[2])
        assert "--vtp-stages" not in flags and "auto" not in flags
        is_uniform = len({stage["tp"] for stage in plan["stages"]}) == 1
        assert ("--vtp-force" in flags) is is_uniform
        main(["plan", "--json", *FLAGS, *flags, "--world-size", str(plan["world_size"])])
        assert json.loads(capsys.readouterr().out)["stages"] == plan["stages"]


def test_sites_of_nodes_each_have_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """In what is fitted, and in what it is compared with."""
    main(["plan", "--json", "--have", "edge:1,cloud:8", *FLAGS])
    plan = json.loads(capsys.readouterr().out)
    assert [stage["site"] for stage in plan["stages"]] == ["edge", "cloud"]
    assert "8 devices" not in " ".join(plan["fit"]["reasons"]) and "8 cards" not in " ".join(plan["fit"]["reasons"])


def test_plan_counts_the_memory_of_fitted_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage of two cards holds as much as one of four with twice the layers; a small card takes fewer."""
    words = ["plan", "--json", "--have", "4,2", "--vtp-stages", "2:2", "--vtp-data-parallel-size", "1", *FLAGS]
    words += ["--vocab-size", "640000"]  # both ends hold it, and the second one has half the cards
    main(words)
    free = json.loads(capsys.readouterr().out)

    def held(plan: Any) -> list[int]:
        keys = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "overhead_bytes")
        in_flight = [2] * 4 + [1] * 2
        return [
            sum(rank[key] for key in keys) + (rank["activation_bytes"] or 0) * number
            for rank, number in zip(plan["memory"], in_flight, strict=True)
        ]

    assert free["fit"]["layers"] == [16, 8]
    limit = max(held(free)) - 1
    main([*words, "--card-memory", str(limit)])
    tight = json.loads(capsys.readouterr().out)
    assert tight["fit"]["layers"] != free["fit"]["layers"] and max(held(tight)) <= limit


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--have 8,x", "--have '8,x' has the entry 'x'"),
        ("--have 8 --vtp-size-list 4,4", "say the same thing twice"),
        ("--have 8 --tensor-model-parallel-size 8", "--tensor-model-parallel-size 8 with --vtp-size-list auto"),
        ("--vtp-size-list 4,4 --card-memory 80GiB", "--card-memory is for --have"),
        ("--vtp-size-list 4,4 --vtp-stages 2:3", "--vtp-stages 2:3 needs --vtp-size-list auto"),
        ("--have 8 --vtp-stages 3:2", "vtp_stages 3:2 begins above its end"),
        ("--have 8 --vtp-stages some", "vtp_stages 'some' is no range of stages"),
        ("--have 8 --vtp-size-list auto --vtp-cp-list 1,1", "vtp_cp_list 1,1 with vtp_size_list 'auto'; write"),
        (
            "--have 8 --layerwise-disaggregated-training --num-layer-list 1,2,1",
            "nothing says which machine is the edge; give --vtp-sites edge,cloud to all",
        ),
        (
            "--have 8 --layerwise-disaggregated-training --num-layer-list 1,2,1 --vtp-encoder-layer-list 1,2,1",
            "--vtp-encoder-layer-list with --vtp-stages; the layers of an encoder cannot be chosen",
        ),
        ("--have 8 --layerwise-disaggregated-training", "needs --num-layer-list for the edge's two parts"),
    ],
)
def test_plan_refuses_what_contradicts_itself(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *words.split(), *FLAGS])
    assert text in capsys.readouterr().err


def test_plan_asks_for_what_a_fit_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--have", "8"])
    assert "--num-layers, --micro-batch-size, --global-batch-size missing" in capsys.readouterr().err


def test_how_the_vocabulary_is_padded_is_said() -> None:
    """Twice as many tokens raise the first loss by ln 2; nothing is said where they are those of TP size 1."""
    small = {"num_attention_heads": 4, "num_query_groups": 4, "vocab_size": 256}
    wanted = ask("2:2", **small)
    text = lines(fit(nodes(1, 2), wanted), wanted)
    assert "padded to 512 tokens, 256 with TP size 1" in text and "the first loss is about 0.69 higher; " in text
    assert "--make-vocab-size-divisible-by 1 pads to 256" in text
    for kept in ({"make_vocab_size_divisible_by": 1}, {"padded_vocab_size": 256}, {"vocab_size": 512}):
        wanted = ask("2:2", **{**small, **kept})
        assert "padded" not in lines(fit(nodes(1, 2), wanted), wanted)
