"""`empty-chunks/get-model`, `data-iterators`: stages have different numbers of chunks, and only the first has data.

`training-log`: the log. `packed-length-stats`: the lengths of packed samples, as the log counts them.
`skipped-iterations`: iterators that Megatron reads, or stores, itself. `evaluation-batch-size`: microbatches of
evaluation. `early-evaluation`: evaluation before fp16 has found its scale.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.elastic.progress import Progress
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import Writes, replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.training.builders_world import among_builders
from vtp_plugin.runtime.step.step_times import LoggedSteps, StepSums
from vtp_plugin.session import Session
from vtp_plugin.trace.stretches import Cause
from vtp_plugin.util import log
from vtp_plugin.util.undo import Name, UndoStack


@replaces(
    "megatron.training.training:consume_seqlen_stats_in_iteration",
    id="packed-length-stats",
    when=Moment.LIST,
    unneeded={"<0.18": "it counts no lengths of packed samples"},
)
def _sum_lengths(session: Session, original: Callable[[], Any]) -> tuple[float | None, float | None]:
    """Run `consume_seqlen_stats_in_iteration` for unequal stages: what the leaders with the loss have seen counts.

    Why: it sums the lengths of packed samples over all ranks that have seen some, and divides by this stage's numbers
    of ranks: unequal stages find different sums, and a rank without lengths lets the others hang.

    Remove when: the sum is taken over the ranks of one stage.
    """
    if not session.is_active or not session.planned.has_packed_rows:
        return original()
    from megatron.training import training

    planned = session.planned
    seen = training._seqlen_stats_in_iteration
    counted = torch.zeros(2, dtype=torch.float64, device=planned.platform.device())
    own = planned.own
    if seen is not None:
        if (own.stage, own.tp_rank, own.cp_rank) == (planned.loss_stage, 0, 0):
            # Each sample of the replica was counted once for each chunk.
            counted += seen / session.running.plan.num_loss_chunks
        seen.zero_()
    dist.all_reduce(counted)
    total, squares = counted.tolist()
    return (total, squares) if total else (None, None)


@replaces("megatron.training.training:dummy_train_step", id="skipped-iterations", when=Moment.LIST)
def _skip_step(session: Session, original: Callable[[Any], None], data_iterator: Any) -> None:
    """Run `dummy_train_step` for any number of chunks: read a step's microbatches from each iterator.

    Why: with --iterations-to-skip it reads one iterator, but several chunks have a list of them and a middle stage has
    none; it then shares a batch inside the stage in a way that need not be the script's.

    Remove when: it reads what each iterator of a stage has for the step, and shares nothing.
    """
    if not session.is_active and hasattr(data_iterator, "__next__"):
        original(data_iterator)
        return
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    # It keeps what a step has read, to read it again; so it must know where a step begins and ends.
    while machine.should_run_forward_backward(data_iterator):
        for iterator in _iterators(data_iterator):
            for _ in range(get_num_microbatches()):
                next(iterator)


@replaces("megatron.training.training:disable_forward_pre_hook", id="early-evaluation", when=Moment.LIST)
def _take_hooks_off(original: Callable[..., None], model_chunks: Any, *args: Any, **kwargs: Any) -> None:
    """Run `disable_forward_pre_hook`, once there are such hooks.

    Why: with --overlap-param-gather it takes off what was not put on before the first step that fp16 does not skip, and
    ends in a KeyError.

    Remove when: Megatron evaluates before that step.

    Raises:
        ConfigError: there are none yet; on all ranks.
    """
    if not all(chunk.remove_forward_pre_hook_handles for chunk in model_chunks):
        raise ConfigError(
            "evaluation, or the comparison of weights, before the first step that fp16 does not skip; with "
            "--overlap-param-gather Megatron does neither so early; lower --initial-loss-scale, raise --eval-interval, "
            "or leave --overlap-param-gather out"
        )
    original(model_chunks, *args, **kwargs)


@replaces(
    "megatron.training.checkpointing:maybe_save_dataloader_state", id="skipped-iterations/dataloader", when=Moment.LIST
)
def _save_loader(original: Callable[..., None], train_iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Run `maybe_save_dataloader_state`; all chunks have read as far, so the first one's loader speaks for all.

    Why: for a script that sets args.dataloader_save; it takes one iterator, but several chunks have a list.

    Remove when: it takes the first iterator of a list.
    """
    original(next(iter(_iterators(train_iterator)), None), *args, **kwargs)


