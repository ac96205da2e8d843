"""MindSpeed-MM's layout of two rings: what of its model is not in the chunks' configurations, and what crosses first.

With vision layers in the cloud a microbatch goes round twice. In the first ring the vision tower's activations cross,
as wide as the tower and as long as a microbatch has patches; beside them go the sizes of its pictures.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules.checks.batch import most_tokens
from vtp_plugin.patches.mindspeed import known_mm, mm_data
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.layer_lists import first_layer, read_rows
from vtp_plugin.plan.layout.u_layers import FirstRing
from vtp_plugin.runtime.step.companion_tensors import Companion, CompanionError
from vtp_plugin.session import Session

# So many patches beside each other become one token, in Qwen's encoders.
_MERGED = 2


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Say which options do not go with vision layers in the cloud.

    Args:
        args: arguments of the run.
    """
    if args.sequence_parallel:
        yield (
            "--sequence-parallel with vision layers in the cloud; MindSpeed-MM would cut what a vision chunk of the "
            "cloud takes before it has come; leave it out, or keep the vision encoder on the edge"
        )
    if getattr(args, "encoder_dp_balance", False):
        yield (
            "--encoder-dp-balance with vision layers in the cloud; it changes which pictures a replica sees after "
            "their sizes were sent there; leave it out"
        )


def learn_first_ring(session: Session, vision: Any) -> None:
    """Note what the chunks do not say of the first ring: they have the language model's configuration.

    Args:
        session: the applied plugin.
        vision: what the JSON file says of the vision encoder.
    """
    is_counted = known_mm.counts_layers_wrong()
    # Where its JSON does not say it, MindSpeed-MM freezes the encoder, too.
    is_trained = not getattr(vision, "freeze", True)
    session.learn(first_ring=FirstRing(width=vision.hidden_size, is_trained=is_trained, is_counted=is_counted))
    full = getattr(vision, "fullatt_block_indexes", None)
    if is_counted and full and getattr(vision, "window_attn_size", None):
        before = first_layer(read_rows(vision.pipeline_num_layers), stage=0, chunk=1)
        session.learn(
            note=f"vision layers {','.join(map(str, full))} have full attention, as fullatt_block_indexes says; "
            f"MindSpeed-MM counts none of the {before} layers before the edge's second chunk, and would take others; "
            "that is corrected here"
        )


def grids(args: argparse.Namespace) -> Companion:
    """Say how the sizes of a microbatch's pictures cross, by which vision layers in the cloud know their neighbours.

    Args:
        args: arguments of the run.
    """
    most = args.seq_length * args.micro_batch_size  # a picture has a token at least
    tokens = mm_data.has_own_lengths(args) and most_tokens(args) or most
    merged = getattr(args.mm.model.image_encoder.vision_encoder, "spatial_merge_size", _MERGED)
    return Companion(
        kind=MessageKind.GRIDS,
        shape=(most, 1, 3),
        read=functools.partial(_read, most, tokens=tokens, merged=merged),
        give=functools.partial(_give, tokens=tokens, merged=merged),
        unit="batch",
        says="how large its pictures are",
        way_out="read one batch in every forward, as pretrain_vlm.py does",
        chunks=frozenset({0}),
    )


def sizes_of_pictures(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return frames, rows and columns of each picture or video of a batch, in patches; None if it has none."""
    return batch.get("video_grid_thw" if "video_grid_thw" in batch else "image_grid_thw")


def _read(most: int, batch: Mapping[str, Any], *, tokens: int, merged: int) -> torch.Tensor:
    """Take the sizes of the pictures from the batch that only the edge has."""
    found = sizes_of_pictures(batch)
    number = 0 if found is None else len(found)
    if found is None or not 0 < number <= most:
        raise ConfigError(
            f"a batch of {number} pictures; with vision layers in the cloud every microbatch has one at least, and at "
            f"most as many as tokens ({most}); give a sample without one a white picture whose tokens are masked, as "
            "MindSpeed-MM's collator does"
        )
    if not _are_sizes(found, tokens, merged):
        raise ConfigError(
            f"a batch whose pictures have other sizes than its {tokens} tokens allow; {_rule(tokens, merged)}; make "
            "the pictures smaller, or raise --seq-length"
        )
    rows = torch.zeros(most, 1, 3, dtype=torch.int32)
    rows[:number, 0] = found
    return rows


def _are_sizes(sizes: torch.Tensor, tokens: int, merged: int) -> bool:
    """Tell whether a microbatch of so many tokens may have pictures of these sizes.

    >>> [_are_sizes(torch.tensor([size]), 6, 2) for size in ((1, 4, 6), (2, 4, 6), (1, 3, 8), (1, -4, -6))]
    [True, False, False, False]
    """
    # On the CPU, which all devices can wait for; products of large integers would overflow.
    sizes = sizes.cpu()
    patches = sizes.double().prod(1).sum()
    is_whole = ((sizes > 0).all(1) & (sizes[:, 1:] % merged == 0).all(1)).all()
    return bool(is_whole & (patches > 0) & (patches <= tokens * merged**2))


def _rule(tokens: int, merged: int) -> str:
    return (
        f"a token stands for {merged} by {merged} patches, so together they have {tokens * merged**2} at most, in rows "
        f"and columns of multiples of {merged}"
    )


def _give(rows: torch.Tensor, tokens: int | None = None, merged: int = _MERGED) -> dict[str, Any]:
    """Give what the script reads for a vision chunk of the cloud: sizes, and pixels of which only the number counts.

    Args:
        rows: what has come, `[S B, 1, 3]`.
        tokens: number of tokens that a microbatch has at most; None for one to each row.
        merged: so many rows and columns of patches become one of tokens.

    Raises:
        CompanionError: the tokens would not do for the pictures.
    """
    found = rows[:, 0].long()
    found = found[(found != 0).any(1)]
    tokens = tokens or len(rows)
    if not _are_sizes(found, tokens, merged):
        raise CompanionError("sizes of pictures that cannot be", _rule(tokens, merged))
    pixels = torch.zeros(int(found.prod(1).sum()), 1, device=rows.device)
    return {"input_ids": None, "pixel_values": pixels, "image_grid_thw": found}
