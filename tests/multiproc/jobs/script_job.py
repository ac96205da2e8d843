"""A job that runs a Megatron training script under the plugin, as ``python -m vtp_plugin run SCRIPT ...`` would.

megatron.training keeps its arguments, tokenizer, timers, microbatch calculator, random states and signal handlers in
module globals. So every run happens in a fork of the worker, which has imported Megatron but never used it: nothing is
left to reset, the exit code and the printed lines are those of a real process, and a run that fails costs no worker.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import pkgutil
import re
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import megatron.training.training as training
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.utils import Split
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import gpt_model
from megatron.training import arguments as megatron_arguments
from megatron.training import get_args

import vtp_plugin
from tests.group_queries.recorder import refusing_unknown_callers
from tests.multiproc.cases.script_cases import EXAMPLE, ScriptRun, Step
from tests.multiproc.hooks import leak_watch
from tests.multiproc.hooks.adapted_layers import add_adapters
from tests.multiproc.hooks.attack_hooks import ATTACK_HOOKS
from tests.multiproc.hooks.audit_hooks import AUDIT_HOOKS
from tests.multiproc.hooks.building_hooks import BUILDING_HOOKS
from tests.multiproc.hooks.delays import plant_delays, slow_link, slow_rank
from tests.multiproc.hooks.edge_hooks import EDGE_HOOKS
from tests.multiproc.hooks.gathered_attention import GatheredAttention, chunk_positions
from tests.multiproc.hooks.gradient_probe import note_gradients
from tests.multiproc.hooks.held_activations import LatentAttention, balance_routers, note_activations
from tests.multiproc.hooks.held_memory import held_memory
from tests.multiproc.hooks.held_waiting import keep_one_more, note_waiting
from tests.multiproc.hooks.hf_hooks import note_logits, store_gradients
from tests.multiproc.hooks.kill_hooks import KILL_HOOKS
from tests.multiproc.hooks.optimizer_dump import dump_optimizer
from tests.multiproc.hooks.option_hooks import (
    drop_hidden,
    keep_logits,
    log_predictions_of_one_rank,
    note_params_norms,
    note_whole_weights,
    read_by_own_loader,
    shorten_documents,
    time_stragglers,
)
from tests.multiproc.hooks.rate_hooks import note_rates, set_rates
from tests.multiproc.hooks.save_hooks import name_a_date
from tests.multiproc.hooks.still_hooks import STILL_HOOKS
from tests.multiproc.jobs.start_job import start_again
from tests.support.devices import DEVICE
from tests.support.mended_wheel import move_what_the_cpu_drew
from tests.support.pool import TIMEOUT_S
from tests.support.pool_worker import _die_with
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK, FORM

# Imported once in the worker, so that the runs need not do it; some hosts lack some of them.
for _name in (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
    "megatron.legacy.model",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.training.checkpointing",
    "megatron.training.datasets.sft_dataset",
    "torch.distributed.checkpoint",
    *(module.name for module in pkgutil.walk_packages(vtp_plugin.__path__, "vtp_plugin.", onerror=lambda _name: None)),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


def _read_help_once() -> None:
    """Keep what Megatron finds in its sources as the help of its flags: a third of a second, for each rank of a run."""
    with contextlib.suppress(ImportError):
        from megatron.training.argument_utils import ArgumentGroupFactory

        read = ArgumentGroupFactory._get_field_docstrings
        known: dict[type, dict[str, str]] = {}

        def remembered(self: Any, cls: type) -> dict[str, str]:
            if cls not in known:
                known[cls] = read(self, cls)
            return dict(known[cls])

        ArgumentGroupFactory._get_field_docstrings = remembered
        megatron_arguments.add_megatron_arguments(argparse.ArgumentParser())


_read_help_once()

# The dataset that Megatron makes up has 100,000 documents; building its index takes longer than training here.
gpt_dataset.MockGPTLowLevelDataset.size = 100


class _Notes:
    """What a run collects, in the process that runs."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[float] = []
        self.facts: dict[str, Any] = {}


