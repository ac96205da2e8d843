"""PEFT's adapters in models of Megatron's local layers: as PEFT is, and mended, in pipelines of any stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.multiproc.cases import experts
from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import Trainer, _named_parts, applied, cpu_only, model_parallel
from tests.multiproc.jobs.split_job import num_split
from tests.support.pool import init_gloo
from vtp_plugin.adapters import targets_of_chunks
from vtp_plugin.errors import ConfigError

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


def train(case: Case, load: str, save: str, targets: Sequence[str] = TARGETS) -> tuple[RankResult, int]:
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
        experts.draw(_named_parts(chunks))
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
