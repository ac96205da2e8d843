"""Layers that Megatron's flags give the stages, where they are not those of the model: in a run, and in its plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vtp_plugin.cli import main
from vtp_plugin.host.rules.checks.stage_layers import check_stage_layers
from vtp_plugin.host.rules.rule import OptionContext

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
LAYOUT, CHUNKS = "--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"
CHUNK_LAYERS = "--num-layers-per-virtual-pipeline-stage"
BY_LOSS, BY_EMBEDDING = "--account-for-loss-in-pipeline-split", "--account-for-embedding-in-pipeline-split"

# Of models of four layers: the flags, the sizes of the stages, and a part of the line; none where they fit.
CASES = [
    ({LAST: 1}, "2", "the only stage has all layers"),
    ({FIRST: 1}, "2", "the only stage has all layers"),
    # Stock trains one layer of four here, and five of four in the next one.
    ({FIRST: 1, LAST: 1}, "2", "the only stage has all layers"),
    ({FIRST: 5}, "1,2", "-1 layers are left for the 1 other stages"),
    ({FIRST: 4}, "1,2", "0 layers are left"),
    ({FIRST: 0}, "1,2", "every stage at least one"),
    ({LAST: -1}, "1,2", "every stage at least one"),
    ({FIRST: 1, LAST: 1}, "1,2", "2 layers are left for the 0 other stages"),
    ({FIRST: 1, LAST: 5}, "1,2,1", "-2 layers are left"),
    ({}, "1,2,1", "3 stages cannot hold equally many layers"),
    ({CHUNKS: 2}, "1,2,1", "3 stages must hold equal numbers"),
    ({CHUNKS: 0}, "1,2", "a stage has one chunk at least"),
    ({CHUNKS: 2}, "2", "the only stage has one chunk"),
    ({CHUNKS: 3}, "1,2", "each has 3 chunks"),
    ({CHUNK_LAYERS: 0}, "1,2", f"{CHUNK_LAYERS} 0; it needs --num-layers"),
    ({BY_LOSS: True}, "1,2", "2 stages cannot share 5 evenly"),
    ({LAYOUT: "Et|ttt|L"}, "1,2", "3 parts for 2 stages"),
    ({LAYOUT: "Ett|tL"}, "1,2", "it has 3 layers (t)"),
    ({LAYOUT: "tt|ttL"}, "1,2", "it is not E, then layers t"),
    ({LAYOUT: "Ett|xtL"}, "1,2", "it is not E, then layers t"),
    ({LAYOUT: "Ett|ttmL"}, "1,2", "1 that predict (m)"),
    ({LAYOUT: "Et|tttL", FIRST: 1}, "1,2", "give one of them"),
    ({LAYOUT: "E|t|tt|tL", CHUNKS: 2}, "1,2", "give one of them"),
    ({FIRST: 2, CHUNK_LAYERS: 1}, "1,2", "give one of them"),
    ({FIRST: 2, BY_LOSS: True}, "1,2", "give one of them"),
    ({}, "1,2", ""),
    ({LAST: 4}, "2", ""),
    ({FIRST: 3}, "1,2", ""),
    ({FIRST: 1, LAST: 3}, "1,2", ""),
    ({FIRST: 1, LAST: 1}, "1,2,1", ""),
    ({CHUNKS: 1}, "2", ""),
    ({CHUNK_LAYERS: 1}, "1,2", ""),
    ({BY_LOSS: True, BY_EMBEDDING: True}, "1,2,1", ""),
    ({LAYOUT: "E|t*4,L"}, "1,2", ""),
    ({LAYOUT: "E(t|)*3tL"}, "1,2", ""),
]


@pytest.mark.parametrize(("flags", "sizes", "line"), CASES)
def test_layers_of_stages(flags: dict[str, object], sizes: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(num_layers=4, **{flag[2:].replace("-", "_"): value for flag, value in flags.items()})
    found = check_stage_layers(args, OptionContext(tp_sizes=tuple(map(int, sizes.split(",")))))
    assert len(found) == bool(line) and all(line in text and text.count("; ") == 2 for text in found), found
    words = [word for flag, value in flags.items() for word in (flag, *([] if value is True else [str(value)]))]
    for command in (["plan"], ["simulate", "--num-microbatches", "4"]):
        try:
            main([*command, "--vtp-size-list", sizes, "--num-layers", "4", *words])
        except SystemExit as end:
            assert line and end.code
            assert line in capsys.readouterr().err
        else:
            assert not line


def test_the_way_out_is_one() -> None:
    """Layers that a line advises for the first stage are those with which all stages have some."""
    for num_layers, num_stages in ((5, 2), (4, 3), (7, 4), (33, 8), (63, 32), (9, 8)):
        args, context = SimpleNamespace(num_layers=num_layers), OptionContext(tp_sizes=(1,) * num_stages)
        (line,) = check_stage_layers(args, context)
        args.decoder_first_pipeline_num_layers = int(line.split(f"{FIRST} ")[1].split(",")[0])
        assert check_stage_layers(args, context) == (), line
    (line,) = check_stage_layers(SimpleNamespace(num_layers=2), OptionContext(tp_sizes=(1,) * 3))
    assert "and every stage at least one; change --num-layers" in line


def test_predicting_layers_share_a_part() -> None:
    context = OptionContext(tp_sizes=(1, 2))
    for text, is_refused in (("Et|tm|tmL", True), ("Et|t|tm|tL", True), ("Et|t|tmm|L", False), ("Et|t|t|mmL", False)):
        num_layers = text.count("t")
        args = SimpleNamespace(num_layers=num_layers, mtp_num_layers=2, pipeline_model_parallel_layout=text)
        assert bool(check_stage_layers(args, context)) == is_refused, text


def test_layers_that_only_the_model_knows() -> None:
    context = OptionContext(tp_sizes=(1, 2))
    for name in ("hybrid_layer_pattern", "noop_layers", "mm"):
        args = SimpleNamespace(num_layers=5, **{name: "something"})
        assert check_stage_layers(args, context) == ()
    assert check_stage_layers(SimpleNamespace(num_layers=5), OptionContext(tp_sizes=(1, 2), is_u_shaped=True)) == ()
