"""Linear layers: split backwards, and weights that the edge draws."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.step.keyed_draws import keyed_seed
from vtp_plugin.session import Session


@contextmanager
def drawing_edge(session: Session) -> Iterator[None]:
    """Let what this rank draws meanwhile follow from the edge's key; do nothing outside such an edge.

    The first time also Megatron's random states get seeds that follow from it, as many and as different as they were:
    masks of dropout are drawn from them.
    """
    with session.edge_seed.drawing() as is_first:
        if is_first:
            assert session.edge_seed.root is not None
            _key_states(session.edge_seed.root)
        yield


def _key_states(root: bytes) -> None:
    # Its names stand in Megatron's code for any accelerator.
    device: Any = torch.cuda
    tracker: Any = get_cuda_rng_tracker()
    keyed = {}
    seed = device.initial_seed()
    for name, state in tracker.get_states().items():
        if isinstance(state, torch.Generator):  # of CUDA graphs, which keep the object
            state.manual_seed(keyed_seed(root, _label(state.get_state())))
            keyed[name] = state
        else:
            device.manual_seed(keyed_seed(root, _label(state)))
            keyed[name] = device.get_rng_state()
    if keyed:
        tracker.set_states(keyed)
    # By its seed: how far it has moved since depends on the size of a stage.
    device.manual_seed(keyed_seed(root, str(seed).encode()))


def _label(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().tolist())


_NAME = "linear_with_grad_accumulation_and_async_allreduce"


_Whole: Any = layers.LinearWithGradAccumulationAndAsyncCommunication
# What its forward takes after input, weight and bias.
_OPTIONS = tuple(inspect.signature(_Whole.forward).parameters)[4:]
_DEFAULTS = {"grad_output_buffer": None, "wgrad_deferral_limit": 0, "tp_group": None, "gtp_remat_size": 1}


@replaces(
    f"megatron.core.tensor_parallel.layers:{_NAME}",
    id="split-backward",
    when=Moment.SPLIT,
    aliases=(f"megatron.core.tensor_parallel:{_NAME}",),
)
def _linear(
    session: Session,
    original: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a linear layer; in a forward whose backward is split as a function of our own.

    Why: its backward computes the gradients of the input, for which the stage before waits, and of the weight, for
    which nobody waits before the step ends, at once.

    Remove when: Megatron's linear layers leave the gradients of weights for later.

    Megatron's own layers give all options by name. Under autocast, whose types a backward takes over, backwards are
    whole.
    """
    waiting = session.pipelines.weight_gradients
    if args or torch.is_autocast_enabled("cuda") or not waiting.is_left_for_later(weight, input):
        return original(input, weight, bias, *args, **kwargs)
    options = {**_DEFAULTS, **kwargs}
    if options["tp_group"] is None:
        options["tp_group"] = get_tensor_model_parallel_group()
    # In the place of gradient_accumulation_fusion, which is off: hooks see as many gradients as otherwise.
    _, *rest = (options[name] for name in _OPTIONS)
    # A leaf in the place of the weight; it gets a gradient only where a backward computes that at once.
    entry = weight.detach().requires_grad_()
    return _Split.apply(input, entry, bias, (weight, entry, waiting), *rest)


def _keep_whole(node: Any, hook: Callable[..., Any]) -> Any:
    """Register a hook on the node of a layer, which sees all gradients that the layer gives: they come at once."""
    node.is_whole = True
    return torch.autograd.function.BackwardCFunction.register_hook(node, hook)


def _noticing_hooks(cls: Any) -> Any:
    cls._backward_cls.register_hook = _keep_whole
    return cls


@_noticing_hooks
class _Split(torch.autograd.Function):
    """Megatron's linear layer; its backward leaves the gradient of the weight for later.

    It saves what Megatron's saves, and its backward gets what Megatron's gets, after the hooks of users.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, entry: torch.Tensor, bias: Any, use: Any, *options: Any
    ) -> torch.Tensor:
        ctx.use, ctx.is_whole = use, False
        return _Whole.forward(ctx, inputs, use[0], bias, False, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parameter, entry, waiting = ctx.use
        (gradient,), (inputs, weight) = gradients, ctx.saved_tensors
        own = SimpleNamespace(**vars(ctx), saved_tensors=(inputs, weight))
        if ctx.is_whole or not waiting.is_keeping:
            waiting.take(entry, parameter)
            return _Whole.backward(own, gradient)
        # Megatron's function leaves the gradient of a weight out where that of an output layer is deferred, with fused
        # accumulation. A detached weight has no gradient to add to, so nothing is fused.
        own.saved_tensors, own.main_grad, own.use_bias = (inputs, weight.detach()), None, False
        own.gradient_accumulation_fusion, own.grad_output_buffer, own.wgrad_deferral_limit = True, list[Any](), 0
        of_input, _, _, *nothing = _Whole.backward(own, gradient)
        del own.saved_tensors, own.grad_output_buffer
        # Not where a user asks, in a forward that runs again, for the gradient of something else.
        if torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
            waiting.keep(parameter, partial(_of_weight, own), inputs, gradient)
        return of_input, None, _rows(gradient, gradient)[0].sum(dim=0) if ctx.use_bias else None, *nothing


_rows: Any = layers.prepare_input_tensors_for_wgrad_compute


def _of_weight(layer: Any, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a weight by the same operations as Megatron's layer."""
    if layer.sequence_parallel:
        inputs = gather_from_sequence_parallel_region(inputs, group=getattr(layer, "tp_group", None))
    gradient, inputs = _rows(gradient, inputs)
    return gradient.t().matmul(inputs)


def layers_that_cannot_split(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Yield one line for a model with layers of Transformer Engine, whose backwards are whole."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        has_weight = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if has_weight and "transformer_engine" in type(module).__module__:
            yield (
                f"--vtp-split-backward with a model of {type(module).__name__}: only Megatron's own linear layers "
                "leave gradients of weights for later; build the model of these, or leave --vtp-split-backward out"
            )
            return
