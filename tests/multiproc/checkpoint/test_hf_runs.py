"""What a run says of an import: flags that contradict it, flags from it, Megatron without the plugin, every form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiproc.cases.hf_cases import LAYOUTS, LOGITS, Layout, noted, words_of
from tests.multiproc.cases.script_cases import EXAMPLE, ScriptRun, Scripts, arguments, assert_refused
from tests.support.hf_models import KINDS, SIZES, export, imported, load, logits_of, make, run_json, torch, vocab_flag
from tests.support.hosts import ROOT, host_name, reshardable_flags
from tests.unit.checkpoint.test_hf_tokenizer_size import make_tokenizer

pytestmark = pytest.mark.needs("scripts_here")
DISTRIBUTED = "--use-distributed-optimizer"
# Flags of tests.multiproc.cases.script_cases that say what the model is.
MODEL_FLAGS = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels"),
    "--max-position-embeddings",
)


def forgetful_script(folder: Path) -> str:
    """Give a script that does not hand on the factor: NVIDIA's own, or the example without that line."""
    if str(ROOT / "examples" / "pretrain_gpt.py") != EXAMPLE:
        return EXAMPLE
    lines = Path(EXAMPLE).read_text().splitlines()
    kept = [line for line in lines if "rope_scaling_factor" not in line]
    assert len(kept) == len(lines) - 1
    (folder / "pretrain_gpt.py").write_text("\n".join(kept))
    return str(folder / "pretrain_gpt.py")


