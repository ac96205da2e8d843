"""`adapters`: every chunk of a GPT is frozen and gets adapters (LoRA) as it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.lora_layers import add_adapters
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session

_SEED = 1234  # as Megatron's --seed


@replaces(
    "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
    id="adapters",
    when=Moment.LORA,
    why="the last point before a script's model is wrapped and its parameters are put into buffers, which frozen ones "
    "do not enter",
    remove_when="Megatron-core's own adapters are released and do not depend on the sizes",
)
def _build(session: Session, original: Callable[..., None], chunk: Any, *args: Any, **kwargs: Any) -> None:
    """Build a `GPTModel`, freeze it, and give it the adapters of the run."""
    original(chunk, *args, **kwargs)
    lora = session.config.lora
    assert lora is not None
    seed = _SEED
    if session.has_arguments:
        from megatron.training import get_args

        seed = get_args().seed
    add_adapters(chunk, lora, seed=seed)
