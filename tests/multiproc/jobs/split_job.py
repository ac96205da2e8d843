"""Training with split backwards on one rank, and what listens to layers or adapts them."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.utils.parametrize import register_parametrization

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import (
    Trainer,
    _named_parts,
    applied,
    cpu_only,
    draw,
    mapped_only,
    model_parallel,
)
from tests.support.pool import init_gloo
from vtp_plugin.adapters import targets_of_chunks
from vtp_plugin.api import _Holder
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.patches.certified.certified_tensors import named_parts
from vtp_plugin.plan.schedule.order.actions import Action, Actions, Op, Schedule
from vtp_plugin.runtime.step.executor import Executor
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.weight_gradients import WeightGradients
from vtp_plugin.util import log


@dataclass(slots=True, kw_only=True)
class SplitResult:
    """What one rank saw.

    Attributes:
        result: as of a run without a split.
        num_apart: gradients of weights that this rank's order of a training step computes later than those of inputs,
            with other computes between.
        num_split: backwards of the order that are split.
        complete: by parameter: in which compute, `B`, `I` or `W`, DDP was told that its gradient is complete, once for
            each step; empty where sums do not overlap with backwards.
    """

    result: RankResult
    num_apart: int
    num_split: int
    complete: dict[str, str]


@contextmanager
def _spoilt(fault: str) -> Iterator[None]:
    """Let something go wrong: on the last rank, but buckets leave alike on all; nothing if the fault has no name."""
    compute, run, is_last, num_calls = WeightGradients.compute, ScheduleRunner.run, Executor._is_last, 0

    def of_one_microbatch(self: WeightGradients, vstage: int, microbatch: int) -> None:
        nonlocal num_calls
        num_calls += 1
        waiting = self._waiting[vstage, microbatch]
        if num_calls == 2 and fault == "left out":
            waiting.clear()
        elif num_calls == 2 and fault == "doubled":
            waiting *= 2
        elif num_calls == 2:
            right = waiting[0].product
            waiting[0] = replace(waiting[0], product=lambda inputs, gradient: right(inputs.roll(1, dims=0), gradient))
        compute(self, vstage, microbatch)

    def before_its_input(self: ScheduleRunner, schedule: Schedule, *args: Any) -> None:
        orders = list(schedule.orders)
        orders[self._worker] = _too_early(orders[self._worker])
        try:
            run(self, replace(schedule, orders=tuple(orders)), *args)
        except PlanError:
            traceback.print_exc()
            os._exit(1)  # others wait for this rank, and revert() would wait for them

    def before_the_last(self: Executor, action: Action) -> bool:
        was_last = is_last(self, action)
        return self._num_left[action.vstage, Op.W] == 1 if action.op is Op.W else was_last

    with pytest.MonkeyPatch.context() as patch:
        if fault == "after its bucket left":
            patch.setattr(Executor, "_is_last", before_the_last)
        elif fault and dist.get_rank() == dist.get_world_size() - 1:
            if fault == "before its input's":
                patch.setattr(ScheduleRunner, "run", before_its_input)
            else:
                patch.setattr(WeightGradients, "compute", of_one_microbatch)
        yield


def _too_early(order: Actions) -> Actions:
    """Compute the first gradient of weights directly before that of its input."""
    late = next(action for action in order if action.op is Op.W)
    others = [action for action in order if action != late]
    place = others.index(replace(late, op=Op.I))
    return (*others[:place], late, *others[place:])


@contextmanager
def _noting_completion(complete: dict[int, str]) -> Iterator[None]:
    """Note what DDP is told, by the id of the parameter."""
    group: Any = param_and_grad_buffer._ParamAndGradBucketGroup
    backward, compute, register, part = (
        WeightGradients.backward,
        WeightGradients.compute,
        group.register_grad_ready,
        "B",
    )

    @contextmanager
    def of_input(self: WeightGradients, *args: Any) -> Iterator[None]:
        nonlocal part
        part = "I"
        with backward(self, *args):
            yield
        part = "B"

    def of_weights(self: WeightGradients, *args: int) -> None:
        nonlocal part
        part = "W"
        compute(self, *args)
        part = "B"

    def noting(self: Any, parameter: Any, *args: Any) -> None:
        if self.is_last_microbatch:
            complete[id(parameter)] = complete.get(id(parameter), "") + part
        register(self, parameter, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "backward", of_input)
        patch.setattr(WeightGradients, "compute", of_weights)
        patch.setattr(group, "register_grad_ready", noting)
        yield


def own_computes() -> list[Action]:
    """List what this rank computed in its first training steps; none of their gradients of weights may be waiting.

    Later steps may have another order, which depends on what was measured.
    """
    assert _Holder.session is not None
    runner = _Holder.session.running.require_schedule_runner()
    assert not runner.weight_gradients._waiting
    schedule = next(one for one in runner._schedules.values() if not one.forward_only)
    return [action for action in schedule.orders[runner._worker] if action.op.is_compute]


def num_split() -> int:
    """Count the backwards of this rank's first training step that were split."""
    return sum(action.op is Op.I for action in own_computes())


