"""Faults that tests plant in a run of ``certify``, and the hook that watches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import megatron.training.training as training
import torch
from megatron.core import parallel_state

from tests.multiproc.hooks.in_place import Facts, after
from vtp_plugin.certify.layouts import CertifiedRun
from vtp_plugin.patches.certified.certified_run import Probe
from vtp_plugin.patches.certified.certified_tensors import bare, named_parts

_SMALL = 1e-6  # less than what a layer's output may differ by


def certified(facts: Facts, *words: str) -> None:
    """Watch the run, of which words such as ``seed=1`` tell the fields of :class:`CertifiedRun`."""
    known: dict[str, Any] = dict(word.split("=", 1) for word in words)
    known |= {name: int(value) for name, value in known.items() if value.isdigit()}
    probe = Probe(CertifiedRun(**{"shows": "", "layout": "", "num_ranks": 0, **known}))
    probe.install()

    @after(training, "train_step")
    def note(*_args: Any, **_kwargs: Any) -> None:
        facts["numbers"] = probe.numbers


@dataclass(frozen=True, slots=True)
class _Built:
    """The model and the optimizer of this rank."""

    model: list[Any]
    optimizer: Any

    @property
    def stage(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    @property
    def tp_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def modules(self, ending: str, layer: int) -> Iterator[Any]:
        """Yield a module of a layer, by its number in the model, or of the whole model for 0, where it is here."""
        for chunk in map(bare, self.model):
            inside = [one for one in chunk.decoder.layers if one.layer_number == layer] if layer else [chunk]
            yield from (module for one in inside for name, module in one.named_modules() if name.endswith(ending))

    def parameter(self, name: str) -> Any:
        part = named_parts(self.model).get(name)
        return None if part is None else part.parameter

    def change_output(self, ending: str, layer: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for module in self.modules(ending, layer):
            forward = module.forward

            def instead(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                result = forward(*args, **kwargs)
                return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

            module.forward = instead

    def change_gradients(self, change: Callable[[str, torch.Tensor], object], *, is_before: bool = False) -> None:
        """Change gradients after, or before, all sums of a step."""
        config = training.get_model_config(self.model[0])

        def act() -> None:
            for name, part in named_parts(self.model).items():
                change(name, part.parameter.main_grad)

        def instead(*args: Any, **kwargs: Any) -> Any:
            if is_before:
                act()
            result = training.finalize_model_grads(*args, **kwargs)
            if not is_before:
                act()
            return result

        config.finalize_model_grads_func = instead

    def change_gradient(self, ending: str, change: Callable[[torch.Tensor], object], **when: bool) -> None:
        self.change_gradients(lambda name, gradient: change(gradient) if name.endswith(ending) else None, **when)


def _fault(plant: Callable[[_Built], object]) -> Callable[[Facts], None]:
    """Make a hook that plants a fault in a model that was built."""

    def hook(facts: Facts) -> None:
        @after(training, "setup_model_and_optimizer")
        def act(built: Any, *_args: Any, **_kwargs: Any) -> None:
            with torch.no_grad():
                plant(_Built(built[0], built[1]))

    return hook


@_fault
def sum_left_out(run: _Built) -> None:
    """A row-parallel layer does not sum over its ranks."""
    for module in run.modules("linear_fc2", 3):
        module.explicit_expert_comm = True  # as in experts, whose dispatcher sums


@_fault
def gradient_by_tp(run: _Built) -> None:
    """The gradient of a norm is summed over ranks that have all of it."""
    run.change_gradient("4.input_layernorm.weight", lambda gradient: gradient.mul_(2))


@_fault
def gradient_of_stage(run: _Built) -> None:
    """A stage divides its gradients by another number of replicas."""
    if run.stage == 0:
        run.change_gradients(lambda _name, gradient: gradient.mul_(0.5))


@_fault
def one_nan(run: _Built) -> None:
    """One gradient of one rank is no number."""
    if run.tp_rank == 1:
        run.change_gradient("3.mlp.linear_fc1.weight", lambda gradient: gradient.view(-1)[3:4].fill_(torch.nan))


@_fault
def one_rank_alone(run: _Built) -> None:
    """One rank's part of a gradient is too large."""
    if run.tp_rank == 1:
        run.change_gradient("3.mlp.linear_fc2.weight", lambda gradient: gradient.mul_(3))


@_fault
def output_halved(run: _Built) -> None:
    """A layer gives out half of what it should."""
    run.change_output("linear_proj", 4, lambda output: 0.5 * output)


@_fault
def gradient_shares(run: _Built) -> None:
    """The sum of a norm's gradient under sequence parallelism is left out: each rank keeps its share."""
    shares: list[torch.Tensor] = []
    name = "4.input_layernorm.weight"
    config = training.get_model_config(run.model[0])
    run.change_gradient(name, lambda gradient: shares.append(gradient.clone()), is_before=True)
    before = config.finalize_model_grads_func

    def finalize(*args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)
        for own, part in named_parts(run.model).items():
            if own.endswith(name):
                part.parameter.main_grad.copy_(shares.pop())

    config.finalize_model_grads_func = finalize


@_fault
def start_differs(run: _Built) -> None:
    """The rows of a layer's queries, keys and values are swapped when they are loaded."""
    for module in run.modules("linear_qkv", 3):
        module.weight.copy_(module.weight.roll(4, 0))


