"""How long the parts of a model take on one card, timed with Megatron's own layers, loss and optimizer."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch

from vtp_plugin.errors import MissingError
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.host.rules.table.rows_parallelism import SPLIT_RULES
from vtp_plugin.host.versions import find_host
from vtp_plugin.patches.activation import split_layers
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.platform.interface import Platform, alone_in_world
from vtp_plugin.runtime.step.weight_gradients import WeightGradients
from vtp_plugin.session import Session
from vtp_plugin.tune.cluster.machines import Part, Time, scatter

# Enough that what a single layer does besides, as the norm behind the last one, hardly counts.
_NUM_LAYERS = 2
_NUM_WARM = 2
# Only to build an optimizer.
_DEFAULTS = ("--lr", "1e-5", "--train-iters", "1", "--tokenizer-type", "NullTokenizer")
# A CPU has neither the kernels of Apex nor Transformer Engine.
_NO_KERNELS = ("--no-gradient-accumulation-fusion", "--no-persist-layer-norm")
_LAYERS = ("--transformer-impl", "local")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What is timed.

    Attributes:
        words: Megatron's flags.
        sizes: tensor-parallel sizes.
        vocabulary: padded, so that all sizes divide it.
        micro_batch_sizes: samples.
        seq_lengths: tokens of a sample.
        kinds: ``dense`` and ``experts``, which of them the model has.
        num_rounds: number of rounds, of which the median counts.
    """

    words: Sequence[str]
    sizes: Sequence[int]
    vocabulary: int
    micro_batch_sizes: Sequence[int]
    seq_lengths: Sequence[int]
    kinds: Sequence[Part]
    num_rounds: int


class Timed(NamedTuple):
    """What was timed together.

    Attributes:
        times: the times of the parts.
        rounds_s: what each round took; of several ways to run a microbatch, those of the way that scatters most.
    """

    times: list[Time]
    rounds_s: Sequence[float]


def time_parts(asked: ProfileRequest, session: Session) -> Iterator[Timed]:
    """Yield the times of all parts, case after case; the peers of a tensor-parallel size do not exist.

    Args:
        asked: what is timed.
        session: the applied plugin, which knows the card.
    """
    platform = session.choose_platform()
    host = load_host(find_host()[0].name)
    can_split = host.mindspeed is None or not any(host.mindspeed.problems_of_split())
    if can_split:
        split_layers(session, host)
    for tp in asked.sizes:
        args = _read([*_needed_on(platform, asked.words), *asked.words], tp)
        with _alone(tp, platform):
            for kind in asked.kinds:
                own = _of_part(args, asked.vocabulary, kind)
                short = _ShortModel(own, kind, session, has_ends=kind == asked.kinds[0], can_split=can_split)
                for length, size, is_recomputed in _cases(asked):
                    yield short.times(length, size, asked.num_rounds, is_recomputed=is_recomputed)
                if short.has_ends:
                    yield short.update(asked)


def num_cases(asked: ProfileRequest) -> int:
    """Count what :func:`time_parts` yields."""
    return len(asked.sizes) * (1 + len(asked.kinds) * len([*_cases(asked)]))


def _cases(asked: ProfileRequest) -> Iterator[tuple[int, int, bool]]:
    return product(asked.seq_lengths, asked.micro_batch_sizes, (False, True))


def _needed_on(platform: Platform, words: Sequence[str]) -> list[str]:
    """List Megatron's flags without which its layers cannot be built on a device; what the user gives goes before."""
    if platform.name != "cpu":
        return []
    is_given = any(word.partition("=")[0] == _LAYERS[0] for word in words)
    return [*_NO_KERNELS, *(() if is_given else _LAYERS)]


