"""The training script of ``certify``, where the user gives none: a GPT of any flags, on texts that its seed draws.

It is as short as a script of megatron.training can be, and knows nothing of the plugin. It is for Megatron 0.19; of an
older one, whose wheel has no megatron.training, ``certify`` takes the script of its tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class _Texts(torch.utils.data.Dataset[torch.Tensor]):
    """Texts ``[S + 1]``, each drawn from its number."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> torch.Tensor:
        args: Any = get_args()
        generator = torch.Generator().manual_seed(args.seed + number)
        return torch.randint(args.vocab_size, (args.seq_length + 1,), generator=generator)


def _texts(_num_samples: list[int], vp_stage: int | None = None) -> tuple[_Texts, None, None]:
    return _Texts(), None, None


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def _forward_step(texts: Iterator[torch.Tensor] | None, model: Any) -> tuple[torch.Tensor, Any]:
    text = positions = labels = None
    if get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(model, "post_process"):
        assert texts is not None
        text = next(texts).cuda()
        text, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
    return model(text, positions, None, labels=labels), _loss


if __name__ == "__main__":
    _texts.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    args = parse_and_validate_args()
    config: Any = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, _texts, ModelType.encoder_or_decoder, _forward_step)
