"""Whether adapters (LoRA) fit the model and the stages."""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.host.versions.known_versions import capability
from vtp_plugin.plan.model.lora import EXPERTS, Lora, matrices_of, published_matrices


def check_version(lora: Lora | None, version: str) -> Iterator[str]:
    """Yield a line if adapters were never run with a version of Megatron.

    >>> [*check_version(Lora(rank=2, alpha=2, targets=()), "0.16.1")]
    ['--vtp-lora-rank 2 with megatron-core 0.16.1; adapters were run with 0.19 only; use that, or leave it out']
    """
    if lora is not None and not capability("adapters").has(version):
        yield (
            f"--vtp-lora-rank {lora.rank} with megatron-core {version}; adapters were run with 0.19 only; use that, or "
            "leave it out"
        )


def check_adapters(args: object, context: OptionContext) -> Iterator[str]:
    """Yield a line for each thing that the model does not have, or that a stage cannot cut.

    Args:
        args: Megatron's arguments.
        context: the run; without adapters there is nothing to check.

    >>> from types import SimpleNamespace
    >>> lora = Lora(rank=2, alpha=2, targets=("q_proj",), layers=((0, 9),))
    >>> args = SimpleNamespace(num_layers=4, num_attention_heads=8, num_query_groups=2, group_query_attention=True)
    >>> for line in check_adapters(args, OptionContext(tp_sizes=(1, 4), lora=lora)):
    ...     print(line)
    --vtp-lora-layers ends at 9; the model has 4 layers; give numbers of at most 4
    --num-query-groups 2 with stages of tp 1,4; ranks would share keys, of which adapters cannot be cut; give stages \
of sizes that divide 2
    """
    lora = context.lora
    if lora is None:
        return
    num_layers = getattr(args, "num_layers", None) or 0
    ends = [end for _, end in lora.layers]
    if max(ends, default=0) > num_layers:
        yield (
            f"--vtp-lora-layers ends at {max(ends)}; the model has {num_layers} layers; give numbers of at most "
            f"{num_layers}"
        )
    known = vars(args)
    model = matrices_of(known)
    kinds = [model, *([matrices_of(known, has_experts=True)] if known.get("num_experts") else [])]
    matrices = [each for kind in kinds for each in published_matrices(kind)]
    held = {name for each in matrices for name in (each.published, each.linear)}
    if others := [name for name in lora.named if name not in held]:
        yield (
            f"--vtp-lora-targets {' '.join(others)}; no stage of this model holds such a layer; leave it out, or name "
            f"some of {', '.join(dict.fromkeys(each.published for each in matrices))}"
        )
    if lora.dropout and known.get("num_experts") and lora.reaches(EXPERTS):
        yield (
            f"--vtp-lora-dropout {lora.dropout} with adapters of experts; ranks have other tokens for them, so no mask "
            "can be the same for all sizes; leave it out, or adapt the attention alone"
        )
    groups = known.get("num_query_groups")
    is_grouped = known.get("group_query_attention") and not model.is_latent
    if is_grouped and groups and any(groups % size for size in context.tp_sizes):
        yield (
            f"--num-query-groups {groups} with stages of tp {','.join(map(str, context.tp_sizes))}; ranks would share "
            f"keys, of which adapters cannot be cut; give stages of sizes that divide {groups}"
        )
