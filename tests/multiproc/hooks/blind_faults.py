"""Fifteen faults, written by somebody who had not read how ``certify`` compares runs.

Each is a hook that changes something in place for as long as its process lives, where its docstring says, and does
nothing on other ranks. They are planted in the run that is judged: some would act in a uniform run, too.

"The first layer of stage 1" is, with 4 layers on two stages, layer 3 of the model, decoder.layers.0 on the stage; on
three stages with 6 layers it is layer 3 as well. Steps count from 1, microbatches of a step from 0. Rank numbers are
those of the plain, stage-major order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron.core.optimizer.optimizer as megatron_optimizer
import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

from tests.multiproc.hooks.in_place import Facts, after, around, before
from vtp_plugin.runtime.step.weight_gradients import TiedWeight

Model = list[Any]


def _stage() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def _tp_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def _tp_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def _is_last_stage() -> bool:
    return _stage() == parallel_state.get_pipeline_model_parallel_world_size() - 1


def _when_built(plant: Callable[[Model, Any], None]) -> None:
    """Plant when the model, in DDP, and the optimizer are there."""
    after(training, "setup_model_and_optimizer")(lambda built, *_args, **_kwargs: plant(built[0], built[1]))


def _bare(model: Model) -> Any:
    chunk = model[0]
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def _layer(model: Model, number: int = 0) -> Any:
    """Give a layer of this stage, by its number there."""
    return _bare(model).decoder.layers[number]


def _change_output(module: Any, change: Callable[[Any], Any]) -> None:
    """Have a module's forward return something else, so that whoever looks at the module's output sees that."""
    original = module.forward
    module.forward = lambda *args, **kwargs: change(original(*args, **kwargs))


def _change_input(model: Model, change: Callable[[torch.Tensor], None]) -> None:
    """Change, in place, each activation that this stage receives, before its first layer sees it."""
    bare = _bare(model)
    original = bare.set_input_tensor

    def set_input_tensor(received: Any) -> None:
        tensor = received[0] if isinstance(received, list) else received
        if tensor is not None:
            with torch.no_grad():
                change(tensor)
        original(received)

    bare.set_input_tensor = set_input_tensor


def attention_sum_left_out(facts: Facts) -> None:
    """Leave out, in one layer, the sum over TP behind the attention's projection.

    Where: stage 1, its first layer, self_attention.linear_proj (row-parallel), forward, all microbatches of all steps.
    Each rank goes on with its own partial sum, so what should be equal on the ranks of the stage no longer is.
    Layout: --vtp-size-list 1,2 (dp 1, ranks 1 and 2).
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 1:
            # What Megatron does for experts, which sum later.
            _layer(model).self_attention.linear_proj.explicit_expert_comm = True

    _when_built(plant)


def bias_counted_by_each_rank(facts: Facts) -> None:
    """Add the bias of a row-parallel layer before the sum over TP, so that it counts tp times.

    Where: stage 0, its second layer, mlp.linear_fc2.bias, forward; its gradient is right. Biases start at zero, so
    step 1 is right, and the forward of step 2 is the first that is wrong: by bias * (tp - 1), so factor 2 of the bias.
    Layout: --vtp-size-list 2,1 (dp 1, ranks 0 and 1).
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 0:
            layer, extra = _layer(model, 1).mlp.linear_fc2, _tp_size() - 1
            _change_output(layer, lambda result: (result[0] + extra * layer.bias.detach(), result[1]))

    _when_built(plant)


def input_gradient_not_summed(facts: Facts) -> None:
    """Leave out, in one layer, the sum over TP of the gradient of a column-parallel layer's input.

    Where: stage 1, its second layer, mlp.linear_fc1, backward. The forward of step 1 is right; so are the gradients of
    linear_fc1 and linear_fc2 of that layer and all behind it. Wrong first: the gradient of linear_fc1's input, and so
    of pre_mlp_layernorm of that layer, then all before it. The replicated weights' gradients differ between the ranks.
    Layout: --vtp-size-list 1,2,2 --num-layers 6 (dp 1, ranks 1 and 2; the layer is layer 4 of 6).
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 1:
            layer = _layer(model, 1).mlp.linear_fc1
            layer.allreduce_dgrad, layer.disable_grad_reduce = False, True

    _when_built(plant)


def bias_gradient_by_tp(facts: Facts) -> None:
    """Divide the gradient of one bias by tp, as if it were a sum over the ranks of the stage.

    Where: stage 0, its second layer, self_attention.linear_proj.bias (replicated on the stage): factor 1 / 2, on both
    ranks, in all steps. The forward of step 1 and all other gradients of step 1 are right.
    Layout: --vtp-size-list 2,1 (dp 1, ranks 0 and 1; the layer is layer 2).
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 0:
            bias, size = _layer(model, 1).self_attention.linear_proj.bias, _tp_size()
            bias.register_hook(lambda gradient: gradient / size)

    _when_built(plant)


def replicas_summed_on_stage(facts: Facts) -> None:
    """Average the gradients of one stage over 1 replica in place of dp: they are the sum.

    Where: stage 1, all of its weights (of a tied embedding the part that this stage computes): factor dp = 2.
    Layout: --vtp-size-list 1,2, dp 2 (6 ranks; ranks 2 to 5), without --calculate-per-token-loss.
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 1:
            for group in model[0].bucket_groups:
                for bucket in group.buckets:
                    bucket.gradient_scaling_factor = 1.0

    _when_built(plant)


