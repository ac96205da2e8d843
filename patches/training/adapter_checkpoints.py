"""`adapters/stored`: checkpoints of adapters alone, and of a base that knows none.

Of a run with ``--vtp-lora-rank``: what is written, what is asked of a checkpoint, and which base lies below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vtp_plugin.checkpoint.format.resolver import asked_at_start
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.serialization import index_of
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.model.lora import is_adapter, lora_of, matrices_of
from vtp_plugin.session import Session
from vtp_plugin.util.undo import replaced

_OPTIMIZER = ("optimizer.", "chained_")


@replaces(
    "megatron.training.checkpointing:generate_state_dict",
    id="adapters/stored",
    when=Moment.LORA,
    versions=">=0.19,<0.20",
    why="it writes the frozen base with every checkpoint, and asks a base for adapters, and adapters for a base",
    remove_when="Megatron saves what is trained alone, and loads a base below it",
)
def _generate(session: Session, original: Callable[..., dict[str, Any]], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Run `generate_state_dict`; keep adapters alone for a save, and for a load what the checkpoint holds.

    Raises:
        ConfigError: the checkpoint holds adapters alone, and no base was loaded.
    """
    state = original(args, *rest, **kwargs)
    if (kwargs.get("optim_sd_kwargs") or {}).get("is_loading"):
        has_base, has_adapters = _stored_parts(session)
        if not has_base and args.pretrained_checkpoint is None:
            raise ConfigError(
                f"checkpoint {args.load} holds adapters alone; without their base the model is a random one; give its "
                "folder as --pretrained-checkpoint"
            )
    else:
        has_base, has_adapters = session.config.lora_save_base, True
    for name in (name for name in state if name.startswith("model")):
        wanted = {key: value for key, value in state[name].items() if (has_adapters if is_adapter(key) else has_base)}
        state[name] = wanted
    return state


def _stored_parts(session: Session) -> tuple[bool, bool]:
    """Tell whether the checkpoint that is being loaded holds a base, and whether it holds adapters."""
    asked = session.loading.asked
    assert asked is not None and asked.checkpoint is not None
    index = index_of(session, asked.checkpoint)
    if index is None:  # of the old format, which adapters are never written in
        return True, False
    keys = [key for key in index.tensors if not key.startswith(_OPTIMIZER)]
    return any(not is_adapter(key) for key in keys), any(map(is_adapter, keys))


def load_base_first(session: Session, args: Any, load: Callable[..., Any]) -> None:
    """Load the base of adapters that a run goes on with; do nothing where there is no other folder than one.

    Args:
        session: the applied plugin.
        args: Megatron's arguments.
        load: loads a checkpoint from the folder that an argument names.
    """
    if session.config.lora is None or args.pretrained_checkpoint is None:
        return
    if asked_at_start(args).load_dir != args.load:
        return  # Megatron loads the base by itself: there is nothing else yet.
    with replaced(args, finetune=True, ckpt_step=None):
        load(load_arg="pretrained_checkpoint")


def problems_of_adapters(folder: str | None, args: Any, stored: Any) -> Iterator[str]:
    """Yield a line for each way in which a checkpoint's adapters are not those of a run.

    Args:
        folder: of checkpoints.
        args: Megatron's arguments.
        stored: those of the run that wrote the checkpoint; None where they are not stored.
    """
    there, here = ({} if each is None else vars(each) for each in (stored, args))
    then, now = lora_of(there), lora_of(here)
    if then is None:
        return
    if now is None:
        yield (
            f"checkpoint {folder} holds adapters of rank {then.rank}; this run has none and would leave them out; give "
            "--vtp-lora-rank and the flags beside it, or merge them with checkpoint export --merge"
        )
        return
    num_layers, model = args.num_layers or 0, matrices_of(here)
    for flag, one, other in (
        ("rank", then.rank, now.rank),
        ("alpha", then.alpha, now.alpha),
        ("targets", *(" ".join(each.published for each in lora.pairs(model)) for lora in (then, now))),
        ("layers", then.layer_numbers(num_layers), now.layer_numbers(num_layers)),
    ):
        if one != other:
            yield (
                f"checkpoint {folder} has adapters with --vtp-lora-{flag} {one}, this run {other}; they are others; "
                "give the flag as it was"
            )
