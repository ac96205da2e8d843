"""Options of the model."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.rule import (
    OptionContext,
    OptionRule,
    above,
    case,
    given,
    on,
    only,
    refused,
    refused_unequal,
    warned,
    warned_uniform,
)


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
    *warned(
        "every rank draws masks for what it holds, so the run repeats none of other sizes",
        "tests/multiproc/options/test_options.py::test_dropout_repeats_itself",
        "set it to 0 for runs that are compared",
        case("--hidden-dropout", above(0)),
        case("--attention-dropout", above(0)),
    ),
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


_RULES: tuple[OptionRule, ...] = (
    *refused_unequal(
        "fully sharded data parallelism makes its device mesh from one tensor-parallel size (Megatron 0.12)",
        "--use-custom-fsdp",
        way_out="use --use-distributed-optimizer or give every stage the same size",
    ),
    *refused_unequal(
        "it puts the layers of an encoder on ranks of their own, for one tensor-parallel size (Megatron 0.12)",
        case("--encoder-tensor-model-parallel-size"),
        case("--encoder-pipeline-model-parallel-size"),
        case("--pipeline-model-parallel-split-rank", given),
    ),
    *refused_unequal(
        "these models have a pipeline and checkpoints of their own (Megatron 0.12)",
        "--use-legacy-models",
        "--retro-add-retriever",
        case("--retro-project-dir", given),
        way_out="leave it out: use the models of megatron.core",
    ),
    *refused_unequal(
        "it stores one regular grid of shards for each weight (Megatron 0.12)",
        "--ckpt-format zarr",
        way_out="use --ckpt-format torch_dist",
    ),
)

OLDER_RULES = tuple(replace(rule, versions=("<0.19",)) for rule in _RULES)


def _cannot_store_prediction(args: object, context: OptionContext) -> bool:
    """Tell whether the chunk with the loss predicts and shares its word embedding with a chunk before it."""
    return bool(
        context.num_stages > 1
        and getattr(args, "mtp_num_layers", None)
        and not getattr(args, "untie_embeddings_and_output_weights", False)
        and getattr(args, "pipeline_model_parallel_layout", None) is None
        and getattr(args, "ckpt_format", "torch_dist") != "torch"
        and (getattr(args, "save", None) or getattr(args, "load", None))
    )


def _predicts_in_groups(args: object, _context: OptionContext) -> bool:
    """Tell whether layers of multi-token prediction are to be recomputed in groups of more than one."""
    return bool(
        getattr(args, "mtp_num_layers", None)
        and getattr(args, "recompute_granularity", None) == "full"
        and getattr(args, "recompute_method", None) == "uniform"
        and (getattr(args, "recompute_num_layers", None) or 1) > 1
    )


def _cuts_heads(_args: object, context: OptionContext) -> bool:
    """Tell whether some ranks share the heads of a layer."""
    return max(context.tp_sizes, default=1) > 1


def _adds_up_by_heads(args: object, context: OptionContext) -> bool:
    """Tell whether ranks that share heads sum gradients otherwise than one; with Transformer Engine slices do not."""
    has_engine = getattr(args, "transformer_impl", None) == "transformer_engine" and context.device != "cpu"
    return _cuts_heads(args, context) and not (has_engine and getattr(args, "sequence_parallel", False))


def _has_layers_without_file(args: object, _context: OptionContext) -> bool:
    """Tell whether the layers of a model are given by a text alone."""
    text = getattr(args, "heterogeneous_layers_config_encoded_json", None)
    return text is not None and getattr(args, "heterogeneous_layers_config_path", None) is None


ARCHITECTURE_RULES: tuple[OptionRule, ...] = (
    *refused(
        "Megatron's sharded_state_dict asserts that the last chunk has no output layer, with any sizes, and it has one",
        replace(
            case("--save or --load with --mtp-num-layers and a tied embedding", given, "save"),
            applies=_cannot_store_prediction,
        ),
        way_out="add --untie-embeddings-and-output-weights",
    ),
    *refused(
        "from Megatron 0.16 on, a layer of multi-token prediction asserts that groups have one layer, with any sizes",
        replace(
            case("--recompute-num-layers above 1 with --recompute-method uniform and --mtp-num-layers", above(1)),
            applies=_predicts_in_groups,
        ),
        way_out="use --recompute-num-layers 1, or --recompute-method block",
    ),
    *refused_unequal(
        "logging its indexer loss sums over the pipeline group, which hangs between stages of different sizes",
        "--experimental-attention-variant dsa",
    ),
    *refused_unequal(
        "GatedDeltaNet draws and cuts its weights by the tensor-parallel size, and stock ends with 'Experimental GPT "
        "decoder block spec only supports transformer engine implementation for now' or 'FLA is not installed'",
        "--experimental-attention-variant gated_delta_net",
    ),
    *warned_uniform(
        "Megatron leaves out of the gradient of the keys' positional part what comes from other ranks' heads, and adds "
        "up that of normed queries, of which each rank has all, so both depend on the tensor-parallel size",
        "tests/multiproc/training/test_attention.py::test_latent_attention_of_megatron_depends_on_the_size",
        "compare with runs of this size only, or with stages of different sizes, which have the gradients of one rank",
        only("--multi-latent-attention", _adds_up_by_heads),
    ),
    *warned_uniform(
        "Megatron draws the same sinks for the heads of all ranks of a stage, and norms, clipping and numbers of zeros "
        "leave out those of all ranks but one, so they depend on the tensor-parallel size",
        "tests/multiproc/training/test_attention.py::test_sinks_of_megatron_depend_on_the_size",
        "compare with runs of this size only, or with stages of different sizes, which start and count as one rank",
        only("--softmax-type learnable", _cuts_heads),
    ),
    *refused_unequal(
        "MambaMixer draws and cuts its weights by the tensor-parallel size, and stock ends with 'MambaSSM is not "
        "installed' or, without Mamba layers, in HybridStack with 'Transformer Engine is not installed'",
        "--is-hybrid-model",
        case("--hybrid-layer-pattern", given),
        case("--hybrid-override-pattern", given),
    ),
    *warned(
        "Megatron compares the sizes of the model with it and ignores those of single layers, so all layers are alike",
        "tests/multiproc/options/test_options.py::test_layers_that_are_ignored",
        "give --heterogeneous-layers-config-path",
        replace(
            case(
                "--heterogeneous-layers-config-encoded-json without a path",
                attribute="heterogeneous_layers_config_encoded_json",
            ),
            applies=_has_layers_without_file,
        ),
    ),
    *refused_unequal(
        "only decoder models such as GPT have been made to work with stages of different sizes",
        case("--decoder-num-layers", given),
        case("--decoder-seq-length", given),
        "--vision-pretraining",
        case("--bert-load", given),
        case("--ict-load", given),
        case("--biencoder-projection-dim", above(0)),
        "--tokenizer-type BertWordPieceLowerCase",
        "--tokenizer-type BertWordPieceCase",
        "--tokenizer-type MultimodalTokenizer",
        "--tokenizer-type NullMultimodalTokenizer",
        way_out="train a decoder model or give every stage the same size",
    ),
)
