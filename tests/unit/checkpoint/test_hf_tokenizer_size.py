"""Words: which flag pads a tokenizer's to a model's, on every host, and which rows an export may leave out."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import run_action
from vtp_plugin.checkpoint.hf.hf_model import NOTE, RELEASE, check_note
from vtp_plugin.checkpoint.hf.read_config import known_words
from vtp_plugin.cli import main

MANY = 152_064


def _host_pads() -> Any:
    """Return the function with which this Megatron pads the words of any tokenizer."""
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    except ImportError:
        module = pytest.importorskip(
            "megatron.training.tokenizer.tokenizer", reason="its wheel has no megatron.training"
        )
        return module._vocab_size_with_padding
    return vocab_size_with_padding


@pytest.mark.parametrize("sizes", [[1], [1, 2], [2, 1, 3], [4, 4]])
@pytest.mark.parametrize(("known", "words"), [(151_665, MANY), (62, 96), (62, 97), (1, 97)])
def test_the_flag_pads_to_the_model(sizes: list[int], known: int, words: int, tmp_path: Path) -> None:
    """What the line tells to give makes the host's own padding come to the model's words, or to the next that fit."""
    (tmp_path / RELEASE).mkdir()
    note = {"version": 1, "family": "llama", "vocab": words, "settings": []}
    (tmp_path / RELEASE / NOTE).write_text(json.dumps(note))
    pad = _host_pads()
    args = Namespace(make_vocab_size_divisible_by=1, tensor_model_parallel_size=1, rank=1, vtp_size_list=sizes)
    args.padded_vocab_size = pad(known, args)
    (line,) = check_note(str(tmp_path), args)
    flag, value = line.partition("; give ")[2].partition(", and neither")[0].split()
    assert flag == "--make-vocab-size-divisible-by"
    # The plugin lets the host pad by a size that both ends divide, see `padded-vocabulary`.
    multiple = {1: 1, 2: 2, 3: 6}[len(sizes)] * (2 if sizes == [4, 4] else 1)
    args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = int(value), multiple
    args.padded_vocab_size = pad(known, args)
    assert args.padded_vocab_size == -(-words // multiple) * multiple
    assert [*check_note(str(tmp_path), args)] == []


def test_words_that_are_not_padded_are_compared_too(tmp_path: Path) -> None:
    (tmp_path / RELEASE).mkdir()
    (tmp_path / RELEASE / NOTE).write_text(json.dumps({"family": "llama", "vocab": 96, "settings": []}))
    args = Namespace(padded_vocab_size=None, pad_vocab_size=False, vocab_size=62, tensor_model_parallel_size=2)
    (line,) = check_note(str(tmp_path), args)
    assert "has 62 tokens" in line and "nor --no-pad-vocab-size" in line
    assert [*check_note(str(tmp_path), Namespace(padded_vocab_size=None, pad_vocab_size=True, vocab_size=62))] == []


def make_tokenizer(folder: Path, num_words: int, added: int = 0) -> Path:
    """Make a tokenizer of words that transformers reads."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, num_words)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    own.add_tokens([f"new{i}" for i in range(added)])
    own.save_pretrained(folder)
    return folder


def test_the_tokenizer_says_how_many_words_it_knows(tmp_path: Path) -> None:
    """With those that were added; a damaged file says nothing."""
    assert known_words(make_tokenizer(tmp_path / "a", 62)) == (62, "tokenizer.json")
    assert known_words(make_tokenizer(tmp_path / "b", 62, added=3)) == (65, "tokenizer.json")
    assert known_words(tmp_path / "none") is None
    files = {
        "added_tokens.json": '{"<x>": 7}',
        "vocab.json": '{"a": 0, "b": 12}',
        "tokenizer_config.json": '{"added_tokens_decoder": {"20": {"content": "<y>"}}}',
        "tokenizer.json": '{"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}',
    }
    for (name, text), words in zip(files.items(), (8, 13, 21, 2), strict=True):
        (tmp_path / name).write_text(text)
        assert known_words(tmp_path) == (words, name)
        for spoilt in (
            "[",
            "[]",
            "3",
            '{"a": "b"}',
            '{"model": "a"}',
            '{"added_tokens_decoder": {"a": 1}}',
            "[" * 99_999,
        ):
            (tmp_path / name).write_text(spoilt)
            assert known_words(tmp_path) is None, (name, spoilt)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "who",
    [
        "its run",
        "the carried tokenizer",
        "the tokenizer of its run",
        "nobody",
        "a tokenizer that fits",
        "a tokenizer that is not here",
    ],
)
def test_words_above_the_config_are_not_cut_off(
    who: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 128 of a model of 70 words: padding, unless somebody knows more; then ``--like`` has the number."""
    published = pytest.importorskip("tests.support.hf_models", reason="transformers is not here")
    torch = published.torch
    source, start = tmp_path / "source", tmp_path / "start"
    published.make(published.KINDS["llama-3"], source, **{**published.SMALL, "vocab_size": 128})
    published.imported(source, start, capsys)
    (start / RELEASE / NOTE).unlink()  # it would know them all
    shutil.copytree(source, tmp_path / "like")
    published.edit(tmp_path / "like" / "config.json", vocab_size=70)
    run: dict[str, object] = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": 200}
    if who == "its run":
        run = {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
    elif who == "the carried tokenizer":
        make_tokenizer(tmp_path / "like", 70, added=30)
    elif who == "the tokenizer of its run":
        run["tokenizer_model"] = str(make_tokenizer(tmp_path / "own", 100))
    elif who == "a tokenizer that is not here":
        run["tokenizer_model"] = "somebody/model"
        make_tokenizer(tmp_path / "like", 70)
    elif who == "a tokenizer that fits":
        run["tokenizer_model"] = str(make_tokenizer(tmp_path / "like", 70))
    from vtp_plugin.checkpoint.format.contents import Contents

    given = Contents.arguments.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Contents, "arguments", property(lambda self: {**given(self), **run}))
    words = ("checkpoint", "export", "--from", start, "--hf", tmp_path / "out", "--like")
    capsys.readouterr()
    code, lines = run_action(capsys, *words[1:], tmp_path / "like")
    kept = 70
    if who in ("its run", "the carried tokenizer", "the tokenizer of its run"):
        assert code == 2 and len(lines) == 1 and not (tmp_path / "out").exists()
        assert "100 tokens" in lines[0] and "has vocab_size 70; of 128 rows" in lines[0]
        assert lines[0].endswith("give with --like a folder whose config.json has vocab_size 100")
        published.edit(tmp_path / "like" / "config.json", vocab_size=100)
        code, lines, kept = *run_action(capsys, *words[1:], tmp_path / "like"), 100
    assert code == 0, lines
    main([*map(str, words[:-2]), str(tmp_path / "again"), "--like", str(tmp_path / "like")])
    told = f"left out as padding: {128 - kept} rows above" in capsys.readouterr().err
    assert told == (who in ("nobody", "a tokenizer that is not here"))
    before, after = published.tensors_of(source), published.tensors_of(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name], before[name][:kept])
    assert published.load(tmp_path / "out").config.vocab_size == kept