def train(case: Case, fault: str = "") -> SplitResult:
    """Run a case on this rank; `fault` says what goes wrong."""
    init_gloo()
    complete: dict[int, str] = {}
    with applied(case, force=False), model_parallel(case):
        trainer = Trainer(case)
        try:
            with _spoilt(fault), _noting_completion(complete):
                result = trainer.run()
            order = own_computes()
            apart = [
                1
                for before, action in zip(order, order[1:], strict=False)
                if action.op is Op.W and (before.op, before.microbatch) != (Op.I, action.microbatch)
            ]
            names = {id(parameter): name for chunk in trainer.model for name, parameter in chunk.named_parameters()}
            return SplitResult(
                result=result,
                num_apart=len(apart),
                num_split=num_split(),
                complete={names[key]: parts for key, parts in complete.items()},
            )
        finally:
            trainer.close()


@dataclass(slots=True, kw_only=True)
class Heard:
    """What one step gave on this rank, and what its listener saw.

    Attributes:
        result: losses, norm, and all weights after it.
        seen: by listener and by when it heard (in forwards or in backwards), in this order.
        left: how often the gradient of each weight was left for later, by name.
        said: warnings.
    """

    result: Any
    seen: dict[str, list[Any]]
    left: dict[str, int]
    said: list[str]


@dataclass(slots=True, kw_only=True)
class Ear:
    """Listens to one model until its stack closes."""

    model: Any
    stack: ExitStack = field(default_factory=ExitStack)
    seen: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    @property
    def layers(self) -> list[tuple[str, Any]]:
        """The linear layers that can split, by name."""
        kinds = (ColumnParallelLinear, RowParallelLinear)
        found = [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, kinds)]
        return [(name, layer) for name, layer in found if "output_layer" not in name]

    def hear(self, name: str, *tensors: Any, place: str = "") -> None:
        """Note something; what is heard in forwards apart from backwards, whose order among each other may differ."""
        place = place or ("forward" if torch._C._current_graph_task_id() == -1 else "backward")
        self.seen.setdefault(place, []).append((name, *map(digest, tensors)))

    def hook(self, handle: Any) -> None:
        self.stack.callback(handle.remove)

    def at_outputs(self, listen: Callable[[str, torch.Tensor], Any]) -> None:
        """Call something with each output of a linear layer, in the forward."""

        for name, layer in self.layers:

            def hook(_layer: Any, _inputs: Any, output: Any, name: str = name) -> None:
                if output[0].requires_grad:  # not in the first pass of a recompute
                    listen(name, output[0])

            self.hook(layer.register_forward_hook(hook))

    def at_inputs(self, listen: Callable[[str, torch.Tensor], Any]) -> None:
        for name, layer in self.layers:

            def hook(_layer: Any, given: Any, name: str = name) -> None:
                if given[0].requires_grad:
                    listen(name, given[0])

            self.hook(layer.register_forward_pre_hook(hook))