@_fault
def marked_as_cut(run: _Built) -> None:
    """A weight that each rank has whole is marked as cut."""
    for module in run.modules("input_layernorm", 3):
        module.weight.tensor_model_parallel, module.weight.partition_dim = True, 0


@_fault
def marked_as_whole(run: _Built) -> None:
    """A weight that is cut is marked as whole."""
    for module in run.modules("linear_fc1", 3):
        module.weight.tensor_model_parallel = False


@_fault
def layers_swapped(run: _Built) -> None:
    """Two layers have each other's weights."""
    for one, other in zip(run.modules("linear_fc1", 3), run.modules("linear_fc1", 4), strict=True):
        kept = one.weight.clone()
        one.weight.copy_(other.weight)
        other.weight.copy_(kept)


@_fault
def one_element(run: _Built) -> None:
    """One number of a weight differs by a rounding at the start."""
    for module in run.modules("linear_fc2", 4):
        if run.tp_rank == 1:
            module.weight.view(-1)[7] *= 1 + 2.0**-22


@_fault
def labels_shifted(run: _Built) -> None:
    """The last stage reads other labels."""
    for chunk in map(bare, run.model):
        if chunk.post_process:
            chunk.register_forward_pre_hook(
                lambda _module, args, kwargs: (args, {**kwargs, "labels": kwargs["labels"].roll(1, 1)}),
                with_kwargs=True,
                prepend=True,
            )


@_fault
def attention_scaled(run: _Built) -> None:
    """Attention gives out too much on one rank."""
    if run.tp_rank == 1:
        run.change_output("core_attention", 3, lambda output: output * 1.5)


@_fault
def lost_bits(run: _Built) -> None:
    """What crosses a boundary is rounded to 16 bits."""
    for layer in (module for module in run.modules("input_layernorm", 3)):
        layer.register_forward_pre_hook(lambda _module, args: (args[0].to(torch.bfloat16).float(), *args[1:]))


@_fault
def boundary_scaled(run: _Built) -> None:
    """What crosses a boundary comes too large."""
    for chunk in map(bare, run.model):
        for layer in (one for one in chunk.decoder.layers if one.layer_number == 3):
            layer.register_forward_pre_hook(
                lambda _module, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.001}),
                with_kwargs=True,
            )


def amplifier(facts: Facts) -> None:
    """Have a layer amplify one direction, which rounding hardly takes; this is the model's own, and no fault."""
    del facts

    @after(training, "setup_model_and_optimizer")
    def act(built: Any, *_args: Any, **_kwargs: Any) -> None:
        model = _Built(built[0], built[1])
        for chunk in map(bare, model.model):
            for layer in (one for one in chunk.decoder.layers if one.layer_number == 3):
                layer.register_forward_pre_hook(_amplified, with_kwargs=True)


def _amplified(_module: Any, args: Any, kwargs: Any) -> Any:
    values, signs = kwargs["hidden_states"], _signs(kwargs["hidden_states"])
    return args, {**kwargs, "hidden_states": values + 100 * signs * (values * signs).mean(-1, keepdim=True)}


def _signs(values: torch.Tensor) -> torch.Tensor:
    return 1 - 2 * (torch.arange(values.shape[-1]) % 2)


@_fault
def amplified(run: _Built) -> None:
    """A layer's output differs by less than its tolerance, in a direction which the next one amplifies."""
    run.change_output("linear_fc2", 2, lambda output: output + _SMALL * output.std() * _signs(output))


@_fault
def permuted_sequence(run: _Built) -> None:
    """The tokens of a boundary lie in another order."""
    run.change_output("input_layernorm", 3, lambda output: output.flip(0))


@_fault
def permuted_columns(run: _Built) -> None:
    """The parts of a column-parallel layer lie on other ranks."""
    run.change_output("linear_fc1", 4, lambda output: output.roll(1, -1))


@_fault
def embedding_scaled(run: _Built) -> None:
    """The first stage gives out a larger embedding."""
    run.change_output("embedding", 0, lambda output: output * 1.25)


@_fault
def negated(run: _Built) -> None:
    """A gradient has the wrong sign."""
    run.change_gradient("2.mlp.linear_fc2.weight", lambda gradient: gradient.neg_())


@_fault
def gradient_lost(run: _Built) -> None:
    """A gradient is nought."""
    run.change_gradient("position_embeddings.weight", lambda gradient: gradient.zero_())


@_fault
def copy_drifts(run: _Built) -> None:
    """One of two copies of a norm gets a gradient of its own."""
    if run.tp_rank == 1:
        run.change_gradient("4.input_layernorm.weight", lambda gradient: gradient.mul_(1.001))


@_fault
def wrong_loss_scale(run: _Built) -> None:
    """The stage with the loss scales it twice."""
    if run.stage == 1:
        run.change_output("output_layer", 0, _twice_backward)


@_fault
def layer_skipped_backward(run: _Built) -> None:
    """A layer passes no gradient on."""
    run.change_output("pre_mlp_layernorm", 4, lambda output: output.detach())


@_fault
def frozen(run: _Built) -> None:
    """One weight is not trained."""
    step, weight = run.optimizer.step, run.parameter("decoder.layers.3.mlp.linear_fc2.bias")

    def instead() -> Any:
        kept = None if weight is None else weight.detach().clone()
        result = step()
        if weight is not None:
            weight.data.copy_(kept)
        return result

    run.optimizer.step = instead


def _twice_backward(output: torch.Tensor) -> torch.Tensor:
    output.register_hook(lambda gradient: 2 * gradient)
    return output
