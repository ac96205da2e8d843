"""`cpu-norm`, CPU only: the plain norm under sequence parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment


@replaces("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", id="cpu-norm", when=Moment.CPU)
def _new(original: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `WrappedTorchNorm.__new__` as without sequence parallelism, then mark the weights as sequence-parallel.

    Why: it does not support sequence parallelism, and the other norms need a GPU; a norm acts on single rows, so it
    only lacks the mark by which Megatron sums the weights' gradients over the stage.

    Remove when: WrappedTorchNorm supports sequence parallelism.
    """
    if not config.sequence_parallel:
        return original(cls, config, *args, **kwargs)
    plain_config = copy.copy(config)
    plain_config.sequence_parallel = False
    norm = original(cls, plain_config, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm
