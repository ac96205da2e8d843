"""MindSpeed itself, on CPU over gloo: its own scripts train stages of unequal size as the uniform run.

Opt-in: ``VTP_MINDSPEED`` names a tree of MindSpeed, ``VTP_MEGATRON_LM`` the Megatron-LM that the branch is made for,
``VTP_MINDSPEED_LLM`` one of MindSpeed-LLM. Without the last, Megatron-LM's own script runs, with the import of the
adaptor as its first line, as MindSpeed's guide says. ``tests/npu_stub`` stands for torch_npu. A start takes a minute.
On 0.12 the environment needs, besides, transformers, datasets, peft, tqdm, scipy, sqlalchemy and scikit-learn.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.mindspeed.launcher import launch
from tests.mindspeed.split import PLANNED, SPLIT, costs, num_split
from tests.mindspeed.test_fake import assert_one_line, assert_same, numbers
from tests.multiproc.cases.script_cases import num_ranks
from tests.support.hosts import ROOT, host_name, prints_first_step

TREES = {name: os.environ.get(name, "") for name in ("VTP_MINDSPEED", "VTP_MEGATRON_LM")}
LLM = os.environ.get("VTP_MINDSPEED_LLM", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not all(TREES.values()), reason=f"no path in {' and '.join(name for name, path in TREES.items() if not path)}"
    ),
]

STUBS = [ROOT / "tests" / "npu_stub", *([ROOT / "tests" / "npu_stub_triton"] if host_name() == "0.16" else [])]
ADAPTOR = "from mindspeed_llm import megatron_adaptor\n" if LLM else "import mindspeed.megatron_adaptor\n"
needs_llm = pytest.mark.skipif(not LLM, reason="no path in VTP_MINDSPEED_LLM")
TIMEOUT_S = 600.0
MODEL = shlex.split("""
    --hidden-size 24 --num-attention-heads 6 --seq-length 12 --max-position-embeddings 12
    --micro-batch-size 2 --train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-iters 10 --mock-data --split 98,1,1
    --tokenizer-type NullTokenizer --vocab-size 4200 --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --attention-dropout 0
    --hidden-dropout 0 --transformer-impl local --distributed-backend gloo --log-interval 1 --eval-iters 0
    --eval-interval 100 --use-cpu-initialization --normalization LayerNorm --num-workers 0 --vtp-device cpu
    --no-rope-fusion
""")
VOCAB_MULTIPLE = 24
PER_TOKEN = ("--calculate-per-token-loss",)
DISTRIBUTED = ("--use-distributed-optimizer",)
UNTIED = ("--untie-embeddings-and-output-weights",)
# Megatron 0.12 places a tied embedding only where the weights before it end at a multiple of 128 elements.
PLACED = ("--hidden-size", "128", "--num-attention-heads", "4")
SEQUENCE = ("--sequence-parallel",)
PLANNED_AND_SPLIT = (*PLANNED, SPLIT, *costs(1, 1))
# As the scripts of MindSpeed-LLM's own examples, without what needs an NPU: fused kernels and flash attention.
QWEN = tuple(
    shlex.split("""
    --use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm
    --position-embedding-type rope --use-rotary-position-embeddings --rotary-base 1000000 --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --no-bias-swiglu-fusion --ffn-hidden-size 36 --disable-bias-linear
    --group-query-attention --num-query-groups 2 --attention-softmax-in-fp32 --untie-embeddings-and-output-weights
    --lr-decay-style cosine --lr-warmup-fraction 0.01 --adam-beta2 0.95 --initial-loss-scale 4096 --seed 42
    --log-throughput
""")
)


EXPERTS = tuple(
    shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-ffn-hidden-size 24
    --moe-token-dispatcher-type alltoall --moe-layer-freq -1 --first-k-dense-replace -1 --moe-aux-loss-coeff 0.001
    --norm-topk-prob
""")
)


