"""The table: which Megatron options work with stages of different sizes, which are refused, and why.

Each row was decided by reading Megatron (0.19.2), and a supported one by a test as well:

* An option that derives everything from this rank's groups is supported, and names the test that shows it.
* An option that no test here can run, because it needs CUDA or a package that is not installed, is supported only if it
  touches no group, or only groups inside a stage or of the whole world. Its evidence is ``not run: ...``.
* Everything else is refused: a refusal is better than a run that may hang, or be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vtp_plugin.host.rules.context import OptionContext
from vtp_plugin.host.rules.table.rule import (
    OptionRule,
    Test,
    above,
    case,
    given,
    off,
    on,
    refused,
    refused_planned,
    refused_u_shaped,
    refused_unequal,
    refused_unequal_dp,
    supported,
    warned,
    warned_uniform,
)
from vtp_plugin.host.versions import capability, is_in

_PARITY = "tests/multiproc/test_parity.py::test_parity"
_SEQUENCE = "tests/multiproc/test_parity.py::test_sequence_parallelism"
_CONTEXT = "tests/multiproc/test_parity.py::test_context_parallelism"
_TIED = "tests/multiproc/test_tied_embeddings.py::test_ends_are_equal_to_the_last_bit"
_CLIPPING = "tests/multiproc/test_optimizer.py::test_inf_on_a_rank_that_leads_nothing"
_CHECKPOINT = "tests/multiproc/test_checkpoint.py::test_save_and_resume"
_RESHARD = "tests/multiproc/test_checkpoint.py::test_load_into_another_list"
_DATA = "tests/multiproc/test_parity.py::test_only_leaders_of_first_and_last_stage_read_data"
_EXPERTS = "tests/multiproc/test_experts.py::test_experts"
_OPTIONS = "tests/multiproc/test_options.py::test_supported_option"
_GROWING = "tests/multiproc/test_growing_batches.py::test_batches_that_grow"
_DEVICE = "tests/device/test_options.py"
_ENGINE = f"{_DEVICE}::test_option_that_needs_transformer_engine"  # run on one GPU, docs/gpus.md
_NEEDS_ENGINE = f"not run: needs CUDA and Transformer Engine, {_DEVICE} does it"


def _engine_on_cpu(args: object, context: OptionContext) -> bool:
    """Tell whether a run on CPUs asks for Transformer Engine; its row is the only one that looks at the device."""
    return context.device == "cpu" and getattr(args, "transformer_impl", None) == "transformer_engine"


def _drops_without_experts(args: object, _context: OptionContext) -> bool:
    """Tell whether experts are given a capacity in a model that has none."""
    return getattr(args, "moe_expert_capacity_factor", None) is not None and not getattr(args, "num_experts", None)


def _only(option: str, test: Callable[[object, OptionContext], bool], is_used: Test | None = None) -> OptionRule:
    """Start a row of an option that has an effect only in some runs."""
    rule = case(option, is_used)
    return replace(rule, applies=lambda args, context: rule.applies(args, context) and test(args, context))


def _has_experts(args: object, _context: OptionContext) -> bool:
    """Tell whether there are routers; a model's configuration has another name for the number of experts."""
    return bool(getattr(args, "num_experts", None) or getattr(args, "num_moe_experts", None))


def _has_capacity(args: object, context: OptionContext) -> bool:
    """Tell whether a factor limits what experts take; to Megatron one below 0 is none."""
    factor = getattr(args, "moe_expert_capacity_factor", None)
    return _has_experts(args, context) and isinstance(factor, (int, float)) and factor >= 0


def _divides_dense_layers(args: object, _context: OptionContext) -> bool:
    """Tell whether each dense layer becomes several experts."""
    return bool(getattr(args, "moe_use_upcycling", False)) and above(1)(getattr(args, "moe_upcycling_granularity", 1))


def _evaluates_otherwise(args: object, context: OptionContext) -> bool:
    """Tell whether ranks that read nothing will wait for microbatches of another size than those of training."""
    size = getattr(args, "eval_micro_batch_size", None)
    return bool(
        size
        and getattr(args, "eval_iters", None)
        and size != getattr(args, "micro_batch_size", None)
        and max(context.tp_sizes, default=1) > 1
    )


def _has_layers_without_file(args: object, _context: OptionContext) -> bool:
    """Tell whether the layers of a model are given by a text alone."""
    text = getattr(args, "heterogeneous_layers_config_encoded_json", None)
    return text is not None and getattr(args, "heterogeneous_layers_config_path", None) is None


def _cuts_tokens(_args: object, context: OptionContext) -> bool:
    """Tell whether some ranks share the tokens of a microbatch."""
    return max((*context.tp_sizes, *context.cp_sizes), default=1) > 1


def _cuts_heads(_args: object, context: OptionContext) -> bool:
    """Tell whether some ranks share the heads of a layer."""
    return max(context.tp_sizes, default=1) > 1