def digest(value: Any) -> Any:
    """Make what is compared of what a listener saw."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.double().sum().item(), value.double().square().sum().item()
    return tuple(map(digest, value)) if isinstance(value, tuple) else value


def halved(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient * 0.5


def outputs(ear: Ear) -> None:
    """The finding's own case, with a second hook that sees what the first one made of it."""

    def listen(name: str, output: torch.Tensor) -> None:
        output.register_hook(halved)
        output.register_hook(lambda gradient: ear.hear(name, gradient))

    ear.at_outputs(listen)


def outputs_in_place(ear: Ear) -> None:
    ear.at_outputs(lambda _, output: output.register_hook(lambda gradient: gradient.mul_(0.5)))


def inputs(ear: Ear) -> None:
    def listen(name: str, given: torch.Tensor) -> None:
        given.register_hook(halved)
        given.register_hook(lambda gradient: ear.hear(name, gradient))

    ear.at_inputs(listen)


def retained(ear: Ear) -> None:
    """Gradients that stay on inputs and outputs; read after the step."""
    held: list[tuple[str, torch.Tensor]] = []

    def listen(name: str, tensor: torch.Tensor) -> None:
        tensor.retain_grad()
        held.append((name, tensor))

    ear.at_inputs(listen)
    ear.at_outputs(listen)
    ear.stack.callback(lambda: [ear.hear(name, tensor.grad) for name, tensor in held])


def modules(ear: Ear) -> None:
    """Full backward hooks that change what they get, on every module, beside pre-hooks."""

    def hook(name: str) -> Callable[..., Any]:
        def listen(_module: Any, of_inputs: Any, of_outputs: Any) -> Any:
            ear.hear(name, of_inputs, of_outputs)
            return tuple(map(halved, of_inputs))

        return listen

    def pre_hook(name: str) -> Callable[..., Any]:
        def listen(_module: Any, of_outputs: Any) -> Any:
            ear.hear(f"{name} before", of_outputs)
            return tuple(map(halved, of_outputs))

        return listen

    for name, layer in ear.layers:
        ear.hook(layer.register_full_backward_hook(hook(name)))
        ear.hook(layer.register_full_backward_pre_hook(pre_hook(name)))


def modules_the_old_way(ear: Ear) -> None:
    """Hooks of the nodes, which see the gradients of weights, too."""

    def hook(name: str) -> Callable[..., Any]:
        return lambda _module, of_inputs, of_outputs: ear.hear(name, of_inputs, of_outputs)

    for name, layer in ear.layers:
        if isinstance(layer, ColumnParallelLinear):
            layer._is_full_backward_hook = None  # torch remembers the kind of hooks that were removed
            ear.hook(layer.register_backward_hook(hook(name)))
            ear.stack.callback(setattr, layer, "_is_full_backward_hook", None)


def nodes(ear: Ear) -> None:
    """Hooks before and behind the nodes of the layers, which change all gradients."""

    def listen(name: str, output: torch.Tensor) -> None:
        node: Any = output.grad_fn
        for _ in range(2):  # what a row layer returns is summed over its ranks
            if "Linear" not in node.name() and "_Split" not in node.name():
                node = node.next_functions[0][0]

        def before(of_outputs: Any) -> Any:
            ear.hear(f"{name} before", of_outputs)
            return tuple(map(halved, of_outputs))

        def behind(of_inputs: Any, of_outputs: Any) -> Any:
            ear.hear(name, of_inputs, of_outputs)
            return tuple(map(halved, of_inputs))

        node.register_prehook(before)
        node.register_hook(behind)

    ear.at_outputs(listen)


