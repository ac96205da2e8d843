"""Options of every model: weights, dropout, recomputation."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.evidence import OPTIONS, PARITY
from vtp_plugin.host.rules.table.rule import OptionRule, above, case, given, off, on, refused, supported, warned

_TIED = "tests/multiproc/training/test_tied_embeddings.py::test_ends_are_equal_to_the_last_bit"


def _recomputes_biases(args: object, _context: OptionContext) -> bool:
    """Tell whether feed-forward layers that return their bias are recomputed."""
    is_selective = getattr(args, "recompute_granularity", None) == "selective" or getattr(
        args, "recompute_activations", False
    )
    return bool(
        is_selective
        and "mlp" in (getattr(args, "recompute_modules", None) or ())
        and getattr(args, "add_bias_linear", False)
    )


MODEL_RULES: tuple[OptionRule, ...] = (
    *supported(
        "the plugin copies and sums the tied weight between stages of different sizes",
        _TIED,
        case("without --untie-embeddings-and-output-weights", off, "untie_embeddings_and_output_weights"),
    ),
    *supported("the stages share no weight", PARITY, "--untie-embeddings-and-output-weights"),
    *supported(
        "it makes the initial weights independent of the sizes when stages and chunks are the same",
        PARITY,
        "--use-cpu-initialization",
    ),
    *warned(
        "every rank draws masks for what it holds, so the run repeats none of other sizes",
        "tests/multiproc/options/test_options.py::test_dropout_repeats_itself",
        "set it to 0 for runs that are compared",
        case("--hidden-dropout", above(0)),
        case("--attention-dropout", above(0)),
    ),
    *supported("activations are recomputed inside the stage", OPTIONS, case("--recompute-granularity", given)),
    *refused(
        "Megatron's layer returns its bias through CheckpointFunction, whose backward pass then calls itself without "
        "end, with any sizes",
        replace(
            case("--recompute-modules mlp without --disable-bias-linear", on, "recompute_modules"),
            applies=_recomputes_biases,
        ),
        way_out="add --disable-bias-linear, or recompute other modules",
    ),
)