def _adds_up_by_heads(args: object, context: OptionContext) -> bool:
    """Tell whether ranks that share heads sum gradients otherwise than one; with Transformer Engine slices do not."""
    has_engine = getattr(args, "transformer_impl", None) == "transformer_engine" and context.device != "cpu"
    return _cuts_heads(args, context) and not (has_engine and getattr(args, "sequence_parallel", False))


def _scales_losses(args: object) -> bool:
    """Tell whether loss scales follow overflows."""
    return bool(getattr(args, "fp16", False)) and not getattr(args, "loss_scale", None)


def _scales_experts_apart(args: object, context: OptionContext) -> bool:
    """Tell whether experts have groups, and so an optimizer and a loss scale, of their own."""
    has_parts = max((getattr(args, "expert_model_parallel_size", None) or 1, *context.ep_sizes)) > 1
    # Before Megatron 0.19 other sizes alone made no such groups.
    is_known = not context.version or is_in(context.version, ">=0.19")
    has_sizes = is_known and any(etp != tp for etp, tp in zip(context.etp_sizes, context.tp_sizes, strict=False))
    return _scales_losses(args) and _has_experts(args, context) and (has_parts or has_sizes)


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
    """Tell whether layers of multi-token prediction are to be computed again in groups of more than one."""
    return bool(
        getattr(args, "mtp_num_layers", None)
        and getattr(args, "recompute_granularity", None) == "full"
        and getattr(args, "recompute_method", None) == "uniform"
        and (getattr(args, "recompute_num_layers", None) or 1) > 1
    )


def _recomputes_biases(args: object, _context: OptionContext) -> bool:
    """Tell whether feed-forward layers that return their bias are computed again."""
    is_selective = getattr(args, "recompute_granularity", None) == "selective" or getattr(
        args, "recompute_activations", False
    )
    return bool(
        is_selective
        and "mlp" in (getattr(args, "recompute_modules", None) or ())
        and getattr(args, "add_bias_linear", False)
    )


def _balances_by(kind: str) -> Test:
    """Make a test for a loss of the routers; newer Megatrons take several kinds at once."""
    return lambda value: value == kind or (isinstance(value, list) and kind in value)


def _scales_over_replicas(args: object, _context: OptionContext) -> bool:
    """Tell whether Transformer Engine looks for scaling factors among all replicas, inside every compute."""
    is_used = getattr(args, "fp8", None) or getattr(args, "fp4", None)
    return bool(is_used) and getattr(args, "fp8_recipe", None) == "delayed"


