"""`mimo-optimizer`: modules whose gradients would be averaged over different numbers of replicas are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.layout.stage_grid import StageRanks
from vtp_plugin.session import Session


@replaces(
    "megatron.core.models.mimo.optimizer:get_mimo_optimizer",
    id="mimo-optimizer",
    when=Moment.BRIDGES,
    versions=">=0.19,<0.20",
)
def _check_averages(session: Session, original: Callable[..., Any], mimo_model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `get_mimo_optimizer`, once all ranks know that the modules' gradients fit together.

    Why: each module averages its gradients over its own replicas, but all come from one loss: of an encoder with other
    replicas than the language model they would be wrong by a factor, silently.

    Remove when: Megatron rejects it.

    Raises:
        ConfigError: they do not; on all ranks.
    """
    grids = mimo_model.mimo_config.module_to_grid_map
    if not grids:
        return original(mimo_model, *args, **kwargs)
    # The stage with the loss is the language model's last one; any other stage may have other replicas.
    loss = grids[MIMO_LANGUAGE_MODULE_KEY]
    loss = loss.boundary(is_last=True) if isinstance(loss, StageRanks) else loss

    def check() -> dict[str, object]:
        own = {MIMO_LANGUAGE_MODULE_KEY: mimo_model.language_model, **dict(mimo_model.modality_submodules.items())}
        is_summed = bool(mimo_model.config.calculate_per_token_loss)
        wanted = 1 if is_summed else _num_replicas(loss)
        for name, module in own.items():
            # Gradients that Megatron does not add up it does not average either.
            if not hasattr(module, "ddp_config"):
                continue
            divisor = 1 if module.config.calculate_per_token_loss else _num_replicas(grids[name])
            if divisor != wanted:
                raise ConfigError(
                    f"the gradients of module {name!r} would be divided by {divisor}, those of the language model, "
                    f"which has the loss, by {wanted}: the number of replicas, or 1 with calculate_per_token_loss; "
                    "set calculate_per_token_loss=True in the configs of all modules, and divide by the number of "
                    "tokens in finalize_model_grads_func"
                )
        return {}

    members = sorted(
        {rank for grid in grids.values() for rank in range(grid.rank_offset, grid.rank_offset + grid.size)}
    )
    session.ranks.agreement("the optimizer of the modules", members)(check)
    return original(mimo_model, *args, **kwargs)


def _num_replicas(grid: Any) -> int:
    """Return by how many Megatron divides on this rank."""
    sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
    return sizes.get("dp", 1) * sizes.get("cp", 1)
