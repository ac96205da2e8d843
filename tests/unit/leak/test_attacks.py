"""Attacks find what they must find, and no more than chance where there is nothing to find."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.lines import only_line_of_error
from vtp_plugin.cli.main import main
from vtp_plugin.leak import measure as measuring
from vtp_plugin.leak.attacks import Inverter, labels_from_gradients, name_clusters, search_tokens, train_inverter
from vtp_plugin.leak.measure import Leak, measure
from vtp_plugin.leak.small_gpt import GPTSizes, SmallGPT, Tokenizer, noisy, read_sequences, share

SIZES = GPTSizes(num_layers=3, width=16, vocab=300, length=6, num_held_out=10, num_epochs=1)


@pytest.fixture(scope="module")
def model() -> SmallGPT:
    return SmallGPT(SIZES, seed=0).requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return read_sequences(SIZES)[1][:, :-1]


def test_the_tokenizer_spells_what_is_rare_and_loses_nothing() -> None:
    text = "one two one three three,  [one]"
    tokenizer = Tokenizer(text, 20)
    pieces = {number: piece for piece, number in tokenizer._numbers.items()}
    assert "".join(pieces[number] for number in tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" one")) == 1 < len(tokenizer.encode(" net"))


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_whole_sequences_and_candidates_give_the_same_states(
    model: SmallGPT, tokens: torch.Tensor, num_layers: int
) -> None:
    """The search runs positions one after another; were it not the same, it could find nothing."""
    states, untrained = model.states(tokens, num_layers), Inverter(SIZES.width, SIZES.vocab)
    # In whichever order candidates are tried, the right ones are found.
    assert torch.equal(search_tokens(model, num_layers, states, untrained), tokens)
    other = SmallGPT(SIZES, seed=1).requires_grad_(requires_grad=False)
    assert share(search_tokens(other, num_layers, states, untrained), tokens) < 0.2
    assert share(search_tokens(model, num_layers, noisy(states, 3.0), untrained), tokens) < 0.6
    assert share(search_tokens(model, num_layers, states, untrained, num_tried=40), tokens) < 0.6


def test_an_inverter_learns_and_a_shuffled_one_does_not(model: SmallGPT, tokens: torch.Tensor) -> None:
    rows = read_sequences(SIZES)[0][:600, :-1]
    known, taught = model.states(rows, 1).flatten(0, 1), rows.flatten()
    wanted, crossed = tokens.flatten(), model.states(tokens, 1).flatten(0, 1)
    mixed = taught[torch.randperm(len(taught), generator=torch.Generator().manual_seed(3))]
    right, wrong = (
        share(train_inverter(known, some, SIZES.vocab, num_steps=300)(crossed).argmax(-1), wanted)
        for some in (taught, mixed)
    )
    assert right > 0.4 > 0.25 > wrong


def test_clusters_get_the_names_of_tokens_as_frequent() -> None:
    wanted = torch.tensor([4] * 60 + [1] * 30 + [2] * 10)
    points = torch.eye(5)[wanted] * 9 + noisy(torch.ones(100, 5), 0.01)
    counts = torch.tensor([0, 300, 100, 0, 600])
    assert share(name_clusters(points, counts, num_clusters=3), wanted) in (1.0, 0.9, 0.7, 0.6)
    assert share(name_clusters(points, counts.flip(0), num_clusters=3), wanted) < 0.6


def test_a_gradient_behind_the_output_layer_names_the_label(model: SmallGPT) -> None:
    states = torch.randn(3, 4, SIZES.width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(12).view(3, 4) * 7
    torch.nn.functional.cross_entropy(model.head(states).flatten(0, 1), labels.flatten()).backward()
    assert states.grad is not None
    assert share(labels_from_gradients(model, states.grad), labels) > 0.9
    assert share(labels_from_gradients(model, -states.grad), labels) < 0.1


@pytest.fixture(scope="module")
def leak() -> Leak:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "read_sequences", _few_sequences)
        return measure(SIZES, [1, 2], lambda _line: None)


def _few_sequences(sizes: GPTSizes) -> tuple[torch.Tensor, torch.Tensor]:
    rows, held_out = read_sequences(sizes)
    return rows[:2000], held_out


def test_a_measurement_has_its_controls(leak: Leak) -> None:
    assert leak.one_seed == leak.num_of_seed == 12 and 0 < leak.by_frequency < 0.3
    found = {(one.start, one.edge_layers, one.name): one for one in leak.attacks}
    assert len(found) == len(leak.attacks) == 2 * (2 * 8 + 1)
    for start in ("published", "scratch"):
        for number in (1, 2):
            assert found[start, number, "weights known"].share >= measuring.LEAST_EXACT
            assert found[start, number, "weights known, of another text"].share < 0.3
            assert found[start, number, "trained inverter"].share > 0.4
            assert found[start, number, "weights known, noise 0.3"].loss_more is not None


def test_a_broken_attack_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "read_sequences", _few_sequences)
    monkeypatch.setattr(measuring, "search_tokens", lambda _model, _number, states, *_: torch.zeros(states.shape[:2]))
    with pytest.raises(RuntimeError, match="the attack is broken"):
        measure(SIZES, [1], lambda _line: None)


def _record(folder: Path, states: torch.Tensor, rank: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(states.split(2)):
        np.save(folder / f"rank{rank}-{number:03}.npy", rows.transpose(0, 1).numpy())


def test_a_recorded_run_is_read(model: SmallGPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_sequences(SIZES)[0][:400, :-1]
    _record(tmp_path / "crossed", model.states(rows, 1))
    np.save(tmp_path / "tokens.npy", rows.numpy())
    words = ["leak", "--recorded", str(tmp_path / "crossed"), "--tokens", str(tmp_path / "tokens.npy")]
    main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    shares = {one["name"]: one["share"] for one in found["attacks"]}
    assert shares["trained inverter"] > 0.5 > 0.2 > found["by_frequency"] and found["sizes"] is None
    main(words)
    assert "A low one does not show that it does not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: [file.unlink() for file in folder.glob("*.npy")], "files of one rank are needed, found: none"),
        (lambda folder: _record(folder, torch.ones(2, 6, 16), rank=2), "found: rank1, rank2"),
        (lambda folder: (folder / "rank1-000.npy").write_bytes(b"x"), "give a numpy file of numbers"),
        (lambda folder: np.save(folder.parent / "tokens.npy", np.ones((3, 6))), r"shape [3, 6], the activations have"),
        (lambda folder: (folder.parent / "tokens.npy").unlink(), "No such file"),
    ],
)
def test_what_was_not_recorded_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], problem: str
) -> None:
    _record(tmp_path / "crossed", torch.ones(4, 6, 16))
    np.save(tmp_path / "tokens.npy", np.ones((4, 6), dtype=np.int64))
    spoil(tmp_path / "crossed")
    _refused(capsys, problem, "--recorded", str(tmp_path / "crossed"), "--tokens", str(tmp_path / "tokens.npy"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--recorded", "x"), "--recorded and --tokens belong together"),
        (("--edge-layers", "6"), "--edge-layers 6 of 6 layers; give 1 to 5"),
        (("--edge-layers", "0"), "--edge-layers"),
        (("--width", "6"), "--width 6 is no multiple of the 4 heads"),
        (("--epochs", "0"), "--epochs 0; must be at least 1"),
        (("--wide", "6"), "--wide is unknown"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str) -> None:
    _refused(capsys, problem, *words)


def _refused(capsys: pytest.CaptureFixture[str], problem: str, *words: str) -> None:
    line = only_line_of_error(capsys, ["leak", *words])
    assert problem in line, line