def saved(ear: Ear) -> None:
    """What is kept for backwards: which tensors, how often; and what is given back is another tensor."""
    weights = {id(parameter) for parameter in ear.model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        ear.hear(type(tensor).__name__, id(tensor) in weights, tensor)
        return tensor.detach().clone()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        ear.hear("unpacked", tensor)
        return tensor * 0.5 if tensor.is_floating_point() else tensor

    ear.stack.enter_context(saved_tensors_hooks(pack, unpack))


def saved_on_cpu(ear: Ear) -> None:
    ear.stack.enter_context(save_on_cpu())


def asked(ear: Ear) -> None:
    """Gradients of inputs that a user wants in the forward, by a backward of his own."""

    def listen(name: str, output: torch.Tensor) -> None:
        given = held[name]
        (gradient,) = torch.autograd.grad(output.square().sum(), given, retain_graph=True)
        ear.hear(name, gradient)

    held: dict[str, torch.Tensor] = {}
    ear.at_inputs(held.__setitem__)
    ear.at_outputs(listen)


def several(ear: Ear) -> None:
    """One hook for the outputs of a microbatch's layers, however many these are."""
    held: list[torch.Tensor] = []

    def listen(name: str, output: torch.Tensor) -> None:
        held.append(output)
        if len(held) == len(ear.layers):
            register_multi_grad_hook(held, lambda gradients: ear.hear("all", tuple(gradients)))
            held.clear()

    ear.at_outputs(listen)


def biases(ear: Ear) -> None:
    for name, layer in ear.layers:
        if layer.bias is not None:
            ear.hook(layer.bias.register_hook(halved))
            ear.hook(layer.bias.register_hook(lambda gradient, name=name: ear.hear(name, gradient)))


def accumulators(ear: Ear) -> None:
    """As Megatron's DDP listens: behind the sum of a weight's gradients, in the order of each weight."""
    for name, layer in ear.layers:
        (accumulator, _), *_ = layer.weight.expand_as(layer.weight).grad_fn.next_functions
        ear.hook(accumulator.register_hook(lambda *_, name=name: ear.hear(name, place=name)))
        ear.stack.callback(lambda accumulator: None, accumulator)


def weights(ear: Ear) -> None:
    """On the weights of some layers only."""
    for name, layer in ear.layers:
        if "linear_fc1" in name:
            ear.hook(layer.weight.register_hook(halved))
            ear.hook(layer.weight.register_hook(lambda gradient, name=name: ear.hear(name, gradient)))
            ear.hook(layer.register_full_backward_hook(lambda *_, name=name: ear.hear(name)))


def weights_of_one_rank(ear: Ear) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        weights(ear)


def behind_sums(ear: Ear) -> None:
    """Behind the sum of some weights' gradients."""
    for name, layer in ear.layers:
        if "linear_fc2" in name:

            def hear(weight: Any, name: str = name) -> None:
                ear.hear(name, weight.grad)

            ear.hook(layer.weight.register_post_accumulate_grad_hook(hear))


def several_weights(ear: Ear) -> None:
    """One hook for all parameters of a layer."""
    for name, layer in ear.layers:
        if "linear_qkv" in name:
            for mode in ("all", "any"):

                def hear(gradients: Any, name: str = f"{mode} {name}") -> None:
                    ear.hear(name, gradients if isinstance(gradients, torch.Tensor) else tuple(gradients))

                ear.hook(register_multi_grad_hook([*layer.parameters()], hear, mode=mode))


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized(ear: Ear) -> None:
    """For good: it comes last."""
    for name, layer in ear.layers:
        if "linear_fc1" in name:
            register_parametrization(layer, "weight", _Doubled(), unsafe=True)


def nobody(ear: Ear) -> None:
    """The control."""


SPLIT = {
    one.__name__: one
    for one in (
        *(nobody, outputs, outputs_in_place, inputs, retained, modules, modules_the_old_way, nodes),
        *(saved_on_cpu, asked, several, biases, accumulators, saved),
    )
}
"""Layers that are listened to like this leave the gradients of weights for later all the same."""

WHOLE = {
    "weights": "linear_fc1",
    "weights_of_one_rank": "linear_fc1",
    "behind_sums": "linear_fc2",
    "several_weights": "linear_qkv",
    "parametrized": "linear_fc1",
}
"""Of these only the layers that have this in their name do not."""


def listen(case: Case, names: list[str]) -> dict[str, Heard]:
    """Train a step of a case with each listener in turn."""
    init_gloo()
    alone = {"stock": cpu_only, "mapped": mapped_only}.get(case.execution.plugin)
    with (
        alone() if alone else applied(case, force=False),
        model_parallel(case),
        contextlib.closing(Trainer(case)) as trainer,
    ):
        (model,) = trainer.model
        return {name: _one(trainer, Ear(model=model), globals()[name]) for name in names}


def _one(trainer: Trainer, ear: Ear, listener: Callable[[Ear], None]) -> Heard:
    if trainer.case.execution.schedule == "planned":
        assert _Holder.session is not None
        runner = _Holder.session.running.require_schedule_runner()
        runner.weight_gradients.always_whole = None  # as in the first step
        runner._num_left = 0  # the order stays
    said: list[str] = []
    with _counting(ear.model, said) as left, ear.stack:
        listener(ear)
        losses, _, grad_norm, _ = trainer.step(0)
    parameters = ear.model.named_parameters()
    after = {name.replace("parametrizations.weight.original", "weight"): digest(one) for name, one in parameters}
    return Heard(result=(losses, float(grad_norm), after), seen=ear.seen, left=dict(left), said=said)


@contextlib.contextmanager
def _counting(model: Any, said: list[str]) -> Iterator[Counter[str]]:
    """Count the gradients of weights that are left for later, and note warnings."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left, keep = Counter[str](), WeightGradients.keep

    def counting(self: WeightGradients, weight: torch.Tensor, *args: Any) -> None:
        left[names[id(weight)]] += self.is_keeping
        keep(self, weight, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "keep", counting)
        patch.setattr(log, "warning", said.append)
        yield left


TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def build_adapters() -> None:
    """Build a model on this rank and give its linear layers adapters, with PEFT as it is."""
    init_gloo()
    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=4, use_cpu_initialization=True, persist_layer_norm=False
    )
    with cpu_only(), model_parallel(Case.of(sizes=(1,), plugin="stock")):
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
        _inject(model, config, TARGETS, init_lora_weights=True)


def train_adapters(case: Case, load: str, save: str, targets: Sequence[str] = TARGETS) -> tuple[RankResult, int]:
    """Train adapters only.

    Args:
        case: the run.
        load: folder of a checkpoint of adapters, to begin with; empty for none.
        save: folder for one at the end.
        targets: names of the layers with adapters.

    Returns:
        What this rank saw, and how many weights of the base model it has.

    Raises:
        AssertionError: a weight of the base has changed, or one of an adapter has not.
    """
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(_AdaptedTrainer(case, targets)) as trainer:
        if load:
            loaded = dist_checkpointing.load(_sharded(trainer), load)
            for name, (parameter, _) in _adapters(trainer).items():
                parameter.data.copy_(loaded[name])
            trainer.optimizer.reload_model_params()
        start = {name: parameter.detach().clone() for name, (parameter, _) in _named_parts(trainer.model).items()}
        result = trainer.run()
        # The first stage splits nothing: nobody waits for the gradients of its inputs.
        assert not case.execution.split_backward or num_split() or parallel_state.is_pipeline_first_stage()
        adapters = _adapters(trainer)
        for name, (parameter, _) in _named_parts(trainer.model).items():
            assert torch.equal(parameter, start[name]) != (name in adapters), name
        if save:
            dist_checkpointing.save(_sharded(trainer), save)
        return result, len(start) - len(adapters)


def ask(sizes: tuple[int, ...], targets: Sequence[str | Sequence[str]]) -> list[Any]:
    """Ask which layers the chunk of this rank holds, with and without adapters.

    Args:
        sizes: of the stages.
        targets: what to ask for, one after another; a text starting with "rank" is another one on every rank.

    Returns:
        The answers, and the texts of the errors.
    """
    init_gloo()
    case, answers = Case.of(sizes=sizes), []
    with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
        for wanted in targets:
            text = f"{wanted} {torch.distributed.get_rank()}" if str(wanted).startswith("rank") else wanted
            try:
                answers.append(targets_of_chunks(trainer.model, text))
            except ConfigError as error:
                answers.append(str(error))
        # As PEFT does: the layer goes into the one with adapters.
        layer = trainer.model[0].module.decoder.layers[0].mlp
        layer.linear_fc1 = torch.nn.ModuleDict({"base_layer": layer.linear_fc1, "lora_A": torch.nn.Linear(2, 2)})
        answers.append(targets_of_chunks(trainer.model, ["linear_fc1"]))
    return answers


class _AdaptedTrainer(Trainer):
    def __init__(self, case: Case, targets: Sequence[str]) -> None:
        self._targets = targets
        super().__init__(case)

    def _prepared(self, chunks: list[GPTModel]) -> list[GPTModel]:
        with _mended_peft():
            for chunk, held in zip(chunks, targets_of_chunks(chunks, self._targets), strict=True):
                chunk.requires_grad_(False)
                if not held:
                    continue
                # It would ask for an entry that these layers do not make; the weights are drawn below.
                _inject(chunk, self.config, held, init_lora_weights=False)
                _mend(chunk, is_sharded=self.config.sequence_parallel)
        draw(named_parts(list(chunks)))
        return chunks


def _inject(model: GPTModel, config: TransformerConfig, targets: Sequence[str], *, init_lora_weights: bool) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    adapters: Any = LoraConfig(
        r=4,
        target_modules=list(targets),
        init_lora_weights=init_lora_weights,
        megatron_config=config,
        megatron_core="megatron.core",
    )
    inject_adapter_in_model(adapters, model)


@contextmanager
def _mended_peft() -> Iterator[None]:
    """Give PEFT's function for Megatron's layers the argument that it asks for and that nobody passes."""
    from peft.tuners.lora import model

    original = model.dispatch_megatron
    model.dispatch_megatron = lambda *args, **kwargs: original(*args, **{"fan_in_fan_out": False, **kwargs})
    try:
        yield
    finally:
        model.dispatch_megatron = original


def _mend(model: GPTModel, *, is_sharded: bool) -> None:
    """Let an adapter's parallel half give its output alone; with slices of the sequence, mark the other half.

    Megatron sums the gradients of what is so marked over the ranks of a stage.
    """
    from peft.tuners.lora.tp_layer import LoraParallelLinear

    for module in model.modules():
        if not isinstance(module, LoraParallelLinear):
            continue
        for half in (module.lora_A["default"], module.lora_B["default"]):
            if isinstance(half, ColumnParallelLinear | RowParallelLinear):
                half.register_forward_hook(lambda _module, _args, output: output[0])
            elif is_sharded:
                half.weight.sequence_parallel = True


def _adapters(trainer: Trainer) -> dict[str, Any]:
    return {name: part for name, part in _named_parts(trainer.model).items() if ".lora_" in name}


def _sharded(trainer: Trainer) -> dict[str, ShardedTensor]:
    """Give the adapters as parts of whole ones, for a checkpoint that any stages can read."""
    sharded = {}
    for name, (_, part) in _adapters(trainer).items():
        copy = (part.index if part.dim is None else 0, parallel_state.get_data_parallel_rank())
        where = () if part.dim is None else ((part.dim, part.index, part.count),)
        sharded[name] = ShardedTensor.from_rank_offsets(name, part.tensor, *where, replica_id=(0, *copy))
    return sharded