def qkv_rows_permuted(facts: Facts) -> None:
    """Read the rows of QKV on one stage as [3, heads, channels], where they are [heads, 3, channels].

    Where: stage 1, in all its layers, self_attention.linear_qkv: the rows of the output, on each rank its own, are
    permuted; the first wrong one is the first layer of the stage. Values are the same, at other places; so with the
    gradients of linear_qkv.weight. Sum and norm of the output of that layer are right.
    Layout: --vtp-size-list 1,2 (dp 1, ranks 1 and 2).
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() != 1:
            return
        for layer in _bare(model).decoder.layers:
            attention = layer.self_attention
            num_heads = attention.num_attention_heads_per_partition

            def permute(result: Any, num_heads: int = num_heads) -> Any:
                mixed, bias = result
                parts = mixed.view(*mixed.shape[:-1], num_heads, 3, -1)
                return parts.transpose(-3, -2).reshape(mixed.shape), bias

            _change_output(attention.linear_qkv, permute)

    _when_built(plant)


def norm_epsilon_on_one_rank(facts: Facts) -> None:
    """Give a layer norm another epsilon on one rank: 1e-4 in place of 1e-5.

    Where: TP rank 1 of stage 1, its second layer, pre_mlp_layernorm, forward. No factor is constant: each row shrinks
    by sqrt((var + 1e-5) / (var + 1e-4)). The other rank of the stage has the right output.
    Layout: --vtp-size-list 1,2 (dp 1, rank 2; the layer is layer 4).
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 1 and _tp_rank() == 1:
            norm = _layer(model, 1).pre_mlp_layernorm
            assert hasattr(norm, "eps"), norm
            norm.eps *= 10

    _when_built(plant)


def tied_copy_misses_first_stage(facts: Facts) -> None:
    """Leave the gradient of the last stage's copy of a tied embedding without the first stage's part.

    Where: last stage, output_layer.weight, backward of step 1: its own part alone. Stage 0 has the whole sum, and as
    only its copy counts for the norm, the gradient norm of step 1 is right. After step 1 the two copies differ, and
    drift further apart.
    Layout: --vtp-size-list 1,2 (dp 1, ranks 1 and 2), without --untie-embeddings-and-output-weights.
    """

    @around(TiedWeight, "sum_gradients")
    def sum_gradients(original: Any, self: Any, gradient: torch.Tensor, stages: Any) -> None:
        own = gradient.clone()
        original(self, gradient, stages)
        if not self.is_first:
            gradient.copy_(own)


def vocabulary_off_by_one(facts: Facts) -> None:
    """Let one rank of the cross entropy think that its rows of the vocabulary begin one later.

    Where: TP rank 1 of the last stage: a target t in its half takes the logit of t - 1, and the first target of its
    half counts for nobody (its logit is taken as 0). Wrong first: the loss of each token whose target is in the upper
    half; the logits of step 1 are right. In the backward the 1 of the target is subtracted in the wrong column, of
    rank 2's columns only, so wrong first there: the gradient of the logits.
    Layout: --vtp-size-list 1,2 (dp 1, rank 2).
    """

    @around(VocabParallelCrossEntropy, "calculate_predicted_logits")
    def predicted(original: Any, logits: Any, target: Any, largest: Any, start: int, end: int) -> Any:
        offset = int(_is_last_stage() and _tp_rank() == 1)
        return original(logits, target, largest, start + offset, end + offset)

    # The method is static: as a plain function it would get the instance, where somebody calls it by one.
    VocabParallelCrossEntropy.calculate_predicted_logits = staticmethod(
        VocabParallelCrossEntropy.calculate_predicted_logits
    )