def printed_from_step_2(whole: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what a run that resumes after two steps prints of the third and the fourth."""
    (third, fourth), norms = whole["lm loss"][2:], whole["grad norm"][2:]
    return {"lm loss": [third, (third + fourth) / 2 if prints_first_step() else fourth], "grad norm": norms}


def own_script(folder: Path, after: str = "") -> Path:
    """Return MindSpeed-LLM's script, or Megatron-LM's with the adaptor in front; a copy if lines come after that."""
    path = Path(LLM or TREES["VTP_MEGATRON_LM"]) / "pretrain_gpt.py"
    source = path.read_text()
    if not LLM:
        source = ADAPTOR + source
    elif not after:
        return path
    assert source.count(ADAPTOR) == 1
    copy = folder / "pretrain_gpt.py"
    copy.write_text(source.replace(ADAPTOR, ADAPTOR + after))
    return copy


def start(sizes: str, *extra: str, dp: int = 1, script: Path | None = None, is_run: bool = True) -> tuple[int, str]:
    """Start MindSpeed-LLM's script, or a changed copy of it, and return how it ended and what it wrote."""
    stages = [int(size) for size in sizes.split(",")]
    multiple = VOCAB_MULTIPLE // max(stages)
    words = [
        *MODEL,
        *("--num-layers", str(2 * len(stages))),
        *("--global-batch-size", str(8 * dp)),
        *("--make-vocab-size-divisible-by", str(multiple)),
        *("--pipeline-model-parallel-size", str(len(stages)), "--vtp-size-list", sizes),
        *extra,
    ]
    path = script or own_script(Path(tempfile.mkdtemp()))
    # MindSpeed calls make, which asks python3-config where the headers of this Python lie.
    tools = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), f"{sys.base_prefix}/bin"]
    trees = [str(tree) for tree in (ROOT, *STUBS, *TREES.values(), LLM) if tree]
    environment = {
        "PYTHONPATH": os.pathsep.join(trees),
        "PATH": os.pathsep.join([*tools, os.environ["PATH"]]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    ranks = num_ranks(sizes, dp)
    return launch(path, words, num_ranks=ranks, is_run=is_run, environment=environment, timeout_s=TIMEOUT_S)


_KNOWN: dict[tuple[object, ...], dict[str, list[float]]] = {}


def trained(sizes: str, *extra: str, dp: int = 1, script: Path | None = None, is_run: bool = True) -> str:
    """Train and return the output."""
    code, output = start(sizes, *extra, dp=dp, script=script, is_run=is_run)
    assert code == 0, output[-6000:]
    assert [len(values) for values in numbers(output).values()] == [4, 4], output[-6000:]
    return output


def reference(sizes: str, *extra: str, dp: int = 1) -> dict[str, list[float]]:
    """Return the numbers of the uniform run with as many stages; each is made once."""
    uniform = ",".join("1" for _ in sizes.split(","))
    kept = tuple(word for word in extra if word in PER_TOKEN)
    key = (uniform, kept, dp)
    if key not in _KNOWN:
        _KNOWN[key] = numbers(trained(uniform, *kept, dp=dp))
    return _KNOWN[key]


@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        ("2,2", (), 1),
        pytest.param("1,2", (), 1, marks=pytest.mark.core),
        ("2,1", (), 1),
        ("1,2,2", (), 1),
        ("1,2", SEQUENCE, 1),
        ("2,1", (*SEQUENCE, *DISTRIBUTED), 1),
        ("1,2", PER_TOKEN, 1),
        ("1,2", DISTRIBUTED, 2),
        ("1,2", (*DISTRIBUTED, *PER_TOKEN), 2),
        pytest.param("1,2", ("--num-layer-list", "1,3"), 1, marks=needs_llm),
        ("1,2", ("--untie-embeddings-and-output-weights",), 1),
        ("1,2", ("--vtp-schedule", "planned"), 1),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, tuple) else str(value),
)
def test_layout(sizes: str, extra: tuple[str, ...], dp: int) -> None:
    output = trained(sizes, *extra, dp=dp)
    if "--untie-embeddings-and-output-weights" in extra or "--num-layer-list" in extra:
        uniform = ",".join("1" for _ in sizes.split(","))
        assert_same(output, numbers(trained(uniform, *extra, dp=dp)))
    else:
        assert_same(output, reference(sizes, *extra, dp=dp))


