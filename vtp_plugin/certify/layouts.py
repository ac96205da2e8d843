"""The runs of ``certify``: what each one shows, how many ranks it needs, and which of them fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vtp_plugin.errors import ConfigError

NUM_STEPS: Final = 3
"""Training steps of a run."""
LEAST_RANKS: Final = 3
"""Fewer ranks make no stages of different sizes."""
SEEDS: Final = (1, 2)
"""Of the reference runs whose start weights are changed by a rounding."""
FOLDER: Final = "{folder}"
"""Stands in words for the folder of the checkpoints."""
_MODEL: Final = (
    "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 --kv-channels 4 --seq-length 24 "
    "--max-position-embeddings 24 --micro-batch-size 2 --global-batch-size 8 --clip-grad 1.0 --train-iters 100 "
    "--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 143 --num-workers 0 "
    "--make-vocab-size-divisible-by 12 --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --use-cpu-initialization --vtp-timeout-s 60"
)
_EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --disable-bias-linear"
)
_SGD, _ADAM = "--optimizer sgd --sgd-momentum 0 --lr 0.1", "--optimizer adam --lr 0.01"
# What lets no two runs of a script differ, and ends it. Of equal flags the last counts.
_ALIKE: Final = (
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 1000000 --eval-iters 0 "
    "--ckpt-format torch_dist --no-check-for-nan-in-loss-and-grad"
)
_START: Final = f"--load {FOLDER}/start-%s --finetune --no-load-optim --no-load-rng"
_SAVE: Final = f"--save {FOLDER}/%s --save-interval 1"
_SAVES: Final = (
    "--save --load --save-interval --finetune --exit-interval --no-load-optim --no-load-rng --async-save "
    "--use-checkpoint-args --pretrained-checkpoint --make-vocab-size-divisible-by --ckpt-step"
)
_LAYOUT: Final = (
    "--layerwise-disaggregated-training --num-layer-list --tensor-model-parallel-size --pipeline-model-parallel-size "
    "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank --context-parallel-size "
    "--expert-model-parallel-size --expert-tensor-parallel-size"
)
_LORA: Final = "--vtp-lora"
_UNIFORM: Final = "--vtp-size-list 1,1"
Role = Literal["start", "reference", "again", "uniform", "list"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedRun:
    """One run of a training script.

    Attributes:
        shows: what it shows, in a few words.
        layout: its stages, as a user writes them.
        num_ranks: how many ranks it takes.
        words: flags of the script.
        role: "start" saves the weights with which all others begin; "reference" is what they are compared with,
            "again" the same once more, and "uniform" another run of equal stages.
        training: flags of what it computes; runs with equal ones must agree.
        num_steps: after which it ends.
        num_replicas: of the stage with the loss.
        cuts_samples: a rank has a part of each sample (context parallelism), so what modules give out is not recorded.
        is_traced: messages cross over the plugin's boundaries, and are timed.
        is_later: it goes on with what another run has saved.
        killed_rank: this rank dies in the second step.
        seed: of a reference whose start weights are changed by a rounding; 0 changes none.
        fed: a file that is named after a layer: the reference keeps there what the layer gets in the first microbatch,
            and other runs give that to the layer; empty for none.
    """

    shows: str
    layout: str
    num_ranks: int
    words: tuple[str, ...] = ()
    role: Role = "list"
    training: str = ""
    num_steps: int = NUM_STEPS
    num_replicas: int = 1
    cuts_samples: bool = False
    is_traced: bool = False
    is_later: bool = False
    killed_rank: int | None = None
    seed: int = 0
    fed: str = ""

    def with_fed(self, layer: str) -> CertifiedRun:
        """Give the first step of the run once more, for a layer that is to get the reference's input."""
        return replace(self, fed=f"{FOLDER}/{layer}", num_steps=1, words=(*self.words, "--exit-interval", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is run, in order, and what is not.

    Attributes:
        runs: in their order; what others are compared with comes first.
        left_out: what a run would show, and why it is not run.
    """

    runs: tuple[CertifiedRun, ...]
    left_out: dict[str, str] = field(default_factory=dict[str, str])


_WIDE = ("2,4", "1,4", "1,3", "1,2")
_WIDE_LAST = ("4,2", "4,1", "3,1", "2,1")
_PAIR = ("2,3", "1,2")
_SHORT: Final = ("one rank sends for a stage", "interleaved", "planned order", "U", "a rank dies")
_REPLICAS = ("4,2 --vtp-dp-list 1,2", "2,1 --vtp-dp-list 1,2")


def _rows() -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Yield what a run shows, lists that may be taken, the widest first, and flags of its layout and its training."""
    yield "one rank sends for a stage", _WIDE, "--vtp-transport rank0", _SGD
    yield "slices", _WIDE_LAST, "--vtp-transport sliced", _SGD
    yield "divided between equal stages", ("2,2,1,1", "2,2"), "--vtp-transport divided --vtp-force", _SGD
    yield "sequence parallelism", _WIDE, "--sequence-parallel", _SGD
    yield "interleaved", _WIDE_LAST, "--num-layers-per-virtual-pipeline-stage 1 --sequence-parallel", _SGD
    yield "planned order", _PAIR, "--vtp-schedule planned", _SGD
    yield "split backward", _WIDE_LAST, "--vtp-schedule planned --vtp-split-backward", _SGD
    yield "U", _WIDE, "--layerwise-disaggregated-training --num-layer-list 1,2,1", _SGD
    yield "unequal replicas", _REPLICAS, "", _SGD
    yield "four stages", ("1,2,1,2", "1,1,1,2"), "", _SGD
    yield "experts", _WIDE_LAST, "--sequence-parallel", f"{_EXPERTS} {_SGD}"
    overlapped = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    yield "distributed optimizer, overlapped", ("1,2 --vtp-dp-list 2,2",), overlapped, _ADAM
    yield "bf16", _WIDE, "", f"--bf16 {_ADAM}"
    yield "adapters", _WIDE, "--sequence-parallel", f"--vtp-lora-rank 4 {_ADAM}"
    yield "saved and loaded", ("2,1",), "", _SGD
    yield "a rank dies", ("1,2",), "", _SGD


def choose(num_ranks: int, *, is_short: bool, without: dict[str, str]) -> Choice:
    """Choose the runs of the small model for so many ranks: each with the widest stages that fit.

    Args:
        num_ranks: ranks that are there.
        is_short: a few runs only.
        without: what these machines cannot run, by what it would show, and why.

    Raises:
        ConfigError: so few ranks make no stages of different sizes.

    >>> choice = choose(3, is_short=True, without={})
    >>> [run.layout for run in choice.runs if run.role == "list"], len(choice.runs)
    (['1,2', '2,1', '1,2', '1,2', '1,2'], 9)
    >>> choose(3, is_short=False, without={}).left_out["unequal replicas"]
    'needs 4 ranks'
    """
    if num_ranks < LEAST_RANKS:
        raise ConfigError(
            f"{num_ranks} rank{'s'[: num_ranks != 1]}; stages of different sizes need {LEAST_RANKS}, as 1,2 does; "
            "start certify on more devices, or give --ranks"
        )
    runs: list[CertifiedRun] = []
    left_out = dict(without)
    for shows, lists, flags, training in _rows():
        words = [_words(training, flags, "--vtp-size-list", each) for each in lists]
        fitting = [each for each in words if ranks_of(each) <= num_ranks]
        if is_short and shows not in _SHORT:
            left_out.setdefault(shows, "--short leaves it out")
        elif not fitting:
            left_out.setdefault(shows, f"needs {min(map(ranks_of, words))} ranks")
        elif shows not in without:
            runs += _runs_of(shows, fitting[0], training)
    trainings = dict.fromkeys(run.training for run in runs if run.role == "list")
    starts = {_start_of(each): _start_run(_words(each, _UNIFORM), each) for each in reversed(trainings)}
    references = [_uniform_run(_words(each, _UNIFORM), each, seed=seed) for each in trainings for seed in (0, *SEEDS)]
    return Choice(runs=(*reversed(starts.values()), *references, *runs), left_out=left_out)


def _words(*flags: str) -> list[str]:
    return " ".join((_MODEL, *flags)).split()


def _start_of(training: str) -> str:
    """Name the start weights of a training: those of the same model."""
    return "experts" if _EXPERTS in training else "dense"


def _runs_of(shows: str, words: Sequence[str], training: str) -> list[CertifiedRun]:
    run = _list_run(shows, words, training)
    if shows == "a rank dies":
        return [replace(run, killed_rank=1)]
    if shows != "saved and loaded":
        return [run]
    before = _list_run(shows, _words(training, "--vtp-size-list 1,2"), training, 1, _SAVE % "first")
    after = _alike(words, NUM_STEPS, f"--load {FOLDER}/first")
    later = replace(run, words=after, num_steps=NUM_STEPS - 1, is_later=True)
    return [replace(before, role="start"), later]


def choose_for_script(words: Sequence[str], num_ranks: int) -> Choice:
    """Choose the runs of a user's script: its list, and stages of one size as many as the list has.

    Args:
        words: its flags.
        num_ranks: ranks that are there.

    Raises:
        ConfigError: there is no list, or it needs more ranks.

    >>> choice = choose_for_script(["--vtp-size-list", "1,2"], 3)
    >>> [(run.role, run.layout) for run in choice.runs][-2:], choice.left_out
    ([('again', 'TP 1'), ('list', '1,2')], {'TP 2': 'needs 4 ranks'})
    """
    sizes = sizes_of(words)
    if not sizes:
        raise ConfigError(
            "the script's flags have no --vtp-size-list; certify compares a list with equal stages; give one"
        )
    if num_ranks < (needed := ranks_of(words)):
        small = ",".join(["1"] * (len(sizes) - 1) + ["2"])
        least = max(len(sizes) + 1, LEAST_RANKS)
        which = f"{small} fits" if num_ranks >= least else f"{small} needs {least}"
        raise ConfigError(
            f"--vtp-size-list {','.join(map(str, sizes))} needs {needed} ranks, and {num_ranks} are there; {which}; "
            "give --ranks, or smaller sizes"
        )
    references = [_uniform_run(words, seed=seed) for seed in (0, *SEEDS)]
    others = [_uniform_run(words, role="uniform", size=size) for size in sorted({*sizes} - {1})]
    runs = [_start_run(words), *references, _uniform_run(words, role="again"), *others, _list_run("the list", words)]
    return Choice(
        runs=tuple(run for run in runs if run.num_ranks <= num_ranks),
        left_out={run.layout: f"needs {run.num_ranks} ranks" for run in others if run.num_ranks > num_ranks},
    )


def sizes_of(words: Sequence[str], name: str = "--vtp-size-list") -> tuple[int, ...]:
    """Read a list of sizes from flags; the last one counts.

    Raises:
        ConfigError: it is no list of numbers.

    >>> sizes_of(["--vtp-size-list", "1,2"]), sizes_of(["--vtp-size-list=4"]), sizes_of([])
    ((1, 2), (4,), ())
    """
    text = _value_of(words, name)
    try:
        return tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        raise ConfigError(f"{name} {text} is no list of sizes; write them with commas, as 1,2") from None


def ranks_of(words: Sequence[str]) -> int:
    """Tell how many ranks a list takes.

    >>> ranks_of("--vtp-size-list 2,1 --vtp-dp-list 1,2".split())
    4
    """
    sizes = sizes_of(words)
    lists = [sizes_of(words, f"--vtp-{name}-list") or (1,) * len(sizes) for name in ("dp", "cp")]
    return sum(tp * dp * cp for tp, dp, cp in zip(sizes, *lists, strict=False))


def _value_of(words: Sequence[str], name: str) -> str:
    found = [i for i, word in enumerate(words) if _name(word) == name]
    return (words[found[-1]].partition("=")[2] or "".join(words[found[-1] + 1 : found[-1] + 2])) if found else ""


def _name(word: str) -> str:
    return word.partition("=")[0]


def _without(words: Sequence[str], is_dropped: Callable[[str], bool]) -> list[str]:
    """Leave out flags, and the values behind them."""
    kept: list[str] = []
    drops = False
    for word in words:
        drops = is_dropped(_name(word)) if word.startswith("--") else drops
        kept += [] if drops else [word]
    return kept


def _alike(words: Sequence[str], num_steps: int, *more: str, size: int = 0) -> tuple[str, ...]:
    """Add what makes runs alike, with as much padding of the vocabulary as any of them needs.

    Args:
        words: flags with a list.
        num_steps: after which the run ends.
        more: further flags.
        size: of all stages of a uniform run, whose flags stand in the place of the list's; 0 leaves the list.
    """
    sizes = sizes_of(words)
    multiple = int(_value_of(words, "--make-vocab-size-divisible-by") or 128) * math.lcm(*sizes)
    padding = f"--make-vocab-size-divisible-by {multiple // (size or math.lcm(sizes[0], sizes[-1]))}"
    kept = _without(words, _SAVES.split().__contains__)
    if size:
        has_lora = any(word.startswith(_LORA) for word in kept)
        kept = _without(
            kept, lambda name: name in _LAYOUT.split() or (name.startswith("--vtp-") and not _is_kept(name))
        )
        equal = f"--tensor-model-parallel-size {size} --pipeline-model-parallel-size {len(sizes)}"
        padding += f" --vtp-size-list {','.join([str(size)] * len(sizes))}" if has_lora else f" {equal}"
    flags = " ".join((_ALIKE, f"--exit-interval {num_steps}", padding, *more))
    return (*kept, *flags.split())


def _is_kept(name: str) -> bool:
    return name in ("--vtp-device", "--vtp-timeout-s") or name.startswith(_LORA)


def _start_run(words: Sequence[str], training: str = "") -> CertifiedRun:
    """Give the run that makes and saves the start weights: those after one step, in which it draws them."""
    own = _without(words, lambda name: name.startswith(_LORA))
    run, start = _uniform_run(words, training, role="start"), _start_of(training)
    save = f"{_SAVE} --no-save-optim --no-save-rng" % f"start-{start}"
    return replace(run, words=_alike(own, 1, save, size=1), num_steps=1)


def _uniform_run(
    words: Sequence[str], training: str = "", *, seed: int = 0, role: Role = "reference", size: int = 1
) -> CertifiedRun:
    return CertifiedRun(
        shows=role,
        layout=f"TP {size}",
        num_ranks=size * len(sizes_of(words)),
        words=_alike(words, NUM_STEPS, _START % _start_of(training), size=size),
        role=role,
        training=training,
        seed=seed,
    )


def _list_run(
    shows: str, words: Sequence[str], training: str = "", num_steps: int = NUM_STEPS, *more: str
) -> CertifiedRun:
    dp = sizes_of(words, "--vtp-dp-list")
    return CertifiedRun(
        shows=shows,
        layout=_value_of(words, "--vtp-size-list") + f" dp {_value_of(words, '--vtp-dp-list')}" * bool(dp),
        num_ranks=ranks_of(words),
        words=_alike(words, num_steps, _START % _start_of(training), *more),
        training=training,
        num_steps=num_steps,
        num_replicas=dp[0 if "--layerwise-disaggregated-training" in words else -1] if dp else 1,
        is_traced=len({*sizes_of(words)}) > 1,
        cuts_samples=max(sizes_of(words, "--vtp-cp-list") + sizes_of(words, "--context-parallel-size"), default=1) > 1,
    )