def _iterators(given: Any) -> list[Any]:
    """Give the iterators of this rank's chunks that there are; Megatron hands over one, None, or a list."""
    return [iterator for iterator in (given if isinstance(given, list) else [given]) if iterator is not None]


@replaces(
    "megatron.training.training:evaluate",
    id="evaluation-batch-size",
    when=Moment.LIST,
    unneeded={"<0.18": "it has no --eval-micro-batch-size"},
)
def _evaluate(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `evaluate`; meanwhile the arguments have the microbatch size of evaluation.

    Why: with --eval-micro-batch-size it reads microbatches of another size, and scripts as NVIDIA's make memory for
    those of training on the ranks that do not read: gloo ends the process. With --brief the losses are shown.

    Remove when: the arguments have the size of evaluation while it evaluates, or scripts ask for it.
    """
    from megatron.training.global_vars import get_args

    options: Any = get_args()
    size = options.eval_micro_batch_size if session.is_active else options.micro_batch_size
    with UndoStack().during(Name(options, "micro_batch_size"), size):
        result = original(*args, **kwargs)
    if result[0]:  # on the ranks with the loss, if there was time
        losses = (f"{name} {float(value):#.7g}" for name, value in result[0].items())
        session.show(f"evaluation | {' | '.join(losses)}")
    return result


@replaces("megatron.training.training:training_log", id="training-log", when=Moment.LIST)
def _log(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `training_log`; on a site without the writer its first rank prints number and time, but no loss.

    Why: one rank of the world prints the line of an iteration, so only its site sees it; here a step of the optimizer
    has ended, and a trace is told how long the log takes. With --brief that rank shows a shorter line.

    Remove when: Megatron knows sites, and times its log.
    """
    from megatron.training.global_vars import get_args

    session.recorder.end(Cause.OPTIMIZER)
    session.steps.end()
    options: Any = get_args()
    with session.recorder.span(Cause.LOG):
        if session.is_planned:
            bound = inspect.signature(original).bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            iteration, is_first = given["iteration"], given.get("is_first_iteration", False)
            is_due = iteration % options.log_interval == 0
            if is_due and session.start.timing is not None:
                _log_timing(session.start.timing.report(), iteration)
            if session.progress is not None:
                _note_step(session.progress, options, iteration)
            if is_due or is_first:
                _log_on_site(session, options, given)
                if log.is_brief() and dist.get_rank() == session.planned.writer_rank:
                    log.to_terminal(str(_logged_steps(options, given)))
        return original(*args, **kwargs)


def _log_timing(sums: StepSums, iteration: int) -> None:
    """Print what a step's time went to and what crossed between sites, and hand it to Megatron's writers."""
    stages = sums.stages
    if not stages:
        return
    head = f"time of the step of iteration {iteration}, by stage (mean of its ranks):"
    log.info("\n".join((head, *map(str, stages))))
    if sums.sites:
        head = f"between sites in the step of iteration {iteration}, with the waits for the other site:"
        log.info("\n".join((head, *map(str, sums.sites))))
    for stage in stages:
        for rank, factor in stage.slow_ranks.items():
            if dist.get_rank() == 0:
                log.warning(
                    f"rank {rank} computes {factor:.1f} times as long as the other ranks of stage {stage.stage}, which "
                    "wait for it; look at its device, and at what else runs there"
                )
    values = {
        f"vtp timing/stage {stage.stage} {part}, {name} (ms)": value
        for stage in stages
        for name, of_parts in (("mean", stage.mean_ms), ("most", stage.slowest_ms))
        for part, value in of_parts.items()
    }
    values |= {f"vtp sites/{name}": value for site in sums.sites for name, value in site.values()}
    _write(values, iteration)


def _note_step(progress: Progress, options: Any, iteration: int) -> None:
    """Note a step of a fitted run; at its first one say what was lost with the attempt before."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    lost = progress.note(iteration, options.consumed_train_samples, get_current_global_batch_size())
    if lost is None:
        return
    if dist.get_rank() == 0:
        log.warning(lost.text)
    values = {"vtp lost/steps": lost.steps, "vtp lost/samples": lost.samples, "vtp lost/seconds": lost.seconds}
    _write(values, iteration)


def _write(values: Mapping[str, float], iteration: int) -> None:
    """Hand values to Megatron's writers, where this rank has them."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer: Any = get_tensorboard_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    wandb: Any = get_wandb_writer()
    if wandb:
        wandb.log(values, iteration)


def _log_on_site(session: Session, options: Any, given: Mapping[str, Any]) -> None:
    """Print number and time of an iteration on a site that would see nothing.

    Args:
        session: session of this rank.
        options: Megatron's arguments.
        given: what `training_log` was given.
    """
    rank, planned = dist.get_rank(), session.planned
    is_reporter = rank in planned.reporting_ranks.values()
    if is_reporter and planned.site_of(rank) != planned.site_of(planned.writer_rank):
        elapsed_ms = 1e3 * _step_s(sum(_num_steps(given)))
        log.info(
            f"iteration {given['iteration']}/{options.train_iters} | elapsed time per iteration (ms): {elapsed_ms:.1f}"
        )


def _logged_steps(options: Any, given: Mapping[str, Any]) -> LoggedSteps:
    """Read what Megatron is about to log, and to set back: sums over the steps since its line before."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    num_made, num_skipped = _num_steps(given)
    sums, own = given["total_loss_dict"], {} if given["skipped_iter"] else given["loss_dict"]
    losses = {name: float(sums.get(name, 0.0) + own.get(name, 0.0)) for name in given["loss_dict"]}
    return LoggedSteps(
        iteration=given["iteration"],
        last=options.train_iters,
        losses={name: value / num_made for name, value in losses.items()} if num_made else {},
        num_skipped=num_skipped,
        step_s=_step_s(num_made + num_skipped),
        tokens=get_current_global_batch_size() * options.seq_length,
    )


def _num_steps(given: Mapping[str, Any]) -> tuple[int, int]:
    """Count the steps since Megatron's line before, this one included: those of the optimizer, and skipped ones.

    It logs the first step of a run by itself, and the next line is of that step, too.

    >>> _num_steps({"total_loss_dict": {"advanced iterations": 1, "skipped iterations": 0}, "skipped_iter": 0})
    (2, 0)
    >>> _num_steps({"total_loss_dict": {"advanced iterations": 1}, "skipped_iter": 1})
    (1, 1)
    """
    sums, is_skipped = given["total_loss_dict"], int(given["skipped_iter"])
    return sums.get("advanced iterations", 0) + 1 - is_skipped, sums.get("skipped iterations", 0) + is_skipped


def _step_s(num_steps: int) -> float:
    """Give the time of a step, before Megatron reads the same timer and sets it back."""
    from megatron.training.global_vars import get_timers

    timers: Any = get_timers()
    return timers("interval-time").elapsed(reset=False, barrier=False) / num_steps


@replaces("megatron.training.training:build_train_valid_test_data_iterators", id="data-iterators", when=Moment.U_SHAPE)
def _build_iterators(
    session: Session, writes: Writes, original: Callable[..., Any], provider: Callable[..., Any]
) -> Any:
    """Run `build_train_valid_test_data_iterators` as often as the edge does; only there with the script's provider.

    Why: it is called once for each chunk and talks to all ranks: with different numbers of chunks that hangs; and it
    calls the script's provider, which opens data, on every rank.

    Remove when: the number of calls is the same on all ranks, and only ranks that read data call the provider.
    """
    if session.planned.own.stage == 0:
        return original(among_builders(writes, provider))
    # Every call talks to all ranks.
    for _ in range(session.running.extra_data_calls()):
        original(_no_data)
    return original(_no_data)


def _no_data(num_samples: list[int]) -> tuple[None, None, None]:
    """Stand in for the script's provider on the cloud: no training, validation or test set.

    Rank 0 still says to all ranks which sets there are, and so what the run does.
    """
    return None, None, None


# With this mark Megatron calls a provider on all tensor-parallel ranks.
_no_data.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