def run_script(
    arguments: Sequence[str],
    by_rank: Mapping[int, Sequence[str]] | None = None,
    *,
    how: Literal["run", "apply", "stock", "plain"] = "run",
    apply_kwargs: Mapping[str, Any] | None = None,
    script: str = EXAMPLE,
    hooks: Sequence[str] = (),
    folders: Mapping[int, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ScriptRun:
    """Run the script in a fork of this process and return what came of it.

    Args:
        arguments: of the script.
        by_rank: further arguments of single ranks.
        how: under ``vtp_plugin run``; with ``vtp_plugin.apply(**apply_kwargs)`` in front, as a script itself would;
            stock Megatron without the plugin, on the CPU platform alone; or plain, as it stands.
        apply_kwargs: of ``apply()``.
        script: the script.
        hooks: names in this module's ``HOOKS``, called before the script starts with the dictionary of facts; what a
            hook returns is called when the script has ended well.
        folders: working directories of single ranks.
        timeout_s: for the whole run.
    """
    arguments = [*arguments, *(by_rank or {}).get(int(os.environ["RANK"]), ())]
    with tempfile.TemporaryDirectory(prefix="vtp-run-") as folder:
        output, results = Path(folder) / "output", Path(folder) / "results"
        parent = os.getpid()
        gc.freeze()  # the collector in the fork then copies none of this process's pages
        pid = os.fork()
        if pid == 0:
            start = {
                "run": lambda: _run_command(script, arguments),
                "apply": lambda: _run_with_apply(script, arguments, apply_kwargs or {}),
                "stock": lambda: _run_stock(script, arguments),
                "plain": lambda: _run_plain(script, arguments),
            }[how]
            os.chdir((folders or {}).get(int(os.environ["RANK"]), os.curdir))
            hooks = ["fork_results_queue", *hooks] if "--save" in arguments else hooks
            hooks = ["move_to_device", *hooks] if DEVICE != "cpu" and _is_stock(how, arguments) else hooks
            _be_a_process(parent, output, results, start, hooks)
        exit_code = _wait(pid, timeout_s)
        # A checkpoint save starts helpers of 450 MB, which outlive a process that was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        notes = (
            pickle.loads(results.read_bytes()) if results.exists() else {"steps": [], "evaluations": [], "facts": {}}
        )
        return ScriptRun(exit_code=exit_code, output=output.read_text(errors="replace"), **notes)


def _is_stock(how: str, arguments: Sequence[str]) -> bool:
    """Tell whether Megatron runs as it is: without the plugin, or with a list of equal sizes."""
    sizes = arguments[arguments.index("--vtp-size-list") + 1] if "--vtp-size-list" in arguments else ""
    return how == "stock" or (len({*sizes.split(",")}) == 1 and "--layerwise-disaggregated-training" not in arguments)


def _run_command(script: str, arguments: Sequence[str]) -> None:
    from vtp_plugin.cli import main

    words = ["run", script, *arguments]
    sys.argv = ["vtp_plugin", *words]
    main(words)


def _run_with_apply(script: str, arguments: Sequence[str], kwargs: Mapping[str, Any]) -> None:
    vtp_plugin.apply(**kwargs)
    _run_plain(script, arguments)


def _run_plain(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _run_stock(script: str, arguments: Sequence[str]) -> None:
    """Run Megatron with what makes it start on a CPU, and nothing of the plugin's own."""
    if DEVICE != "cpu":
        return _run_plain(script, arguments)
    from vtp_plugin.config import VtpConfig
    from vtp_plugin.host.patching import apply_records
    from vtp_plugin.host.versions import find_host
    from vtp_plugin.patches.hosts import load_host
    from vtp_plugin.patches.registry import platform_records
    from vtp_plugin.session import Session

    session = Session(VtpConfig(device="cpu"))
    session.choose_platform()
    host, megatron = find_host()
    apply_records(platform_records(session, load_host(host.name)), megatron.version)
    _run_plain(script, [*arguments, "--distributed-backend", "gloo"])


def _be_a_process(
    parent: int, output: Path, results: Path, start: Callable[[], None], hooks: Sequence[str]
) -> NoReturn:
    """Do in a fork what a fresh interpreter does with a script, up to its exit code."""
    code = 70
    try:
        os.setpgid(0, 0)
        _die_with(parent)
        atexit._clear()
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        notes = _Notes()
        _collect(notes)
        code = _exit_code_of(start, hooks, notes)
        partial = results.with_suffix(".partial")
        partial.write_bytes(
            pickle.dumps({"steps": notes.steps, "evaluations": notes.evaluations, "facts": notes.facts})
        )
        partial.rename(results)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code_of(start: Callable[[], None], hooks: Sequence[str], notes: _Notes) -> int:
    try:
        with refusing_unknown_callers():
            afterwards = [HOOKS[name](notes.facts) for name in hooks]
            start()
            for finish in filter(None, afterwards):
                finish()
    except SystemExit as leave:
        if leave.code is not None and not isinstance(leave.code, int):
            print(leave.code, file=sys.stderr)
            return 1
        return leave.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _collect(notes: _Notes) -> None:
    """Note what Megatron's loop gets from its steps and evaluations, at full precision and without averaging."""
    train_step, evaluate = training.train_step, training.evaluate

    def noting_train_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        losses, grad_norm, num_zeros = result[0], result[5], result[6]
        if grad_norm is None:  # of a step after which the run ends, before the optimizer's
            return result
        loss = float(losses["lm loss"]) if "lm loss" in losses else None
        notes.steps.append(
            Step(loss=loss, grad_norm=float(grad_norm), num_zeros=None if num_zeros is None else float(num_zeros))
        )
        return result

    def noting_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0] and "lm loss" in result[0]:
            notes.evaluations.append(float(result[0]["lm loss"]))
        return result

    training.train_step, training.evaluate = noting_train_step, noting_evaluate


def _wait(pid: int, timeout_s: float) -> int | None:
    """Wait for a child; one that is late writes its stacks and is killed."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if (code := _poll(pid)) is not None:
            return code
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _mask_losses(facts: dict[str, Any]) -> None:
    """Let every sample count another share of its tokens."""
    original = gpt_dataset.GPTDataset.__getitem__

    def masked(self: Any, index: int | None) -> dict[str, torch.Tensor]:
        sample = original(self, index)
        generator = torch.Generator().manual_seed(hash(tuple(sample["tokens"].tolist())) % 2**31)
        mask = torch.rand(sample["loss_mask"].shape, generator=generator) < (sum(sample["tokens"].tolist()) % 4 + 1) / 5
        facts.setdefault("counted", []).append(int(mask.sum()))
        return {**sample, "loss_mask": sample["loss_mask"] * mask}

    gpt_dataset.GPTDataset.__getitem__ = masked


def _note_samples(facts: dict[str, Any]) -> Callable[[], None]:
    """Note which training samples this rank reads, and afterwards what it has counted."""
    original = gpt_dataset.GPTDataset.__getitem__
    facts["samples"] = []

    def noted(self: Any, index: int | None) -> dict[str, torch.Tensor]:
        if self.index_split is Split.train:
            facts["samples"].append(index)
        return original(self, index)

    gpt_dataset.GPTDataset.__getitem__ = noted

    def after() -> None:
        args = get_args()
        facts["consumed"] = args.consumed_train_samples, args.consumed_valid_samples

    return after


def _gather_attention(facts: dict[str, Any]) -> None:
    """Give the script the attention of the tests."""
    _replace_attention(GatheredAttention)


def _take_latent_heads(facts: dict[str, Any]) -> None:
    """Give the script Megatron's local attention, made for latent heads."""
    _replace_attention(LatentAttention)


def _replace_attention(attention: type) -> None:
    for name in ("megatron.core.models.backends", "megatron.core.models.gpt.gpt_layer_specs"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name).DotProductAttention = attention


def _cut_sequences(facts: dict[str, Any]) -> None:
    """Give the script the attention of the tests, and every rank its part of a sequence, as real scripts do."""
    _gather_attention(facts)
    original = tensor_parallel.broadcast_data

    def broadcast_data(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        batch = original(*args, **kwargs)
        num_cp = parallel_state.get_context_parallel_world_size()
        own = chunk_positions(12, parallel_state.get_context_parallel_rank(), num_cp)
        # A mask [B, 1, S, S] stays whole: the attention of the tests makes its own.
        return {key: value if value.dim() == 4 else value[:, own].contiguous() for key, value in batch.items()}

    tensor_parallel.broadcast_data = broadcast_data


def _pack_samples(facts: dict[str, Any]) -> None:
    """Give the script the attention of the tests, and documents that are shorter than a sequence."""
    _gather_attention(facts)
    shorten_documents(facts)


def _note_lengths(facts: dict[str, Any]) -> None:
    """Note, for every step, the tokens and the squared lengths of samples that Megatron counts its FLOP/s by."""
    facts["lengths"] = []
    original = training.num_floating_point_operations

    def num_floating_point_operations(*args: Any, **sums: Any) -> Any:
        facts["lengths"].append(tuple(sorted(sums.items())))
        return original(*args, **sums)

    training.num_floating_point_operations = num_floating_point_operations


def _use_own_cache(facts: dict[str, Any]) -> Callable[[], None]:
    """Keep what Hugging Face's libraries store out of the user's home."""
    folder = tempfile.mkdtemp(prefix="vtp-hf-")
    os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
    return lambda: shutil.rmtree(folder, ignore_errors=True)


def _be_an_old_device(facts: dict[str, Any]) -> None:
    """Have Megatron believe in a device before Blackwell, where tensor parallelism needs an environment variable."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    megatron_arguments.get_device_arch_version = lambda: 9


def _fail_on_rank_1(facts: dict[str, Any]) -> None:
    """Fail in the middle of a step on one rank."""
    original = training.train_step

    def failing(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise RuntimeError("the disk is on fire")
        return original(*args, **kwargs)

    training.train_step = failing


def _note_patches(facts: dict[str, Any]) -> Callable[[], None]:
    """After the run, note which patches are applied, then revert and look for what has not come back."""
    before = _definitions()

    def after() -> None:
        facts["is_vtp_enabled"] = vtp_plugin.is_vtp_enabled()
        facts["size_list"] = vtp_plugin.get_vtp_size_list()
        facts["applied"] = [entry.id for entry in vtp_plugin.status() if entry.applied]
        facts["num_replaced"] = len(_changed(before))
        vtp_plugin.revert()
        facts["changed_after_revert"] = _changed(before)

    return after


def _definitions() -> dict[tuple[str, str], tuple[object, object]]:
    """Give every function, class and property of Megatron and torch, by module or class and name."""
    modules = [
        (name, module) for name, module in sorted(sys.modules.items()) if re.match(r"megatron\b|torch(\.|$)(?!_)", name)
    ]
    found: dict[tuple[str, str], tuple[object, object]] = {}
    for module_name, module in modules:
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        owners: list[tuple[str, Any]] = [(module_name, module)]
        owners += [(f"{module_name}.{cls.__name__}", cls) for cls in classes if cls.__module__ == module_name]
        for owner_name, owner in owners:
            for name, value in list(vars(owner).items()):
                if isinstance(value, (*_CODE, type)):
                    found[owner_name, name] = (owner, value)
    return found


_CODE = (types.FunctionType, types.BuiltinFunctionType, property, staticmethod, classmethod)


# torch replaces these itself: _dynamo when it is first used, whoever uses it, and an optimizer when the first is made.
_DYNAMO = {f"torch.nn.modules.module.Module.{name}" for name in ("__init__", "__setstate__")}
_DYNAMO |= {f"torch.optim.{name}.step" for name in ("adam.Adam", "adamw.AdamW", "sgd.SGD")}


def _changed(before: Mapping[tuple[str, str], tuple[object, object]]) -> list[str]:
    changed = {
        f"{place}.{name}" for (place, name), (owner, value) in before.items() if vars(owner).get(name) is not value
    }
    return sorted(changed - _DYNAMO)


def _note_progress(facts: dict[str, Any]) -> Callable[[], None]:
    """After the run, note how far this rank thinks it has come, and the learning rate of its last step."""
    original = training.train_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        optimizer = next(arg for arg in args if hasattr(arg, "param_groups"))
        facts["learning_rates"] = sorted({group["lr"] for group in optimizer.param_groups})
        return result

    training.train_step = noting

    def after() -> None:
        arguments = training.get_args()
        facts["progress"] = (
            arguments.consumed_train_samples,
            arguments.consumed_valid_samples,
            arguments.padded_vocab_size,
            bool(arguments.do_train),
            bool(arguments.do_valid),
            bool(arguments.do_test),
        )

    return after


def _note_memory(facts: dict[str, Any]) -> None:
    """Note what this rank holds of the model after a step."""
    original = training.train_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        model = next(arg for arg in args if isinstance(arg, list) and hasattr(arg[0], "module"))
        optimizer = next(arg for arg in args if hasattr(arg, "param_groups"))
        facts["memory"] = held_memory(model, optimizer)
        return result

    training.train_step = noting


def _fork_results_queue(facts: dict[str, Any]) -> None:
    """Fork the process behind a queue of saves. Megatron's default, a fresh interpreter, takes a core four seconds.

    It belongs to the process group of the run, which ends it.
    """
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def _forget_megatron(facts: dict[str, Any]) -> None:
    """Let the script import Megatron and the plugin anew, beside the packages that its environment's path names."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("megatron", "vtp_plugin"):
            del sys.modules[name]
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    importlib.invalidate_caches()


def _make_up_all_documents(facts: dict[str, Any]) -> None:
    """Have Megatron make up as much data as it does by itself."""
    gpt_dataset.MockGPTLowLevelDataset.size = 100000


def _claim_blocks(facts: dict[str, Any]) -> None:
    """Let a checkpoint say that its optimizer is stored in blocks of parameters, as those of Megatron 0.14 do."""
    original = dist_checkpointing.save

    def save(*args: Any, content_metadata: dict[str, Any], **kwargs: Any) -> Any:
        content = {**content_metadata, FORM: BY_BLOCK}
        return original(*args, content_metadata=content, **kwargs)

    dist_checkpointing.save = save


def _claim_precision(facts: dict[str, Any]) -> None:
    """Say, before a checkpoint is loaded, that the optimizer keeps its state in types of its own."""
    original = training.load_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        get_args().use_precision_aware_optimizer = True
        return original(*args, **kwargs)

    training.load_checkpoint = load_checkpoint


def _freeze_weights(facts: dict[str, Any]) -> None:
    """Train no norms before attention."""
    original = gpt_model.GPTModel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if ".input_layernorm." in name:
                parameter.requires_grad = False

    gpt_model.GPTModel.__init__ = init


def _freeze_first_embedding(facts: dict[str, Any]) -> None:
    """Train no word embedding that is called so; the output layer's copy of it, on the last stage, has another name."""
    original = gpt_model.GPTModel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if name == "embedding.word_embeddings.weight":
                parameter.requires_grad = False

    gpt_model.GPTModel.__init__ = init


HOOKS: dict[str, Callable[[dict[str, Any]], Callable[[], None] | None]] = {
    "mask_losses": _mask_losses,
    "plant_delays": plant_delays,
    "slow_link": slow_link,
    "slow_rank_1": functools.partial(slow_rank, 1),
    "slow_rank_3": functools.partial(slow_rank, 3),
    "note_samples": _note_samples,
    "old_device": _be_an_old_device,
    "gathered_attention": _gather_attention,
    "context_parallel": _cut_sequences,
    "packed_samples": _pack_samples,
    "own_cache": _use_own_cache,
    "note_lengths": _note_lengths,
    "fail_on_rank_1": _fail_on_rank_1,
    "note_patches": _note_patches,
    "note_progress": _note_progress,
    "note_activations": note_activations,
    "note_waiting": note_waiting,
    "keep_one_more": keep_one_more,
    "latent_attention": _take_latent_heads,
    "balanced_routers": balance_routers,
    "short_documents": shorten_documents,
    "time_stragglers": time_stragglers,
    "own_loader": read_by_own_loader,
    "own_predictions": log_predictions_of_one_rank,
    "note_params_norms": note_params_norms,
    "drop_hidden": drop_hidden,
    "keep_logits": keep_logits,
    "note_whole_weights": note_whole_weights,
    "note_logits": note_logits,
    "note_gradients": note_gradients,
    "store_gradients": store_gradients,
    "note_memory": _note_memory,
    "dump_optimizer": dump_optimizer,
    "note_rates": note_rates,
    "set_rates": set_rates,
    "all_documents": _make_up_all_documents,
    "claim_blocks": _claim_blocks,
    "claim_precision": _claim_precision,
    "freeze_weights": _freeze_weights,
    "freeze_by_name": _freeze_first_embedding,
    "add_adapters": add_adapters,
    "name_a_date": name_a_date,
    "fork_results_queue": _fork_results_queue,
    "move_to_device": lambda _facts: move_what_the_cpu_drew(),
    "forget_megatron": _forget_megatron,
    "watch_edge": leak_watch.watch_edge,
    "plant_leaks": leak_watch.plant_leaks,
    "record_posts": leak_watch.record_posts,
    "fail_in_data": leak_watch.fail_in_data,
    "fail_in_loss": leak_watch.fail_in_loss,
    "interrupt": leak_watch.interrupt,
    "start_again": start_again,
    **AUDIT_HOOKS,
    **BUILDING_HOOKS,
    **EDGE_HOOKS,
    **KILL_HOOKS,
    **ATTACK_HOOKS,
    **STILL_HOOKS,
}