def test_u_shape() -> None:
    extra = ("--layerwise-disaggregated-training", "--num-layer-list", "1,2,1")
    assert_same(trained("1,2", *extra), numbers(trained("1,1", *extra)))


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        ("1,2", ("--ckpt-format", "torch_dist")),
        ("2,1", ("--ckpt-format", "torch")),
        ("1,2", ("--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--ckpt-format", "torch_dist")),
        pytest.param(
            "1,2",
            ("--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--vtp-sites", "edge,cloud"),
            marks=pytest.mark.core,
        ),
    ],
    ids=("torch_dist", "torch", "u-shape", "sites"),
)
def test_a_checkpoint_resumes(tmp_path: Path, sizes: str, extra: tuple[str, ...]) -> None:
    whole = numbers(trained(sizes, *extra, "--save", str(tmp_path), "--save-interval", "2"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    code, output = start(sizes, *extra, "--load", str(tmp_path))
    assert code == 0, output[-6000:]
    assert_same(output, printed_from_step_2(whole))


def test_a_uniform_checkpoint_loads_into_unequal_stages(tmp_path: Path) -> None:
    saving = ("--ckpt-format", "torch_dist", "--save", str(tmp_path), "--save-interval", "2")
    whole = numbers(trained("1,1", *saving))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    code, output = start("1,2", "--ckpt-format", "torch_dist", "--load", str(tmp_path), "--no-load-rng")
    assert code == 0, output[-6000:]
    assert_same(output, printed_from_step_2(whole))


@pytest.mark.parametrize("model", [UNTIED, PLACED], ids=["untied", "tied"])
def test_the_distributed_optimizer_goes_on_in_another_list(tmp_path: Path, model: tuple[str, ...]) -> None:
    """What unequal stages save by bucket, a list of other sizes and of fewer replicas loads."""
    extra = (*DISTRIBUTED, *model, "--ckpt-format", "torch_dist", "--global-batch-size", "16")
    whole = numbers(trained("1,2", *extra, "--save", str(tmp_path), "--save-interval", "2", dp=2))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert (tmp_path / "iter_0000002" / "vtp_optimizer_map.json").exists()
    code, output = start("2,1", *extra, "--load", str(tmp_path), "--no-load-rng")
    assert code == 0, output[-6000:]
    assert_same(output, printed_from_step_2(whole))


def test_split_backwards_are_whole_ones_to_the_last_bit(tmp_path: Path) -> None:
    """And the run with one rank a stage; the control leaves gradients out."""
    saving = ("--ckpt-format", "torch_dist", "--save-interval", "4", "--save")
    split = (*PLANNED_AND_SPLIT, "--vtp-trace", str(tmp_path / "trace"), *saving)
    trained("1,2", *PLANNED, *saving, str(tmp_path / "whole"))
    assert_same(trained("1,2", *split, str(tmp_path / "split")), reference("1,2"))
    assert num_split(tmp_path / "trace") > 0
    left_out = own_script(tmp_path, after="from tests.mindspeed.split import leave_one_out; leave_one_out()\n")
    trained("1,2", *split, str(tmp_path / "wrong"), script=left_out)
    diff = [sys.executable, "-m", "vtp_plugin", "checkpoint", "diff", str(tmp_path / "whole")]
    codes = [subprocess.run([*diff, str(tmp_path / name)], cwd=ROOT).returncode for name in ("split", "wrong")]
    assert codes == [0, 1]


@pytest.mark.parametrize(
    ("flag", "home"),
    [
        ("--swap-attention", "mindspeed.core.memory.common"),
        ("--use-ascend-coc", "mindspeed.core.tensor_parallel.coc_feature.adaptor"),
    ],
)
def test_its_own_linear_layers_are_not_split(flag: str, home: str) -> None:
    code, output = start("1,2", *PLANNED_AND_SPLIT, flag)
    assert_one_line(code, output, of_launcher=1)
    assert f"--vtp-split-backward with {home} of MindSpeed in the place of megatron.core" in output, output[-4000:]


@needs_llm
def test_flags_of_its_own_examples(tmp_path: Path) -> None:
    """From one checkpoint: the weights that gated layers start with depend on the tensor-parallel size."""
    extra = (*QWEN, *DISTRIBUTED, "--ckpt-format", "torch_dist")
    whole = numbers(trained("1,1", *extra, "--save", str(tmp_path), "--save-interval", "2", dp=2))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    code, output = start("1,2", *extra, "--load", str(tmp_path), "--no-load-rng", dp=2)
    assert code == 0, output[-6000:]
    assert_same(output, printed_from_step_2(whole))


@needs_llm
@pytest.mark.parametrize("per_stage", [(), ("--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1")], ids=["cut", "spread"])
def test_experts_of_its_own_examples(tmp_path: Path, per_stage: tuple[str, ...]) -> None:
    """As its Qwen 3 examples with experts: the second stage cuts each of them, or spreads them over its ranks."""
    extra = (*QWEN, *EXPERTS, *SEQUENCE, "--ckpt-format", "torch_dist")
    trained("1,1", *extra, "--save", str(tmp_path), "--save-interval", "2")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    # Without the optimizer: Megatron keeps experts in one of their own only where they are spread.
    loading = ("--load", str(tmp_path), "--no-load-rng", "--no-load-optim")
    outputs = []
    for sizes, words in (("1,1", ()), ("1,2", per_stage)):
        code, output = start(sizes, *extra, *loading, *words)
        assert code == 0, output[-6000:]
        outputs.append(output)
    assert len(numbers(outputs[0])["lm loss"]) == 2
    assert_same(outputs[1], numbers(outputs[0]))


@needs_llm
def test_an_import_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model as it is published, under its script with a list: four steps as in the uniform run, from the first."""
    from tests.support.hf_models import KINDS, imported, make  # skips where there is no transformers

    make(KINDS["qwen-3"], tmp_path / "published", vocab_size=4224)
    model = imported(tmp_path / "published", tmp_path / "start", capsys)
    flags = (*QWEN, *model, "--vocab-size", "4223", "--ckpt-format", "torch_dist", "--load", str(tmp_path / "start"))
    random = numbers(trained("1,1", *flags[:-2], "--num-layers", "6"))
    outputs = [trained(sizes, *flags) for sizes in ("1,1", "1,2", "2,1")]
    uniform = numbers(outputs[0])
    for output in outputs[1:]:
        assert_same(output, uniform)
    assert abs(uniform["lm loss"][0] - random["lm loss"][0]) > 0.01


def test_files_of_one_size_become_a_checkpoint_for_any(tmp_path: Path) -> None:
    """As docs/guides/ascend.md says of converted weights: a uniform run makes a sharded checkpoint of them."""
    whole = numbers(trained("1,1", "--ckpt-format", "torch", "--save", str(tmp_path / "files"), "--save-interval", "2"))
    (tmp_path / "files" / "latest_checkpointed_iteration.txt").write_text("2")
    converting = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path))
    code, output = start("1,1", "--ckpt-format", "torch", "--load", str(tmp_path / "files"), *converting)
    assert code == 0, output[-6000:]
    loading = ("--ckpt-format", "torch_dist", "--load", str(tmp_path / "torch_dist"), "--no-load-rng")
    code, output = start("1,2", *loading)
    assert code == 0, output[-6000:]
    assert_same(output, printed_from_step_2(whole))


def test_two_lines_after_the_adaptor(tmp_path: Path) -> None:
    script = own_script(tmp_path, after="import vtp_plugin; vtp_plugin.apply()\n")
    assert_same(trained("1,2", *PER_TOKEN, script=script, is_run=False), reference("1,2", *PER_TOKEN))


@pytest.mark.core
def test_a_refused_feature_names_its_flag() -> None:
    # On 0.16 MindSpeed's own code for --optimize-send-recv-comm imports a name that this Megatron has not.
    flag = "--optimize-send-recv-comm" if host_name() == "0.12" else "--unaligned-linear"
    code, output = start("1,2", flag)
    assert_one_line(code, output, of_launcher=1)
    assert re.search(rf"{flag} with --vtp-size-list 1,2; .*leave it out", output), output[-4000:]