def _read(words: Sequence[str], tp: int) -> argparse.Namespace:
    """Read Megatron's flags as a run of one stage does.

    Raises:
        MissingError: there is no ``megatron.training``.
    """
    try:
        from megatron.training.arguments import parse_args, validate_args
        from megatron.training.global_vars import set_args
    except ImportError as error:
        raise MissingError(
            f"profile builds layers as megatron.training does: {error}; put the Megatron-LM of the run on PYTHONPATH"
        ) from None
    of_a_run = {"RANK": "0", "WORLD_SIZE": str(tp), "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    before, argv = {name: os.environ.get(name) for name in of_a_run}, sys.argv
    os.environ.update(of_a_run)
    sys.argv = ["profile", *_DEFAULTS, *words, "--tensor-model-parallel-size", str(tp)]
    try:
        args = parse_args()
        validate_args(args, {})
    finally:
        sys.argv = argv
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    set_args(args)
    return args


def _of_part(args: argparse.Namespace, vocabulary: int, kind: Part) -> argparse.Namespace:
    """Give the arguments of a short model whose layers are of one kind."""
    own = copy.copy(args)
    own.padded_vocab_size = vocabulary
    own.num_layers = own.encoder_num_layers = _NUM_LAYERS
    own.moe_layer_freq = [int(kind == "experts")] * _NUM_LAYERS
    # Routers that know nothing yet would send most tokens to a few experts.
    own.moe_router_force_load_balancing = kind == "experts"
    return own


@contextmanager
def _alone(tp: int, platform: Platform) -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel

    with alone_in_world(tp, platform.name):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


class _ShortModel:
    """A short model that is timed.

    Args:
        args: its arguments.
        kind: kind of its layers.
        session: the applied plugin, which knows the card.
        has_ends: time the ends of the model, too.
        can_split: linear layers can leave the gradients of their weights for later, if the arguments allow it.
    """

    def __init__(
        self, args: argparse.Namespace, kind: Part, session: Session, *, has_ends: bool, can_split: bool
    ) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.utils import get_attr_wrapped_model, get_model_config
        from megatron.training.global_vars import set_args
        from megatron.training.training import get_model

        set_args(args)
        self.has_ends = has_ends
        self._args = args
        self._kind: Part = kind
        self._device = session.choose_platform().device()
        self._watch = _Stopwatch(session.choose_platform())
        (self._model,) = get_model(lambda **ends: _build(args, **ends), ModelType.encoder_or_decoder)
        self._model.train()
        self._waiting = session.pipelines.weight_gradients if can_split and _can_split(args, self._model) else None
        self._config = get_model_config(self._model)
        decoder = get_attr_wrapped_model(self._model, "decoder")
        decoder.register_forward_pre_hook(self._watch.before_layers, with_kwargs=True)
        decoder.register_forward_hook(self._watch.behind_layers)

    def times(self, length: int, size: int, num_rounds: int, *, is_recomputed: bool) -> Timed:
        """Give the times of the parts; of the ends, which no layer changes, only once."""
        self._recompute(is_recomputed)
        found = self._medians(size, length, num_rounds, None)
        rounds_s = self._watch.rounds_s
        weights_s = None
        if self._waiting is not None:
            apart = self._medians(size, length, num_rounds, self._waiting)
            both_s = apart["layers backward"] + apart["layers weights"]
            weights_s = found["layers backward"] * apart["layers weights"] / both_s / _NUM_LAYERS
            rounds_s = max(rounds_s, self._watch.rounds_s, key=scatter)
        parts: list[tuple[Part, str, int]] = [(self._kind, "layers", _NUM_LAYERS)]
        if self.has_ends and not is_recomputed:
            parts.append(("embedding", "embedding", 1))
            parts.append(("head", "head", 1))
        times = [
            Time(
                part=part,
                tp=self._args.tensor_model_parallel_size,
                micro_batch_size=size,
                seq_length=length,
                is_recomputed=is_recomputed,
                forward_s=found[f"{name} forward"] / number,
                backward_s=found[f"{name} backward"] / number,
                weights_s=weights_s if name == "layers" else None,
            )
            for part, name, number in parts
        ]
        return Timed(times, rounds_s)

    def _recompute(self, is_recomputed: bool) -> None:
        """Let whole layers run forward again or not; what else runs again stays as the flags say."""
        config, asked = self._config, self._args.recompute_granularity
        if is_recomputed and asked != "full":
            config.recompute_method, config.recompute_num_layers = "uniform", 1
        config.recompute_granularity = "full" if is_recomputed else None if asked == "full" else asked

    def _medians(self, size: int, length: int, num_rounds: int, waiting: WeightGradients | None) -> dict[str, float]:
        """Run microbatches forward and backward, with ``waiting`` split, and give the median of what each part took."""
        from vtp_plugin.patches.core.pipeline_parallel.planned_step import whole_weights

        whole, unsplit = whole_weights(self._model), nullcontext()
        tokens = torch.randint(self._args.padded_vocab_size, (size, length), device=self._device)
        positions = torch.arange(length, device=self._device).expand(size, -1)
        mask = None
        if getattr(self._args, "create_attention_mask_in_dataloader", True):
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=self._device).triu(1)
        for _ in range(_NUM_WARM + num_rounds):
            # Gradients are summed over replicas after the last microbatch only.
            with self._model.no_sync():
                self._watch.start()
                with unsplit if waiting is None else waiting.forward(whole):
                    losses = self._model(tokens, positions, mask, labels=tokens)
                loss = losses.float().mean()
                self._watch.note("head forward")
                with unsplit if waiting is None else waiting.backward(0, 0, whole):
                    loss.backward()
                self._watch.note("embedding backward")
                if waiting is not None:
                    waiting.compute(0, 0)
                    self._watch.note("layers weights")
        return self._watch.medians(num_rounds)

    def update(self, asked: ProfileRequest) -> Timed:
        """Time the optimizer for each million of parameters."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        args = self._args
        known = {field.name for field in dataclasses.fields(OptimizerConfig) if field.init} & set(vars(args))
        optimizer = get_megatron_optimizer(
            OptimizerConfig(**{name: getattr(args, name) for name in known}),
            [self._model],
            use_gloo_process_groups=False,
        )
        for _ in range(_NUM_WARM + asked.num_rounds):
            self._watch.start()
            optimizer.step()
            self._watch.note("update")
        seconds = self._watch.medians(asked.num_rounds)["update"]
        numel = sum(parameter.numel() for parameter in self._model.parameters())
        time_of_update = Time(
            part="update",
            tp=args.tensor_model_parallel_size,
            micro_batch_size=asked.micro_batch_sizes[0],
            seq_length=asked.seq_lengths[0],
            forward_s=1e6 * seconds / numel,
            backward_s=0.0,
        )
        return Timed([time_of_update], self._watch.rounds_s)


class _Stopwatch:
    """Notes when the device is done with each part; the hooks of the layers stop it, too.

    Attributes:
        rounds_s: what all parts of each round took, of the rounds of the last medians.
    """

    def __init__(self, platform: Platform) -> None:
        self.rounds_s: list[float] = []
        self._module = platform.module()
        self._took_s: defaultdict[str, list[float]] = defaultdict(list)
        self._last_s = 0.0

    def start(self) -> None:
        self._module.synchronize()
        self._last_s = time.perf_counter()

    def note(self, part: str) -> None:
        """Say that a part has ended now."""
        begin_s = self._last_s
        self.start()
        self._took_s[part].append(self._last_s - begin_s)

    def medians(self, number: int) -> dict[str, float]:
        """Give the medians of the last so many notes of each part, and forget all."""
        last = {part: each[-number:] for part, each in self._took_s.items()}
        found = {part: statistics.median(each) for part, each in last.items()}
        self.rounds_s = [*map(sum, zip(*last.values(), strict=False))]
        self._took_s.clear()
        return found

    def before_layers(self, _block: torch.nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        self.note("embedding forward")
        kwargs["hidden_states"].register_hook(lambda _gradient: self.note("layers backward"))

    def behind_layers(self, _block: torch.nn.Module, _args: Any, output: Any) -> None:
        self.note("layers forward")
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda _gradient: self.note("head backward"))


def _can_split(args: argparse.Namespace, model: torch.nn.Module) -> bool:
    """Tell whether a run with these arguments may leave the gradients of weights for later."""
    from vtp_plugin.patches.core.tensor_parallel.layers import layers_that_cannot_split

    context = OptionContext(tp_sizes=(args.tensor_model_parallel_size,), has_split_backward=True)
    refused = any(rule.refuses(args, context) for rule in SPLIT_RULES)
    return not (refused or any(layers_that_cannot_split([model])))


def _build(args: argparse.Namespace, **ends: Any) -> torch.nn.Module:
    """Build a GPT as Megatron's ``gpt_builders`` do, of Transformer Engine's or of local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    has_engine = args.transformer_impl == "transformer_engine"
    options = {"normalization": args.normalization, "qk_l2_norm": getattr(args, "qk_l2_norm", False)}
    known = inspect.signature(get_gpt_decoder_block_spec).parameters
    spec = get_gpt_decoder_block_spec(
        config, has_engine, **{name: value for name, value in options.items() if name in known}
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=ends["pre_process"],
        post_process=ends["post_process"],
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
    )