RULES: tuple[OptionRule, ...] = (
    # The pipeline: its schedule, layers and rank order.
    *supported(
        "the interleaved schedule asks its communicator for every transfer, the ring's wrap-around included",
        _PARITY,
        case("--num-virtual-stages-per-pipeline-rank", given),
        case("--num-layers-per-virtual-pipeline-stage", given),
        case("--no-overlap-p2p-communication", off, "overlap_p2p_comm"),
    ),
    *supported(
        "the schedule only changes the order of the same transfers, which every rank of a stage issues alike",
        _OPTIONS,
        case("--microbatch-group-size-per-virtual-pipeline-stage", given, "microbatch_group_size_per_vp_stage"),
        case("--overlap-p2p-communication-warmup-flush", on, "overlap_p2p_comm_warmup_flush"),
    ),
    *supported(
        "the layers of a stage follow from its pipeline rank, never from its size",
        _OPTIONS,
        case("--decoder-first-pipeline-num-layers", given),
        case("--decoder-last-pipeline-num-layers", given),
        case("--pipeline-model-parallel-layout", given),
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ),
    *supported("the layout knows both rank orders", _PARITY, "--use-tp-pp-dp-mapping"),
    *refused(
        "the plugin's channels replace Megatron's point-to-point calls and have no ring exchange",
        "--use-ring-exchange-p2p",
    ),
    *refused(
        "the plugin's channels use the backend of the run, not UCC",
        "--pipeline-model-parallel-comm-backend ucc",
        way_out="leave it out or use nccl",
    ),
    *refused("the start-up checks and the channels need real peers", "--fake-process-group"),
    *refused("it leaves out the group creation that gives every stage its size", "--lazy-mpu-init"),
    # Tensor, sequence and context parallelism.
    *supported(
        "boundary plans convert between copies and slices, and each stage's size says which it has",
        _SEQUENCE,
        "--sequence-parallel",
    ),
    *supported(
        "boundaries join the ranks that share a sequence, whatever size each stage has",
        _CONTEXT,
        case("--context-parallel-size", above(1)),
    ),
    *refused(
        "the plugin's group builder does not make the groups of nested context parallelism",
        case("--hierarchical-context-parallel-sizes", given),
        "--hybrid-context-parallel",
        way_out="leave it out and use plain --context-parallel-size",
    ),
    *refused_unequal(
        "Transformer Engine makes its overlap groups from one tensor-parallel size for the whole world",
        "--tp-comm-overlap",
    ),
    *refused_unequal(
        "it asserts a tensor-parallel size above 1, which fails on some stages only", "--distribute-saved-activations"
    ),
    *refused(
        "the plugin's group builder does not make the weight-sharding groups, whose number is tied to one size",
        case("--tensor-parallel-num-weight-shards", given),
        case("--expert-tensor-parallel-num-weight-shards", given),
    ),
    # The model.
    *supported(
        "the plugin copies and sums the tied weight between stages of different sizes",
        _TIED,
        case("without --untie-embeddings-and-output-weights", off, "untie_embeddings_and_output_weights"),
    ),
    *supported("the stages share no weight", _PARITY, "--untie-embeddings-and-output-weights"),
    *supported(
        "it makes the initial weights independent of the sizes when stages and chunks are the same",
        _PARITY,
        "--use-cpu-initialization",
    ),
    *warned(
        "every rank draws masks for what it holds, so the run repeats none of other sizes",
        "tests/multiproc/test_options.py::test_dropout_repeats_itself",
        "set it to 0 for runs that are compared",
        case("--hidden-dropout", above(0)),
        case("--attention-dropout", above(0)),
    ),
    *supported("activations are computed again inside the stage", _OPTIONS, case("--recompute-granularity", given)),
    *refused(
        "Megatron's layer returns its bias through CheckpointFunction, whose backward pass then calls itself without "
        "end, with any sizes",
        replace(
            case("--recompute-modules mlp without --disable-bias-linear", on, "recompute_modules"),
            applies=_recomputes_biases,
        ),
        way_out="add --disable-bias-linear, or recompute other modules",
    ),
    *supported(
        "every stage cuts its experts by its own sizes and sums their gradients over its own copies",
        _EXPERTS,
        "--num-experts",
        case("--expert-model-parallel-size", above(1)),
        case("--expert-tensor-parallel-size", given),
        case("--moe-shared-expert-intermediate-size", given),
        case("--moe-layer-freq", lambda value: value not in (None, 1)),
        "--moe-token-dispatcher-type allgather",
        "--moe-token-dispatcher-type alltoall",
    ),
    *supported(
        "routers balance inside a stage, and their losses count as often as the model's",
        _EXPERTS,
        case("--moe-router-load-balancing-type aux_loss", _balances_by("aux_loss")),
        case("--moe-router-load-balancing-type seq_aux_loss", _balances_by("seq_aux_loss")),
        case("--moe-z-loss-coeff", given),
        "--moe-router-enable-expert-bias",
    ),
    *warned(
        "every rank drops tokens among its own, which the tensor- and context-parallel sizes cut, so a run that drops "
        "some repeats none of other sizes",
        "tests/multiproc/test_experts.py::test_tokens_are_dropped_by_the_ranks",
        "leave it out, or give a factor that drops nothing",
        _only("--moe-expert-capacity-factor", _has_capacity, given),
        _only("--moe-token-drop-policy position", _has_capacity),
        _only("--moe-pad-expert-input-to-capacity", _has_capacity),
    ),
    *warned(
        "every rank draws numbers for the tokens that it routes, so the run repeats none of other sizes",
        "tests/multiproc/test_experts_training.py::test_noise_of_the_routers",
        "leave it out of runs that are compared",
        _only("--moe-input-jitter-eps", _has_experts),
        _only("--moe-router-force-load-balancing", _has_experts),
    ),
    *warned(
        "apply_biased_logits takes random logits, which every rank draws for its own tokens, and adds a bias that all "
        "ranks of a stage share, so the run repeats none of other sizes",
        "tests/multiproc/test_experts_training.py::test_noise_of_the_routers",
        "leave it out of runs that are compared",
        _only("--moe-router-force-biased", _has_experts, given),
    ),
    *refused_unequal(
        "each rank divides its own part of the dense layers, so which neurons form an expert depends on the size",
        replace(case("--moe-upcycling-granularity", above(1)), applies=_divides_dense_layers),
        way_out="use --moe-upcycling-granularity 1, or upcycle in a run whose stages have one size",
    ),
    *warned_uniform(
        "each rank divides its own part of the dense layers, so which neurons form an expert depends on the size",
        "not run: read in _convert_to_moe_state_dict of upcycling_utils.py",
        "upcycle with the tensor-parallel size of the run that is compared",
        replace(case("--moe-upcycling-granularity", above(1)), applies=_divides_dense_layers),
    ),
    *refused(
        "no stage has a layer of experts, and Megatron ignores the capacity without a word",
        replace(
            case("--moe-expert-capacity-factor without --num-experts", given, "moe_expert_capacity_factor"),
            applies=_drops_without_experts,
        ),
        way_out="add --num-experts, or leave it out",
    ),
    *supported(
        "the logits of all ranks that share a microbatch are gathered, and each takes its own tokens",
        "tests/multiproc/test_experts.py::test_tokens_are_shared_out_among_those_of_a_microbatch",
        case("--moe-router-load-balancing-type sinkhorn", _balances_by("sinkhorn")),
    ),
    *warned_uniform(
        "Megatron balances among the tokens of each rank, which the tensor- and context-parallel sizes cut, so the run "
        "repeats none of other sizes",
        "tests/multiproc/test_experts.py::test_megatron_shares_out_the_tokens_of_a_rank",
        "compare with runs of this size only, or with stages of different sizes, which balance as one rank",
        _only("--moe-router-load-balancing-type sinkhorn", _cuts_tokens, _balances_by("sinkhorn")),
    ),
    *supported("experts that are computed together lie on one rank", _NEEDS_ENGINE, "--moe-grouped-gemm"),
    *supported(
        "the losses of the routers are summed inside each stage, then over the stages",
        "tests/multiproc/test_experts_training.py::test_logged_router_losses",
        "--moe-per-layer-logging",
    ),
    *refused_unequal_dp(
        "the global loss is a running average over a stage's microbatches, whose number differs between the stages",
        case("--moe-router-load-balancing-type global_aux_loss", _balances_by("global_aux_loss")),
        way_out="use aux_loss or seq_aux_loss, or give every stage the same data-parallel size",
    ),
    *refused_unequal_dp(
        "which tokens are dropped is decided among those of a replica, whose number differs between the stages",
        _only("--moe-expert-capacity-factor", _has_capacity, given),
    ),
    *refused_unequal(
        "its dispatchers need CUDA (DeepEP, HybridEP), so no test here can run them",
        "--moe-token-dispatcher-type flex",
        way_out="use --moe-token-dispatcher-type alltoall or give every stage the same size",
    ),
    *refused_unequal(
        "its schedule (combined_1f1b) overlaps two microbatches on CUDA streams, so no test here can run it",
        "--overlap-moe-expert-parallel-comm",
    ),
    *supported(
        "the plugin copies and sums the word embedding between all stages that hold it, whatever their sizes",
        "tests/multiproc/test_mtp.py::test_prediction",
        "--mtp-num-layers",
        "--mtp-standalone",
    ),
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
    *supported(
        "heads are cut by each stage's size, and the gradients of what is one for all heads are those of one rank",
        "tests/multiproc/test_attention.py::test_latent_attention",
        "--multi-latent-attention",
    ),
    *warned_uniform(
        "Megatron leaves out of the gradient of the keys' positional part what comes from other ranks' heads, and adds "
        "up that of normed queries, of which each rank has all, so both depend on the tensor-parallel size",
        "tests/multiproc/test_attention.py::test_latent_attention_of_megatron_depends_on_the_size",
        "compare with runs of this size only, or with stages of different sizes, which have the gradients of one rank",
        _only("--multi-latent-attention", _adds_up_by_heads),
    ),
    *supported(
        "sinks are cut by heads, drawn as a whole, and counted on every rank",
        "tests/multiproc/test_attention.py::test_sinks_of_the_softmax",
        "--softmax-type learnable",
    ),
    *warned_uniform(
        "Megatron draws the same sinks for the heads of all ranks of a stage, and norms, clipping and numbers of zeros "
        "leave out those of all ranks but one, so they depend on the tensor-parallel size",
        "tests/multiproc/test_attention.py::test_sinks_of_megatron_depend_on_the_size",
        "compare with runs of this size only, or with stages of different sizes, which start and count as one rank",
        _only("--softmax-type learnable", _cuts_heads),
    ),
    *refused_unequal(
        "MambaMixer draws and cuts its weights by the tensor-parallel size, and stock ends with 'MambaSSM is not "
        "installed' or, without Mamba layers, in HybridStack with 'Transformer Engine is not installed'",
        "--is-hybrid-model",
        case("--hybrid-layer-pattern", given),
        case("--hybrid-override-pattern", given),
    ),
    *supported(
        "the mask of a window depends on positions and on the number of the layer",
        "tests/multiproc/test_attention.py::test_attention",
        case("--window-size", given),
        case("--window-attn-skip-freq", given),
    ),
    *supported(
        "the sizes of every layer in the file are checked against all stages",
        "tests/multiproc/test_options.py::test_layers_of_a_file",
        case("--heterogeneous-layers-config-path", given),
    ),
    *warned(
        "Megatron compares the sizes of the model with it and ignores those of single layers, so all layers are alike",
        "tests/multiproc/test_options.py::test_layers_that_are_ignored",
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
    # Kernels and number formats.
    *refused(
        "Transformer Engine is Megatron's default and has no CPU path",
        replace(case("--transformer-impl transformer_engine on the cpu platform"), applies=_engine_on_cpu),
        way_out="use --transformer-impl local",
    ),
    *supported(
        "its layers take their size from the tensor-parallel group of their stage",
        _NEEDS_ENGINE,
        "--transformer-impl transformer_engine",
    ),
    *supported(
        "its layers take their size from the tensor-parallel group of their stage", _PARITY, "--transformer-impl local"
    ),
    *refused_unequal(
        "these layers are made for inference, which is not supported between unequal stages",
        "--transformer-impl inference_optimized",
        way_out="use --transformer-impl transformer_engine or local",
    ),
    *supported("master weights and scales stay on a rank, found-inf travels on the model group", _CLIPPING, "--fp16"),
    *supported(
        "all optimizers of a rank have one loss scale, which follows the overflows of all",
        "tests/multiproc/test_experts.py::test_experts_and_the_rest_have_one_loss_scale",
        replace(case("--fp16 with experts that have groups of their own", on, "fp16"), applies=_scales_experts_apart),
    ),
    *warned_uniform(
        "Megatron gives such experts an optimizer whose loss scale follows their overflows alone, but the loss has the "
        "others' scale, so after an overflow the experts' gradients are divided by another number than they have",
        "tests/multiproc/test_experts.py::test_loss_scales_of_megatron_part",
        "use --bf16, or a constant --loss-scale, or stages of different sizes, which have one loss scale",
        replace(case("--fp16 with experts that have groups of their own", on, "fp16"), applies=_scales_experts_apart),
    ),
    *supported("activations cross a boundary in the pipeline dtype", _PARITY, "--bf16"),
    *supported(
        "get_fp8_context and get_fp4_context share the scaling factors of a tensor among the ranks of its stage, and "
        "stages exchange activations in the pipeline dtype",
        _NEEDS_ENGINE,
        case("--fp8-format", given, "fp8"),
        case("--fp4-format", given, "fp4"),
    ),
    *refused_unequal_dp(
        "delayed scaling finds its factors among all replicas, which run their microbatches in orders of their own and "
        "would wait for each other inside a forward",
        replace(case("--fp8-recipe delayed"), applies=_scales_over_replicas),
        way_out="use another recipe or give every stage the same data-parallel size",
    ),
    *refused_unequal_dp(
        "it compares the norms of queries and keys between the replicas in every forward, which they run in orders of "
        "their own",
        "--test-mode",
    ),
    *supported(
        "quantize_param_shard finds the scaling factors of a weight among the replicas of its stage",
        _NEEDS_ENGINE,
        "--fp8-param-gather",
        "--fp4-param-gather",
    ),
    *supported(
        "its rules name modules and numbers of layers in the whole model",
        _NEEDS_ENGINE,
        case("--te-precision-config-file", given),
    ),
    *refused(
        "a graph of the whole iteration would capture the plugin's transfers, which the host completes",
        "--cuda-graph-impl full_iteration",
    ),
    *refused_unequal(
        "_CudaGraphRunner replays a layer into memory that it uses again, where a channel may still be sending, and on "
        "CPUs stock ends with 'graphsafe_get_state is not supported in this Generator'",
        "--cuda-graph-impl local",
        "--enable-cuda-graph",
    ),
    *refused_unequal(
        "TECudaGraphHelper uses the memory of outputs again in the order of Megatron's schedule, where a channel may "
        "still be sending, and stock ends with 'CUDA Graphs are not supported without TE.'",
        "--cuda-graph-impl transformer_engine",
        "--external-cuda-graph",
    ),
    *refused_unequal(
        "OptimizerCudaGraphWrapper would capture the sums over the model group, which the host waits for, and on CPUs "
        "stock ends with 'If capturable=True, params and state_steps must be on supported devices'",
        "--optimizer-cuda-graph",
    ),
    *refused_unequal(
        "TransformerConfig wants --overlap-moe-expert-parallel-comm with it, which is refused, and stock ends with "
        "'Delaying wgrad compute is only supported with transformer_engine implementation'",
        "--delay-wgrad-compute",
    ),
    *supported(
        "finish_embedding_wgrad_compute gathers among the ranks of the last stage, before gradients are summed",
        f"not run: needs CUDA and APEX's fused weight gradients, {_DEVICE} does it",
        "--defer-embedding-wgrad-compute",
    ),
    *supported(
        "PipelineOffloadManager moves what a rank has saved for its backward pass between its own device and host",
        _ENGINE,
        "--fine-grained-activation-offloading",
    ),
    *refused_unequal(
        "Megatron's TransformerConfig refuses it for more than one stage, 'there is no support for Pipeline "
        "parallelism with CPU offloading'",
        case("--cpu-offloading-num-layers", above(0)),
        way_out="use --recompute-granularity",
    ),
    # Data parallelism.
    *supported(
        "its shards and collectives stay among the data-parallel replicas of one stage",
        _PARITY,
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ),
    *supported(
        "it only shifts when the buckets of a stage are reduced or gathered",
        _OPTIONS,
        case("--no-align-grad-reduce", off, "align_grad_reduce"),
        case("--no-align-param-gather", off, "align_param_gather"),
    ),
    *supported(
        "it gathers the weights of a rank's first chunk among the replicas of its stage",
        _OPTIONS,
        "--overlap-param-gather-with-optimizer-step",
    ),
    *refused(
        "the plugin's group builder makes one distributed-optimizer instance",
        case("--num-distributed-optimizer-instances", above(1)),
    ),
    *refused(
        "the plugin's group builder makes no second gather group, Megatron's makes it from one size",
        "--create-all-gather-group",
    ),
    *refused("the plugin's group builder does not set up SHARP", "--use-sharp"),
    *refused(
        "the plugin's group builder does not read NCCL options per group, so they would have no effect",
        case("--nccl-communicator-config-path", given),
        "--high-priority-stream-groups",
    ),
    *refused_unequal(
        "_ParamAndGradBuffer waits for the whole world at every buffer, whose number differs between stages with "
        "experts or in a U-shape, and on CPUs stock ends with \"Error building extension 'nccl_allocator'\"",
        case("--use-nccl-ub", on, "nccl_ub"),
    ),
    *refused_unequal(
        "fully sharded data parallelism makes its device mesh from one tensor-parallel size",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        way_out="use --use-distributed-optimizer or give every stage the same size",
    ),
    *refused_unequal(
        "weights that appear after start-up miss the copy of the tied embedding between stages",
        "--init-model-with-meta-device",
    ),
    *(
        replace(rule, versions=("<0.18",))
        for rule in refused_unequal(
            "weights that are not drawn are not marked as cut, so norms and clipping count only what the first rank of "
            "a stage has (Megatron up to 0.17)",
            case("--no-initialization", off, "perform_initialization"),
        )
    ),
    # The step: optimizer, batches, evaluation.
    *supported("it works on each weight element alone", _PARITY, "--optimizer adam", "--optimizer sgd"),
    *refused_unequal(
        "it works on the shard of a matrix that a rank holds, so its result depends on the sizes",
        "--optimizer muon",
        "--optimizer dist_muon",
        "--optimizer adaptive_muon",
        "--optimizer soap",
        way_out="use --optimizer adam or sgd",
    ),
    *supported(
        "it works on each weight element alone",
        "tests/multiproc/test_options.py::test_lion",
        "--optimizer lion",
    ),
    *supported(
        "HybridDeviceOptimizer moves what a rank has of the optimizer's state between its own device and host",
        _NEEDS_ENGINE,
        "--optimizer-cpu-offload",
    ),
    *supported(
        "norms and counts are summed over the model group, which holds every weight shard once",
        _CLIPPING,
        case("--clip-grad", above(0)),
        "--log-num-zeros-in-grad",
    ),
    *supported(
        "the norm is summed over the model group, but with --overlap-param-gather Megatron takes it before the shards "
        "of a step are gathered, so it depends on the replicas",
        "tests/multiproc/test_logged_numbers.py::test_numbers_are_those_of_the_uniform_run",
        "--log-params-norm",
    ),
    *supported(
        "clip_qk takes the maximum of a layer's heads over the replicas of its stage",
        _ENGINE,
        "--log-max-attention-logit",
    ),
    *supported(
        "clip_qk takes the maximum of a layer's heads over the replicas of its stage",
        f"not run: needs CUDA and Transformer Engine 2.9, {_DEVICE} does it",
        "--qk-clip",
    ),
    *supported(
        "the plugin sends the token count from the last stage to every rank of every stage",
        "tests/multiproc/test_optimizer.py::test_uneven_masks_with_per_token_loss",
        "--calculate-per-token-loss",
    ),
    *supported(
        "the batch arithmetic uses the data-parallel size of this rank's stage, and every batch is checked against all",
        _GROWING,
        replace(case("--rampup-batch-size", given), versions=capability("ramp_up").versions),
        case("--step-batch-size-schedule", given),
    ),
    *warned(
        "from 0.18 on Megatron ignores it, so every step has the whole batch",
        "tests/multiproc/test_growing_batches.py::test_a_ramp_that_is_ignored",
        "use --step-batch-size-schedule, or leave it out",
        replace(case("--rampup-batch-size", given), versions=capability("ramp_up").missing),
    ),
    *refused_unequal_dp(
        "it rounds a batch to a multiple of the data-parallel size, which differs between stages",
        "--decrease-batch-size-if-needed",
    ),
    *supported(
        "evaluation uses the same communicator",
        "tests/multiproc/test_optimizer.py::test_evaluation_changes_nothing",
        case("--eval-iters", above(0)),
    ),
    *supported(
        "the arguments have this microbatch size while a stage evaluates, so scripts share batches of evaluation",
        "tests/multiproc/test_evaluation_batches.py::test_batches_of_evaluation",
        case("--eval-micro-batch-size", given),
    ),
    *warned_uniform(
        "in NVIDIA's get_batch the ranks of a stage that do not read make memory for --micro-batch-size, so stock ends "
        "at the first evaluation",
        "tests/multiproc/test_evaluation_batches.py::test_stock_ends_and_says_so_at_the_start",
        "give --eval-micro-batch-size the value of --micro-batch-size",
        replace(case("--eval-micro-batch-size", given), applies=_evaluates_otherwise),
    ),
    *supported(
        "every stage cuts it by its own number of replicas, and it is checked against all",
        "tests/multiproc/test_evaluation_batches.py::test_batches_of_evaluation",
        case("--eval-global-batch-size", given),
    ),
    *supported(
        "its decisions are reduced over the whole world",
        _OPTIONS,
        "--rerun-mode validate_results",
        "--rerun-mode report_stats",
    ),
    *supported(
        "all ranks of the world agree to repeat a step, and then exchange as in any other",
        "tests/multiproc/test_options.py::test_a_step_is_repeated",
        case("--error-injection-rate", above(0)),
    ),
    *supported(
        "it compares the replicas of one stage",
        _OPTIONS,
        case("--check-weight-hash-across-dp-replicas-interval", given),
    ),
    *supported(
        "timers are gathered over the whole world, and a planned order has none of single messages",
        "tests/multiproc/test_logged_numbers.py::test_numbers_are_those_of_the_uniform_run",
        case("--timing-log-level", above(0)),
    ),
    *supported(
        "it gathers one record per rank over the whole world",
        "tests/multiproc/test_options.py::test_stragglers",
        "--log-straggler",
    ),
    *supported(
        "every rank talks to its own monitor process only",
        f"not run: needs nvidia-resiliency-ext 0.6, {_DEVICE} does it",
        "--enable-ft-package",
    ),
    *refused(
        "it builds the groups again in the same process, and the plugin's channels would be stale",
        "--inprocess-restart",
        way_out="leave it out and restart the processes",
    ),
    *refused_unequal(
        "it replaces reduce-scatter with all-reduce, which the sum of the tied embedding does not expect",
        case("--save-wgrads-interval", given),
    ),
    *refused_unequal(
        "LogitsSaverHooks and StudentLogitsCapture hook model.output_layer on every stage, and only the last one has "
        "it, so Megatron itself ends with \"'GPTModel' object has no attribute 'output_layer'\"",
        case("--logits-save-dir", given),
        case("--logits-load-dir", given),
        way_out="run teacher and student with one stage, --vtp-size-list N",
    ),
    # Checkpoints.
    *supported(
        "the sharded format records for every tensor which part a rank holds, whatever the sizes",
        _CHECKPOINT,
        "--ckpt-format torch_dist",
        case("--save", given),
        case("--no-ckpt-fully-parallel-save", off, "ckpt_fully_parallel_save"),
    ),
    *supported(
        "replicas of a stage share the work, and a stage with one replica takes the same steps",
        "tests/multiproc/test_replicas_saved.py::test_saves_and_loads_with_shared_work",
        "--ckpt-fully-parallel-load",
        "--ckpt-assume-constant-structure",
    ),
    *supported(
        "weights and optimizer states load into any list, in the forms of the table in docs/checkpoints.md",
        _RESHARD,
        case("--load", given),
        "--dist-ckpt-optim-fully-reshardable",
    ),
    *supported(
        "one file per rank position, so it loads only into the list that wrote it", _CHECKPOINT, "--ckpt-format torch"
    ),
    *refused_unequal(
        "these formats belong to fully sharded data parallelism",
        "--ckpt-format torch_dcp",
        "--ckpt-format fsdp_dtensor",
        way_out="use --ckpt-format torch_dist",
    ),
    *supported(
        "the ranks of the world agree that all have written, whatever each has written",
        "tests/multiproc/test_checkpoint.py::test_saved_in_the_background",
        "--async-save",
    ),
    *supported("it is the same save into another folder", _CHECKPOINT, "--non-persistent-ckpt-type global"),
    *refused_unequal(
        "MCoreTensorAwareStateDict.to_state_dict gives a rank its own file back and does not look whether it fits, so "
        "another list would load other parts of the weights",
        "--non-persistent-ckpt-type local",
        way_out="use --non-persistent-ckpt-type global",
    ),
    *refused_unequal(
        "it takes one tensor-parallel size for all stages from the checkpoint",
        "--use-mp-args-from-checkpoint-args",
        way_out="leave it out and give --vtp-size-list",
    ),
    *supported(
        "every rank reads the options of the model before the plugin checks them against the stages",
        "tests/multiproc/test_checkpoint.py::test_options_of_the_model_from_a_checkpoint",
        "--use-checkpoint-args",
    ),
    *supported(
        "it is a load and a save",
        "tests/multiproc/test_checkpoint.py::test_converted",
        case("--ckpt-convert-format", given),
    ),
    *refused_unequal(
        "Megatron checks such a file with one tensor-parallel size",
        case("--yaml-cfg", given),
        way_out="give the options on the command line",
    ),
    # Input data, and modes other than pretraining.
    *supported(
        "only tensor-parallel rank 0 of the first and the last stage reads", _DATA, "--dataloader-type external"
    ),
    *refused_unequal_dp(
        "it shuffles in buckets of the data-parallel size, so stages would read different samples",
        "--dataloader-type cyclic",
        way_out="use --dataloader-type single or give every stage the same data-parallel size",
    ),
    *refused_unequal_dp(
        "GPTFIMDataset draws how it turns a sample around from one generator, sample after sample, so stages whose "
        "replicas read others would have tokens and labels that do not fit",
        "--fim-data",
    ),
    *refused(
        "ranks that read no data end with len() of None in build_train_valid_test_data_iterators, and with one set all "
        "end with \"'int' object is not subscriptable\" in evaluate_and_print_results, in stock Megatron, too",
        "--full-validation",
        way_out="leave it out and give --eval-iters",
    ),
    *supported(
        "the batch stays inside the stages that read it",
        "tests/multiproc/test_packed_training.py::test_positions_start_anew",
        "--reset-position-ids",
    ),
    *supported(
        "the batch stays inside the stages that read it",
        "tests/multiproc/test_options.py::test_masks_of_the_data_set",
        "--reset-attention-mask",
    ),
    *supported("the loss mask stays inside the stage that reads it", _OPTIONS, "--eod-mask-loss"),
    *supported(
        "every stage has the lengths of the samples, so microbatches are single rows of one cp size",
        "tests/multiproc/test_packed_training.py::test_documents_of_a_row",
        "--dataloader-inter-document-masking",
    ),
    *supported(
        "every stage has the lengths of the samples, so microbatches are single rows of one cp size",
        "tests/multiproc/test_packed_training.py::test_conversations",
        "--sft",
    ),
    *refused_unequal("rollouts and weight transfer are built on one tensor-parallel size", "--perform-rl-step"),
    *refused_unequal(
        "all ranks gather number after number of their groups, and a stage of another size has others, which hangs",
        case("--gpu-sniff-test-interval", given),
    ),
    *refused_unequal(
        "the inference engine broadcasts over the pipeline group, which hangs between unequal stages",
        "--inference-dynamic-batching",
        "--use-legacy-static-engine",
        "--flash-decode",
        case("--inference-shards", given),
        case("--inference-batch-times-seqlen-threshold", above(-1)),
        way_out="load the checkpoint into a uniform run for inference",
    ),
    # What only some orders refuse.
    *refused_unequal_dp(
        "no interleaved order is known for different data-parallel sizes",
        case("--num-virtual-stages-per-pipeline-rank", given),
        case("--num-layers-per-virtual-pipeline-stage", given),
    ),
    *refused_u_shaped(
        "--num-layer-list alone says which layers each part of the U holds",
        "--num-virtual-stages-per-pipeline-rank",
        "--num-layers-per-virtual-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ),
    *refused_u_shaped(
        "masks of the edge's samples do not cross to the cloud, only lengths of packed ones do",
        "--reset-attention-mask",
    ),
)
"""The table, by subject. Attributes name Megatron's parsed arguments. The first row that refuses an option counts."""

CONFIG_RULES: tuple[OptionRule, ...] = (
    *refused_unequal(
        "its gradients are summed over the pipeline group, which hangs between stages of different sizes",
        case("config.has_cond_embedder", on, "has_cond_embedder"),
        case("config.flextron", on, "flextron"),
        way_out="switch it off or give every stage the same size",
    ),
    *refused_planned(
        "only Megatron's schedules do this, the plugin's executor does not",
        "config.num_microbatches_with_partial_activation_checkpoints",
        "config.overlap_moe_expert_parallel_comm",
        "config.moe_paged_stash",
        "config.defer_embedding_wgrad_compute",
        "config.fine_grained_activation_offloading",
        "config.hybrid_context_parallel",
        "config.cuda_graph_impl local",
    ),
)
"""Fields of the model's configuration: some have no flag, others are set by a script without a command line."""

STEP_RULES: tuple[OptionRule, ...] = refused_planned(
    "the plugin's executor uses the plugin's channels and shapes", "p2p_communicator", "adjust_tensor_shapes_fn"
)
"""Arguments of Megatron's function that runs a step."""
