"""What the families before 0.17 share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_type

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.hosts.shared import NotedMetrics
from vtp_plugin.patches.patch_set import Moment


class OlderHost(NotedMetrics):
    """A family before 0.17."""

    needs_device_first = True

    def backward_arguments(self, model: Any, config: Any) -> tuple[Any, ...]:
        return get_model_type(model), config


@replaces("megatron.legacy.fused_kernels:load", id="fused-kernels", when=Moment.CPU)
def _load(original: Callable[[Any], None], args: Any) -> None:
    """Replace `load` by nothing: on CPU no fused kernel is used.

    Why: start-up calls nvcc to find out its version, also where no fused kernel is asked for.

    Remove when: Megatron 0.16 is no longer supported.
    """
