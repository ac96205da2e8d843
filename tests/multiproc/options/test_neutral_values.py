"""Every option of the model and of its experts is refused beside an import, or leaves logits as they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.expected.of_megatron import megatron_parser
from tests.options.judged import Judgement, groups, problems, rows
from tests.options.parsers import Option, by_name, options_of
from tests.support.pool import Pool
from vtp_plugin.checkpoint.hf.hf_model import HFModel, contradictions, expected_settings
from vtp_plugin.plan.model.gpt_model import Experts

pytestmark = pytest.mark.needs("scripts_here")
_SHAPES = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels")
NO_FUNCTION = {
    **dict.fromkeys((*_SHAPES, "--encoder-num-layers", "--num-query-groups", "--q-lora-rank"), "shapes"),
    **dict.fromkeys(("--seq-length", "--encoder-seq-length", "--max-position-embeddings"), "lengths"),
    **dict.fromkeys(("--init-method-std", "--embedding-init-method-std"), "start weights"),
    **dict.fromkeys(("--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"), "latent attention"),
    **dict.fromkeys(("--rope-type", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim"), "latent attention"),
    **dict.fromkeys(("--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow"), "of yarn"),
    "--heterogeneous-layers-config-encoded-json": "beside a path, which is refused",
    **dict.fromkeys(("--vocab-size", "--padded-vocab-size", "--make-vocab-size-divisible-by"), "shapes"),
    **dict.fromkeys(("--relative-attention-num-buckets", "--relative-attention-max-distance"), "of T5"),
    "--recompute-num-layers": "the same, again",
    "--cross-entropy-fusion-impl": "of the loss",
    "--moe-use-upcycling": "of a dense checkpoint",
    "--moe-token-dispatcher-type": "how tokens move",
}
"""Options that need no try, and why: other shapes do not load, others belong to what is refused."""
JOB = "tests.multiproc.jobs.function_job:compare"
_LEFT_OUT = (Judgement.ENDS, Judgement.REFUSED, Judgement.DEVICE, Judgement.NONE)
_SIZES = {"num_layers": 2, "hidden": 16, "heads": 4, "groups": 2, "kv_channels": 4, "ffn": 24, "vocab": 32}
MODELS = {
    name: HFModel(
        family=name,
        max_positions=12,
        epsilon=1e-5,
        rotary_base=10000,
        experts=experts,
        topk=2,
        **_SIZES,  # type: ignore[arg-type]
    )
    for name, experts in {
        "dense": None,
        "experts": Experts(number=4, ffn=24, shared_ffn=0, layers=(True, True)),
    }.items()
}


@cache
def _actions() -> dict[str, Any]:
    return _parser()._option_string_actions


@cache
def _parser() -> Any:
    return megatron_parser()


def _flags(name: str) -> list[str]:
    wanted = expected_settings(MODELS[name])
    return [word for each in wanted if each.is_given for word in each.text.split()]


def _is_refused(name: str, flags: list[str]) -> bool:
    try:
        read = vars(_parser().parse_args([*_flags(name), *flags]))
    except SystemExit:
        pytest.fail(f"{' '.join(flags)}: no value to try; say one in the verdicts, or why none in NO_FUNCTION")
    return any(contradictions(expected_settings(MODELS[name]), read))


def _tries(known: dict[str, Option]) -> Iterator[tuple[str, list[str]]]:
    """Yield the model and the option with a value, for what is judged of models and experts."""
    for group in groups():
        if group.subject not in ("Model", "Experts") or group.judgement in _LEFT_OUT:
            continue
        name = "experts" if group.subject == "Experts" else "dense"
        for entry in (entry for entry in group.entries if entry.option in known and entry.option not in NO_FUNCTION):
            choices = known[entry.option].choices
            words = [word for word in entry.words if not choices or word in choices]
            yield from ((name, [entry.option, word]) for word in words)
            if not entry.words and _actions()[entry.option].nargs == 0:
                yield name, [entry.option]


def test_options_beside_an_import(pool: Pool) -> None:
    """Those of another section change no function of a model; a line names an option that nobody has judged."""
    options = options_of(megatron_parser())
    assert problems(options, groups(), rows()) == []
    besides = (["--num-experts", "4"], ["--window-size", "6,0"])
    tries = [*_tries(dict(by_name(options))), *(("dense", flags) for flags in besides if flags[0] in _actions())]
    left = [(name, flags) for name, flags in tries if not _is_refused(name, flags)]
    found = pool.run(1, JOB, {"bases": {name: _flags(name) for name in MODELS}, "cases": left})
    changed = [
        f"{' '.join(flags)}: differs" for (_, flags), said in zip(left, found[0], strict=True) if said == "differs"
    ]
    assert changed == []
    assert sum(said == "same" for said in found[0]) >= 10, found
