"""``checkpoint diff`` across layouts and forms: what is equal is found equal, and no small difference is missed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import (
    EXPERTS,
    NORM,
    OTHER_NORM,
    QKV,
    Model,
    Writer,
    by_block,
    by_bucket,
    by_name,
    make_model,
)
from vtp_plugin.checkpoint.format.shard_map import MAP
from vtp_plugin.cli import main

Output = tuple[int, str, str]
Diff = Callable[..., Output]


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Diff:
    """Run the command; return exit code and both streams."""

    def run(*words: object) -> Output:
        with pytest.raises(SystemExit) as left:
            main(["checkpoint", "diff", *map(str, words)])
        printed = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, printed.out, printed.err

    return run


@pytest.mark.parametrize("write", [by_name, by_block, by_bucket])
@pytest.mark.parametrize("axis", [0, 1])
def test_layouts_and_forms_of_one_state_are_equal(
    diff: Diff, tmp_path: Path, write: Callable[..., Path], axis: int
) -> None:
    a = by_bucket(tmp_path / "a", make_model(), ranks=2, axis=0)
    b = write(tmp_path / "b", make_model(), ranks=4, axis=axis, is_older=axis == 1)
    code, out, _ = diff(a, b)
    assert code == 0
    assert out.splitlines() == [
        *(f"{state}: 5 tensors, equal to the last bit" for state in ("weight", "master", "exp_avg", "exp_avg_sq")),
        "steps: 3",
    ]


def test_a_plain_optimizer_has_its_weights_as_masters(diff: Diff, tmp_path: Path) -> None:
    plain = make_model()
    plain.states = {key: value for key, value in plain.states.items() if key[0] != "param"}
    a, b = by_name(tmp_path / "a", plain, form="plain"), by_bucket(tmp_path / "b", make_model())
    assert diff(a, b)[0] == 0
    other = make_model()
    other.states["param", QKV][0, 0, 0] += 1
    code, out, _ = diff(a, by_bucket(tmp_path / "c", other))
    assert code == 1 and f"master: 5 tensors, 1 differ\n  {QKV}: at most" in out


def _one_ulp(model: Model) -> None:
    value = model.states["exp_avg_sq", QKV]
    value[1, 7, 2] = torch.nextafter(value[1, 7, 2], torch.tensor(torch.inf))


def _swapped_moments(model: Model) -> None:
    for name in (QKV, NORM):
        a, b = ("exp_avg", name), ("exp_avg_sq", name)
        model.states[a], model.states[b] = model.states[b], model.states[a]


def _swapped_rows(model: Model) -> None:
    model.weights[QKV][:, [3, 4]] = model.weights[QKV][:, [4, 3]]


def _no_number(model: Model) -> None:
    model.states["exp_avg", NORM][0, 0] = torch.nan


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(_one_ulp, [f"exp_avg_sq: 5 tensors, 1 differ\n  {QKV}: at most", "e-08 of the"], id="one-ulp"),
        pytest.param(
            _swapped_moments, ["exp_avg: 5 tensors, 2 differ", "exp_avg_sq: 5 tensors, 2 differ"], id="moments"
        ),
        pytest.param(_swapped_rows, [f"weight: 5 tensors, 1 differ\n  {QKV}: at most "], id="rows"),
        pytest.param(_no_number, [f"exp_avg: 5 tensors, 1 differ\n  {NORM}: at most inf"], id="nan"),
    ],
)
@pytest.mark.parametrize("write", [by_name, by_block, by_bucket])
def test_what_differs_is_found(
    diff: Diff, tmp_path: Path, spoil: Callable[[Model], None], words: list[str], write: Callable[..., Path]
) -> None:
    other = copy.deepcopy(make_model())
    spoil(other)
    code, out, _ = diff(by_bucket(tmp_path / "a", make_model()), write(tmp_path / "b", other, ranks=4, axis=1))
    assert code == 1
    assert all(word in out for word in words), out
    assert out.count("differ") == len([word for word in words if "differ" in word])


def test_a_zero_has_a_sign(diff: Diff, tmp_path: Path) -> None:
    models = [make_model(), make_model()]
    for model, zero in zip(models, (0.0, -0.0), strict=True):
        model.weights[NORM][0, 0] = zero
    a, b = (by_name(tmp_path / str(index), model) for index, model in enumerate(models))
    code, out, _ = diff(a, b)
    assert code == 1 and f"  {NORM}: at most 0 of the largest value" in out


def test_a_step_more_is_found(diff: Diff, tmp_path: Path) -> None:
    later = make_model()
    later.step = 4.0
    a = by_bucket(tmp_path / "a", make_model())
    for write in (by_name, by_bucket):
        code, out, _ = diff(a, write(tmp_path / write.__name__, later))
        assert code == 1 and "steps: 3 in A, 4 in B" in out
        assert diff(a, tmp_path / write.__name__, "--weights-only")[0] == 0


def test_a_missing_expert_is_found(diff: Diff, tmp_path: Path) -> None:
    """Whether the model has one less, or a part of the tensor is not stored."""
    a = by_name(tmp_path / "a", make_model())
    smaller = make_model()
    smaller.weights[EXPERTS] = smaller.weights[EXPERTS][:, :2]
    code, out, _ = diff(a, by_name(tmp_path / "b", smaller))
    assert code == 1 and f"  {EXPERTS}: (2, 4, 8, 4) in A, (2, 2, 8, 4) in B" in out
    original = Writer.tensor

    def without(self: Writer, key: str, shape: tuple[int, ...], offset: list[int], *rest: object) -> None:
        if key != EXPERTS or offset[1] == 0:
            original(self, key, shape, offset, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "tensor", without)
        c = by_name(tmp_path / "c", make_model())
    code, out, _ = diff(a, c)
    assert code == 1 and f"  {EXPERTS}: only 128 of 256 elements are stored in both" in out


def test_two_parameters_that_change_places_in_the_map_are_found(diff: Diff, tmp_path: Path) -> None:
    a, b = by_bucket(tmp_path / "a", make_model()), by_bucket(tmp_path / "b", make_model())
    read = json.loads((b / MAP).read_text())
    names = [name for name, _ in read["parameters"]]
    one, two = names.index(NORM), names.index(OTHER_NORM)
    read["parameters"][one], read["parameters"][two] = read["parameters"][two], read["parameters"][one]
    (b / MAP).write_text(json.dumps(read))
    code, out, _ = diff(a, b)
    assert code == 1 and "weight: 5 tensors, equal to the last bit" in out
    for state in ("master", "exp_avg", "exp_avg_sq"):
        assert f"{state}: 5 tensors, 2 differ" in out
    assert NORM in out and OTHER_NORM in out


def test_types_are_named_where_they_differ(diff: Diff, tmp_path: Path) -> None:
    a, b = by_name(tmp_path / "a", make_model()), by_name(tmp_path / "b", make_model(dtype=torch.bfloat16))
    code, out, _ = diff(a, b, "--verbose")
    assert code == 1 and out.count("float32 in A, bfloat16 in B") == 5
    assert diff(b, b)[0] == 0


def test_large_tensors_are_read_slab_by_slab(diff: Diff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtp_plugin.checkpoint.load.stored_optimizer.SLAB_BYTES", 20)
    other = make_model()
    _one_ulp(other)
    a, b = by_bucket(tmp_path / "a", make_model()), by_bucket(tmp_path / "b", other, ranks=4, axis=1)
    code, out, _ = diff(a, b, "--json")
    assert code == 1
    differ = [each for each in json.loads(out)["tensors"] if not each["is_equal"]]
    assert [(each["state"], each["name"]) for each in differ] == [("exp_avg_sq", QKV)]
    assert 0 < differ[0]["relative"] < 1e-6


def _no_map(folder: Path) -> None:
    (folder / MAP).unlink()


def _foreign_class(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def _short(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(_no_map, f"b/{MAP} is missing, and where the optimizer's parameters lie cannot", id="no-map"),
        pytest.param(_foreign_class, "b/.metadata names os.system, which no index of a checkpoint needs", id="class"),
        pytest.param(lambda folder: (folder / ".metadata").write_bytes(b"x"), "b/.metadata is damaged", id="damaged"),
        pytest.param(lambda folder: (folder / ".metadata").unlink(), "b/.metadata is missing", id="no-index"),
        pytest.param(_short, "b/__1_0.distcp is cut off, with ", id="short"),
        pytest.param(lambda folder: (folder / "__1_0.distcp").unlink(), "b/__1_0.distcp is missing", id="no-file"),
    ],
)
def test_what_is_broken_is_one_line(diff: Diff, tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    a, b = by_bucket(tmp_path / "a", make_model()), by_bucket(tmp_path / "b", make_model())
    spoil(b)
    code, out, error = diff(a, b)
    assert (code, out) == (2, "")
    (line,) = error.splitlines()
    assert words in line and line.count(";") >= 2, line


def test_other_folders_are_refused(diff: Diff, tmp_path: Path) -> None:
    a = by_bucket(tmp_path / "a", make_model())
    assert "is no folder; a checkpoint is one" in diff(a, tmp_path / "none")[2]
    (tmp_path / "empty").mkdir()
    assert "holds neither a checkpoint nor latest_checkpointed_iteration.txt" in diff(a, tmp_path / "empty")[2]
    other = make_model()
    other.weights = {f"x.{name}": value for name, value in other.weights.items()}
    other.states = {(state, f"x.{name}"): value for (state, name), value in other.states.items()}
    assert "have no parameter in common" in diff(a, by_name(tmp_path / "other", other))[2]
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    assert "has the format torch, one file for each rank" in diff(a, tmp_path / "old")[2]
    assert "--weight is unknown" in diff(a, a, "--weight")[2]


def test_the_newest_of_a_folder_is_meant(diff: Diff, tmp_path: Path) -> None:
    a = by_bucket(tmp_path / "all" / "iter_0000003", make_model())
    (tmp_path / "all" / "latest_checkpointed_iteration.txt").write_text("3")
    assert diff(a, tmp_path / "all")[0] == 0