def test_a_script_that_forgets_the_factor_computes_what_was_published_or_nothing(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron would stretch positions by 8, whatever the flag says: another model, hundreds of tolerances away."""
    kind = KINDS["llama-3-tied"]
    model = make(kind, tmp_path / "published")
    flags = imported(tmp_path / "published", tmp_path / "start", capsys)
    words = arguments("1,2", extra=words_of(kind, LAYOUTS["1,2"], flags, tmp_path))
    kwargs = {"arguments": words, "script": forgetful_script(tmp_path), "hooks": ["note_logits"]}
    runs = scripts.launch(3, kwargs)
    if all(run.exit_code == 0 for run in runs):
        wanted = logits_of(model, noted(runs, "tokens")[0])
        np.testing.assert_allclose(noted(runs, "logits")[0], wanted, rtol=0, atol=LOGITS)
    said = "--rope-scaling-factor is 32, and the model was built with 8"
    assert_refused(runs, said, "rope_scaling_factor=args.rope_scaling_factor")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            ("--num-layers", "4", "--rotary-base", "20000"),
            ("--num-layers is 4, and 6 is expected", "--rotary-base is 20000, and 500000 is expected"),
        ),
        pytest.param(
            ("--norm-epsilon", "1e-6", "--qk-layernorm"),
            ("--norm-epsilon is 1e-06, and 1e-05 is expected", "--qk-layernorm is given, and is not expected"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--vocab-size", "60", "--make-vocab-size-divisible-by", "1"),
            ("tokens, padding included, and", "are expected"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["layers", "norms", "words"],
)
def test_flags_that_contradict_an_import(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: Sequence[str], said: Sequence[str]
) -> None:
    """Every rank ends with one line: the flag, what it is, what is expected, and whose model it is."""
    kind = KINDS["llama-3"]
    make(kind, tmp_path / "published")
    flags = imported(tmp_path / "published", tmp_path / "start", capsys)
    words = arguments("1,2", extra=words_of(kind, LAYOUTS["1,2"], flags, tmp_path, *wrong))
    runs = scripts.launch(3, {"arguments": words})
    assert_refused(runs, *said, f"{tmp_path / 'start'} was imported as a model of the family llama")
    assert not (tmp_path / "saved" / "iter_0000002").exists()


@pytest.mark.parametrize(
    "num_words", [SIZES["vocab_size"], pytest.param(SIZES["vocab_size"] - 1, marks=pytest.mark.full)]
)
def test_a_tokenizer_with_fewer_words_than_the_model(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_words: int
) -> None:
    """It is refused, and what the line tells to give works, also with words that the sizes do not divide; so does the
    flag that the import prints, where they do.
    """
    kind = KINDS["llama-3"]
    model = make(kind, tmp_path / "published", vocab_size=num_words)
    make_tokenizer(tmp_path / "published", 62)
    said = run_json(capsys, "import", "--hf", tmp_path / "published", "--to", tmp_path / "start")
    flags = [word for flag in (*said["flags"], *said["free_flags"]) for word in flag.split()]
    # --vocab-size of the words stays: this tokenizer does not look at it.
    own = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "start" / "hugging_face"))
    own = (*own, "--make-vocab-size-divisible-by", "1")
    extra = words_of(kind, LAYOUTS["1,2"], flags, tmp_path, *own, "--train-iters", "1")
    runs = scripts.launch(3, {"arguments": arguments("1,2", extra=extra)})
    assert_refused(runs, f"the vocabulary has 62 tokens, padding included, and {num_words} are expected")
    way_out = runs[0].output.partition("; give ")[2].partition(", and neither")[0]
    ways = [way_out, said["vocab_flag"]] if num_words % 2 == 0 else [way_out]
    assert way_out == f"--make-vocab-size-divisible-by {-(-num_words // 2)}"
    for way in ways:
        words = arguments("1,2", extra=[*extra, *way.split()])
        runs = scripts.finish(3, {"arguments": words, "hooks": ["note_logits"]})
        logits = logits_of(model, noted(runs, "tokens")[0])
        np.testing.assert_allclose(noted(runs, "logits")[0][..., :num_words], logits, rtol=0, atol=LOGITS)


@pytest.mark.needs("our_example", cases=("llama-3-tied",))
@pytest.mark.needs("experts", cases=("qwen-3-moe", "mixtral"))
@pytest.mark.parametrize(
    "name", ["llama-3", *(pytest.param(n, marks=pytest.mark.full) for n in KINDS if n != "llama-3")]
)
def test_flags_from_an_import(scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """With ``--use-checkpoint-args`` no flag says what the model is, and it is the same."""
    kind = KINDS[name]
    model = make(kind, tmp_path / "published", rms_norm_eps=3e-6)  # not what Megatron takes by itself
    imported(tmp_path / "published", tmp_path / "start", capsys)
    words, left = [], arguments("1,2", extra=words_of(kind, LAYOUTS["1,2"], (), tmp_path, "--use-checkpoint-args"))
    while left:
        taken = 2 if left[0] in MODEL_FLAGS else 1
        words += left[:taken] if taken == 1 else []
        left = left[taken:]
    # Megatron itself takes only the last of all positions from there.
    runs = scripts.finish(3, {"arguments": [*words, "--train-iters", "1"], "hooks": ["note_logits"]})
    assert_logits(runs, model)


def assert_logits(runs: Sequence[ScriptRun], model: Any) -> None:
    """Compare the logits of a run's first microbatch with those that transformers computes."""
    wanted = logits_of(model, noted(runs, "tokens")[0])
    np.testing.assert_allclose(noted(runs, "logits")[0], wanted, rtol=0, atol=LOGITS)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("qwen-3", 2, 1),
        *(pytest.param(name, 1, 2, marks=pytest.mark.full) for name in ("llama-3", "mistral", "qwen-2", "mixtral")),
        pytest.param("qwen-3-moe", 2, 1, marks=pytest.mark.full),
    ],
)
def test_megatron_without_the_plugin_reads_an_import(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, tp: int, pp: int
) -> None:
    kind = KINDS[name]
    model = make(kind, tmp_path / "published")
    flags = imported(tmp_path / "published", tmp_path / "start", capsys)
    uniform = Layout(sizes=",".join([str(tp)] * pp))
    words = arguments(uniform.sizes, extra=words_of(kind, uniform, flags, tmp_path, "--train-iters", "1"))
    position = words.index("--vtp-device")
    words[position : position + 4] = [
        *("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp))
    ]
    kwargs = {"arguments": words, "how": "stock", "hooks": ["note_logits"]}
    runs = scripts.finish(tp * pp, kwargs)
    assert "vtp" not in runs[0].output.replace(str(tmp_path), "")
    assert_logits(runs, model)


def _forms() -> list[object]:
    """Give what a run saves besides weights, and in which layout: name of the layout, replicas, flags."""
    cases = {
        "1,2 by bucket": ("1,2", 2, [DISTRIBUTED]),
        "1,2 plain": ("1,2", 1, []),
        "2,1,3 by bucket": ("2,1,3", 1, [DISTRIBUTED]),
        "U by bucket": ("1,2 U", 1, [DISTRIBUTED]),
        "2,2": ("2,2", 1, [DISTRIBUTED]),  # 0.12 stores it by block, later ones by bucket
        "2,2 for any layout": ("2,2", 1, [DISTRIBUTED, *reshardable_flags()]),
    }
    if host_name() == "0.12":
        cases["2,2 by rank"] = ("2,2", 1, [DISTRIBUTED, "--no-ckpt-fully-parallel-save"])
    return [
        pytest.param(*case, id=name.replace(" ", "-"), marks=[] if name == "1,2 by bucket" else [pytest.mark.full])
        for name, case in cases.items()
    ]


@pytest.mark.parametrize(("place", "dp", "flags"), _forms())
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_export_from_every_form_and_list(
    scripts: Scripts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
    dp: int,
    flags: list[str],
    dtype: str,
) -> None:
    """After two steps with what the optimizer keeps, transformers computes the logits of the third, without padding."""
    kind, num_words = KINDS["qwen-2"], SIZES["vocab_size"] - 2
    model = make(kind, tmp_path / "published", dtype=getattr(torch, dtype), vocab_size=num_words)
    given = imported(tmp_path / "published", tmp_path / "start", capsys)
    layout = LAYOUTS.get(place, Layout(sizes=place))
    words = words_of(kind, layout, given, tmp_path, *flags, "--global-batch-size", str(2 * dp), "--train-iters", "3")
    words += vocab_flag(num_words).split()
    words.remove("--no-save-optim")
    words += ["--bf16"] if dtype == "bfloat16" else []
    runs = first_replica(scripts.train(layout.sizes, words, dp=dp, hooks=["note_logits"]), layout.sizes, dp)
    export(tmp_path / "saved" / "iter_0000002", tmp_path / "trained", None)
    exported = load(tmp_path / "trained", dtype="auto")
    assert {weight.dtype for weight in exported.parameters()} == {getattr(torch, dtype)}
    tokens, padded = noted(runs, "tokens")[4], noted(runs, "logits")[4]
    assert exported.config.vocab_size == num_words < padded.shape[-1]
    logits = padded[..., :num_words]
    off, moved = (np.abs(logits - logits_of(each.float(), tokens)) for each in (exported, model))
    if dtype == "float32":
        assert off.max() <= LOGITS and moved.max() >= 100 * LOGITS
    else:  # the run rounds every activation
        assert off.mean() <= moved.mean() / 4, (off.mean(), moved.mean())


def first_replica(runs: Sequence[ScriptRun], sizes: str, dp: int) -> list[ScriptRun]:
    """Give the ranks of the first replica of every stage."""
    found: list[ScriptRun] = []
    start = 0
    for size in map(int, sizes.split(",")):
        found += runs[start : start + size]
        start += dp * size
    return found
