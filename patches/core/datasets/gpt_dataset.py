"""`empty-split`: data sets that are too small end a run in one line, not never or with a traceback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment

_WAY_OUT = "take more documents, leave the set out, or give the split 0 in --split"


@replaces("megatron.core.datasets.gpt_dataset:GPTDataset._get_num_epochs", id="empty-split", when=Moment.LIST)
def _count_epochs(original: Callable[[Any, int], int], dataset: Any, num_tokens_per_epoch: int) -> int:
    """Run `_get_num_epochs`; refuse a split without tokens of which samples are wanted.

    Why: it adds the tokens of one epoch until there are enough; of no tokens it does so for ever, and all ranks wait.

    Remove when: Megatron rejects a split without documents.

    Raises:
        ConfigError: there are no tokens.
    """
    config, num_samples = dataset.config, dataset.num_samples
    # Even for no samples Megatron wants the token behind the last one.
    is_asked = num_samples is not None and num_samples * config.sequence_length + config.add_extra_token_to_sequence > 0
    if num_tokens_per_epoch == 0 and is_asked:
        raise ConfigError(
            f"{dataset.dataset_path}; its {dataset.index_split.name} split has none of its "
            f"{dataset.numel_low_level_dataset(dataset.dataset)} documents, and {num_samples} samples are asked of it; "
            f"{_WAY_OUT}"
        )
    return original(dataset, num_tokens_per_epoch)


@replaces("megatron.core.datasets.blended_dataset:BlendedDataset.__init__", id="empty-split/blend", when=Moment.LIST)
def _blend(
    original: Callable[..., None],
    blend: Any,
    datasets: Sequence[Any],
    weights: Sequence[float],
    size: int | None,
    config: Any,
) -> None:
    """Run `BlendedDataset.__init__`; tell in one line which sets it cannot blend.

    Why: a set with no sample, or with fewer than its weight asks for, ends the rank that builds the blend in an
    AssertionError or IndexError that names no set.

    Remove when: with `empty-split`.

    Raises:
        ConfigError: a set has too few samples.
    """
    try:
        original(blend, datasets, weights, size, config)
    except (AssertionError, IndexError) as error:
        sets = ", ".join(f"{dataset.dataset_path} {len(dataset)}" for dataset in datasets)
        raise ConfigError(
            f"blend of samples {sets} with weights {', '.join(f'{weight:g}' for weight in weights)}; every set of the "
            f"{datasets[0].index_split.name} split needs a sample, and as many as its weight asks for; {_WAY_OUT}"
        ) from error
