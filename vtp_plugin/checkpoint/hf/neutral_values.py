"""What must not be given beside a published model: options that change what it computes, whatever its shapes say.

A test tries every option of Megatron about the model and its experts: it is here, or logits stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Value = int | float | str | bool | None
_SWITCHES: Final = (
    *("--rotary-interleaved", "--qk-l2-norm", "--apply-layernorm-1p", "--apply-residual-connection-post-layernorm"),
    *("--squared-relu", "--quick-geglu", "--openai-gelu", "--use-mup"),
)
_EXPERT_SWITCHES: Final = ("--moe-router-force-load-balancing", "--moe-apply-probs-on-input")
_TEXT, _SEEING, _PROJECTOR = "text_decoder.", "image_encoder.vision_encoder.", "image_encoder.vision_projector."


@dataclass(frozen=True, slots=True)
class Neutral:
    """A flag of Megatron, or an entry of MindSpeed-MM's JSON file by its path, with the values that change nothing.

    Attributes:
        flag: name of the flag, or path of the entry.
        values: first what is so where nobody gives it, False of a switch; then what computes the same.
        has_weights: whether other values add weights to the model, which an import does not have.
    """

    flag: str
    values: tuple[Value, ...] = (None,)
    has_weights: bool = False


FLAGS: Final = (
    *(Neutral(flag, (False,)) for flag in _SWITCHES),
    Neutral("--rotary-percent", (1.0,)),
    Neutral("--rotary-seq-len-interpolation-factor", (None, 1)),
    Neutral("--no-rope-freq", (None, 0)),
    Neutral("--window-size"),
    Neutral("--glu-linear-offset", (0.0,)),
    Neutral("--activation-func-clamp-value"),
    Neutral("--softmax-type", ("vanilla",), has_weights=True),
    Neutral("--attention-output-gate", (False,), has_weights=True),
    Neutral("--multi-latent-attention", (False,), has_weights=True),
    Neutral("--experimental-attention-variant", has_weights=True),
    Neutral("--heterogeneous-layers-config-path", has_weights=True),
    Neutral("--mtp-num-layers", (None, 0), has_weights=True),
)
"""Of every family."""
DENSE_FLAGS: Final = (Neutral("--num-experts", has_weights=True),)
"""Of families without experts, besides."""
EXPERT_FLAGS: Final = (
    *(Neutral(flag, (False,)) for flag in _EXPERT_SWITCHES),
    Neutral("--moe-router-score-function", ("softmax",)),
    Neutral("--moe-router-topk-scaling-factor", (None, 1.0)),
    Neutral("--moe-router-group-topk"),
    # The others weigh a loss, and choose the experts alike.
    Neutral("--moe-router-load-balancing-type", ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")),
    Neutral("--moe-router-force-biased"),
    Neutral("--moe-input-jitter-eps", (None, 0.0)),
    Neutral("--moe-expert-capacity-factor"),
    Neutral("--moe-mlp-glu-interleave-size"),
    Neutral("--moe-layer-freq", (1,), has_weights=True),
    Neutral("--moe-router-enable-expert-bias", (False,), has_weights=True),
    Neutral("--moe-shared-expert-intermediate-size", has_weights=True),
    Neutral("--moe-latent-size", has_weights=True),
)
"""Of families with experts, besides."""
ENTRIES: Final = (
    Neutral(f"{_TEXT}position_embedding_type", ("mrope",)),
    Neutral(f"{_TEXT}rope_scaling.type", ("mrope", "default")),
    Neutral(f"{_TEXT}rope_scaling.factor", (1.0,)),
    Neutral(f"{_TEXT}rotary_interleaved", (False,)),
    Neutral(f"{_TEXT}window_size"),
    Neutral(f"{_TEXT}softmax_scale"),
    Neutral(f"{_TEXT}activation_func", ("silu",)),
    Neutral(f"{_TEXT}layernorm_zero_centered_gamma", (False,)),
    Neutral(f"{_TEXT}apply_residual_connection_post_layernorm", (False,)),
    Neutral(f"{_SEEING}activation_func", ("silu",)),
    Neutral(f"{_SEEING}layernorm_epsilon", (1e-6,)),
    Neutral(f"{_PROJECTOR}activation_func", ("gelu",)),
    Neutral(f"{_PROJECTOR}layernorm_epsilon", (1e-6,)),
)
"""Of a model that sees pictures, instead."""
_SAID = (
    *("--rotary-base", "--use-rope-scaling", "--rope-scaling-factor", "--norm-epsilon", "--moe-router-topk"),
    *("--moe-router-pre-softmax", f"{_TEXT}rope_theta", f"{_TEXT}layernorm_epsilon", f"{_TEXT}mrope_section"),
)
OF_FUNCTION: Final = frozenset(
    {*_SAID, *(each.flag for each in (*FLAGS, *EXPERT_FLAGS, *ENTRIES) if not each.has_weights)}
)
"""All that changes what is computed and no weight's shape, with what a model's config says of it."""
