"""What scripts larger than the example do, for options that need it: timers of stragglers, loaders of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron.training.training as training
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import gpt_dataset
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import StragglerDetector
from megatron.training import get_args


def shorten_documents(facts: dict[str, Any]) -> None:
    """Make up documents that are shorter than a sequence, so that a row has several."""
    gpt_dataset.MockGPTLowLevelDataset.max_sequence_length = 8


def time_stragglers(facts: dict[str, Any]) -> None:
    """Time the model's forward pass, and note which ranks Megatron compares, on rank 0."""
    detector, forward, compare = StragglerDetector(), GPTModel.forward, StragglerDetector._min_max
    facts["stragglers"] = []

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with detector:
            return forward(self, *args, **kwargs)

    def noted(self: Any, *numbers: float) -> Any:
        found = compare(self, *numbers)
        if found is not None and self.rank == 0:
            facts["stragglers"].append(sorted(entry()[1] for entry in found.aflops))
        return found

    GPTModel.forward, StragglerDetector._min_max = timed, noted


def log_predictions_of_one_rank(facts: dict[str, Any]) -> None:
    """Let every rank log its own losses of prediction: Megatron 0.16 averages them in a way that gloo lacks."""
    MTPLossLoggingHelper.reduce_loss_in_tracker = staticmethod(lambda: None)


class _Loader:
    """A loader of a script's own: it knows how far it has read."""

    def __init__(self, rows: Any) -> None:
        self._rows, self._num_read = iter(rows), 0

    def __iter__(self) -> _Loader:
        return self

    def __next__(self) -> Any:
        self._num_read += 1
        return next(self._rows)

    def save_state(self) -> int:
        return self._num_read


def read_by_own_loader(facts: dict[str, Any]) -> None:
    """Read with a loader whose state can be stored, and say where, as scripts with images do."""
    original = training.build_pretraining_data_loader

    def build(dataset: Any, num_consumed: int) -> Any:
        arguments = get_args()
        arguments.dataloader_save = f"{arguments.save}/loader"
        arguments.dataloader_type = "single"
        rows = original(dataset, num_consumed)
        arguments.dataloader_type = "external"
        return None if rows is None else _Loader(rows)

    training.build_pretraining_data_loader = build


def note_params_norms(facts: dict[str, Any]) -> None:
    """Note the norms of all weights that Megatron logs, at full precision."""
    facts["params_norms"] = []
    original = training.calc_params_l2_norm

    def calc_params_l2_norm(*args: Any, **options: Any) -> float:
        norm: float = original(*args, **options)
        facts["params_norms"].append(norm)
        return norm

    training.calc_params_l2_norm = calc_params_l2_norm


def drop_hidden(facts: dict[str, Any]) -> None:
    """Give every model dropout, also one whose script asks for none."""
    original = TransformerConfig.__post_init__

    def post_init(self: Any) -> None:
        self.hidden_dropout = 0.1
        original(self)

    TransformerConfig.__post_init__ = post_init


def keep_logits(facts: dict[str, Any]) -> None:
    """Keep the logits of routers where Megatron takes random ones in their place."""
    moe_utils.apply_random_logits = lambda logits: logits


def note_whole_weights(facts: dict[str, Any]) -> Callable[[], None]:
    """Note, after the run, the weights that every rank of a stage holds whole, and which ranks these are."""
    models: list[Any] = []
    original = training.setup_model_and_optimizer

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        models.extend(result[0])
        return result

    training.setup_model_and_optimizer = noting

    def after() -> None:
        stage: Any = parallel_state.get_tensor_model_parallel_group()
        facts["stage"] = dist.get_process_group_ranks(stage)
        facts["whole"] = {
            f"{chunk} {name}": weight.detach().numpy().copy()
            for chunk, model in enumerate(models)
            for name, weight in model.named_parameters()
            if not getattr(weight, "tensor_model_parallel", False)
        }

    return after