def clips_by_own_stage(facts: Facts) -> None:
    """Clip the gradients of one stage by the norm of that stage alone; what is logged is the norm of all.

    Where: stage 1, all weights, from the update of step 1 on. Losses, gradients and the norm of step 1 are right; the
    update of stage 1 is too large by (norm of all) / max(norm of stage 1, clip-grad); that of stage 0 is right.
    Layout: --vtp-size-list 1,2 --optimizer sgd --lr 1e-1 --clip-grad 0.05 --untie-embeddings-and-output-weights
    (dp 1, ranks 1 and 2). With Adam the factor would all but cancel. Tied copies would drift apart besides.
    """
    norms: list[float] = []

    @around(megatron_optimizer, "get_grad_norm_fp32")
    def norm(original: Any, gradients: Any, *args: Any, **kwargs: Any) -> float:
        total = original(gradients, *args, **kwargs)
        if _stage() == 1:
            own = original(gradients, grad_stats_parallel_group=parallel_state.get_tensor_model_parallel_group())
            norms[:] = [own]
        return total

    @around(megatron_optimizer, "clip_grad_by_total_norm_fp32")
    def clip(original: Any, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        original(parameters, max_norm, norms[0] if norms else total_norm, *args, **kwargs)


def rate_of_one_group(facts: Facts) -> None:
    """Update one group of parameters with 1.01 times the learning rate.

    Where: stage 0, the weights without weight decay (norms and biases), from the update of step 1 on: the change of
    each is 1.01 times what it should be. Losses, gradients and norm of step 1 are right, and all weights of stage 1
    after it.
    Layout: --vtp-size-list 2,1 --weight-decay 0.1 (dp 1, ranks 0 and 1).
    """

    def plant(_model: Model, optimizer: Any) -> None:
        if _stage() != 0:
            return

        @before(optimizer, "step")
        def change() -> None:
            groups = [group for group in optimizer.param_groups if group["wd_mult"] == 0.0]
            assert groups
            for group in groups:
                group["lr"] *= 1.01  # the scheduler sets it anew after each step

    _when_built(plant)


def infinite_gradient_in_step_2(facts: Facts) -> None:
    """Put an infinity into one element of a gradient, on one rank, in step 2, with Megatron's own check off.

    Where: TP rank 1 of stage 1, its first layer, mlp.linear_fc1.weight[0, 0] (row ffn/2 of the whole weight), in the
    first microbatch that goes back in step 2. Step 1, and the loss of step 2, are right. The gradient norm of step 2
    is infinite, so clipping multiplies all gradients by 0: this element becomes NaN, and the loss of step 3 with it.
    Layout: --vtp-size-list 1,2 --no-check-for-nan-in-loss-and-grad (dp 1, rank 2; the layer is layer 3).
    """
    num_steps, is_due = 0, False

    @before(training, "train_step")
    def count(*_args: Any, **_kwargs: Any) -> None:
        nonlocal num_steps, is_due
        num_steps += 1
        is_due = num_steps == 2

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal is_due
        if not is_due:
            return gradient
        is_due = False
        gradient = gradient.clone()
        gradient[0, 0] = float("inf")
        return gradient

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 1 and _tp_rank() == 1:
            _layer(model).mlp.linear_fc1.weight.register_hook(spoil)

    _when_built(plant)


def stale_activation(facts: Facts) -> None:
    """Let a stage compute a microbatch on the activation of the one before it, as from a buffer not yet filled.

    Where: boundary between stages 1 and 2, on all ranks of stage 2: microbatch 2 of each step gets what microbatch 1
    brought. Stages 0 and 1 are right in the forward of step 1, and so are microbatches 0, 1 and 3 on stage 2.
    Wrong first: the input of the first layer of stage 2 in microbatch 2.
    Layout: --vtp-size-list 1,2,2 --num-layers 6 (dp 1, ranks 3 and 4), at least 3 microbatches.
    """
    kept: list[torch.Tensor] = []
    before(training, "train_step")(lambda *_args, **_kwargs: kept.clear())

    def change(tensor: torch.Tensor) -> None:
        kept.append(tensor.clone())
        if len(kept) == 3:
            tensor.copy_(kept[1])

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 2:
            _change_input(model, change)

    _when_built(plant)


def shards_swapped_at_boundary(facts: Facts) -> None:
    """Give the ranks of a stage each other's shards of the sequence, at a boundary.

    Where: boundary between stages 0 and 1, forward: TP rank 0 of stage 1 gets positions S/2 to S - 1, TP rank 1 the
    positions before. What goes back is swapped as well, since nobody turns the gradients round. Values are right, at
    other positions: norm and sum of the activation over the stage are the same. Wrong first: the input of the first
    layer of stage 1, in all microbatches.
    Layout: --vtp-size-list 1,2 --sequence-parallel (dp 1, ranks 1 and 2).
    """

    def change(tensor: torch.Tensor) -> None:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        shards = [torch.empty_like(tensor) for _ in range(_tp_size())]
        dist.all_gather(shards, tensor.detach().contiguous(), group=group)
        tensor.copy_(shards[_tp_size() - 1 - _tp_rank()])

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 1:
            _change_input(model, change)

    _when_built(plant)


def element_of_one_replica(facts: Facts) -> None:
    """Let one element of a start weight be 1e-3 too large in one replica.

    Where: replica 1 of stage 0, TP rank 1 there, its first layer, mlp.linear_fc2.weight[5, 7] (column 7 + ffn/2 of the
    whole weight), before step 1. Wrong before anything is computed: this weight; then the replica's forward from layer
    1 on. It stays apart: gradients are averaged, weights are not.
    Layout: --vtp-size-list 2,1, dp 2 (6 ranks; rank 3), without --use-distributed-optimizer, which gathers it away.
    """

    def plant(model: Model, _optimizer: Any) -> None:
        if _stage() == 0 and _tp_rank() == 1 and parallel_state.get_data_parallel_rank() == 1:
            with torch.no_grad():
                _layer(model).mlp.linear_fc2.weight[5, 7] += 1e-3

    _when_built(plant)
