"""Megatron 0.15 and 0.16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.hosts.before_0_17 import OlderHost
from vtp_plugin.patches.hosts.since_0_15 import GroupedHost, edge_alone
from vtp_plugin.patches.patch_set import Moment


class Megatron016(OlderHost, GroupedHost):
    """Megatron 0.15 and 0.16."""

    name = "0.16"
    stores_states_by_replica = True

    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        return edge_alone()


HOST = Megatron016


@replaces("megatron.core.transformer.moe.moe_utils:router_gating_linear", id="router-without-te", when=Moment.PLATFORM)
def _gate(
    original: Callable[..., torch.Tensor],
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    router_dtype: torch.dtype,
) -> torch.Tensor:
    """Run `router_gating_linear`; without Transformer Engine as a plain linear layer in the router's type.

    Why: without Transformer Engine it fails for every router: a name that it asks for is not defined.

    Remove when: Megatron 0.16 is no longer supported.

    Args:
        original: Megatron's function.
        inp: tokens `[S, B, H]`.
        weight: weight of the router `[E, H]`.
        bias: bias of the router `[E]`, or None.
        router_dtype: type of the product and the result.
    """
    if moe_utils.HAVE_TE:
        return original(inp, weight, bias, router_dtype)
    wide = None if bias is None else bias.to(router_dtype)
    return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), wide)
