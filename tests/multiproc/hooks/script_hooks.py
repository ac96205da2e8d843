"""What runs of a training script do besides: note, freeze, break, and what larger scripts do for their options."""

from __future__ import annotations

import datetime
import importlib
import importlib.machinery
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import StragglerDetector
from megatron.training import arguments as megatron_arguments
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from torch.distributed.checkpoint import FileSystemWriter

import vtp_plugin
from tests.multiproc.cases.other_rates import OTHER, OTHER_DECOUPLED
from tests.multiproc.hooks.gathered_attention import GatheredAttention, chunk_positions
from tests.multiproc.hooks.held import LatentAttention, held_memory
from tests.multiproc.hooks.in_place import Facts, Hook, after, around, before
from tests.support.mended_wheel import move_what_the_cpu_drew
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK, FORM

# --- samples and attention ---


def mask_losses(facts: Facts) -> None:
    """Let every sample count another share of its tokens."""

    @around(gpt_dataset.GPTDataset, "__getitem__")
    def masked(original: Any, self: Any, index: int | None) -> dict[str, torch.Tensor]:
        sample = original(self, index)
        generator = torch.Generator().manual_seed(hash(tuple(sample["tokens"].tolist())) % 2**31)
        mask = torch.rand(sample["loss_mask"].shape, generator=generator) < (sum(sample["tokens"].tolist()) % 4 + 1) / 5
        facts.setdefault("counted", []).append(int(mask.sum()))
        return {**sample, "loss_mask": sample["loss_mask"] * mask}


def note_samples(facts: Facts) -> Callable[[], None]:
    """Note which training samples this rank reads, and afterwards what it has counted."""
    facts["samples"] = []

    @before(gpt_dataset.GPTDataset, "__getitem__")
    def note(self: Any, index: int | None) -> None:
        if self.index_split is Split.train:
            facts["samples"].append(index)

    def finish() -> None:
        args = get_args()
        facts["consumed"] = args.consumed_train_samples, args.consumed_valid_samples

    return finish


def gathered_attention(facts: Facts) -> None:
    """Give the script the attention of the tests."""
    _replace_attention(GatheredAttention)


def latent_attention(facts: Facts) -> None:
    """Give the script Megatron's local attention, made for latent heads."""
    _replace_attention(LatentAttention)


def _replace_attention(attention: type) -> None:
    for name in ("megatron.core.models.backends", "megatron.core.models.gpt.gpt_layer_specs"):
        with suppress(ImportError):
            importlib.import_module(name).DotProductAttention = attention


def context_parallel(facts: Facts) -> None:
    """Give the script the attention of the tests, and every rank its part of a sequence, as real scripts do."""
    gathered_attention(facts)

    @around(tensor_parallel, "broadcast_data")
    def broadcast_data(original: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        batch = original(*args, **kwargs)
        num_cp = parallel_state.get_context_parallel_world_size()
        own = chunk_positions(12, parallel_state.get_context_parallel_rank(), num_cp)
        # A mask [B, 1, S, S] stays whole: the attention of the tests makes its own.
        return {key: value if value.dim() == 4 else value[:, own].contiguous() for key, value in batch.items()}


def packed_samples(facts: Facts) -> None:
    """Give the script the attention of the tests, and documents that are shorter than a sequence."""
    gathered_attention(facts)
    short_documents(facts)


def short_documents(facts: Facts) -> None:
    """Make up documents that are shorter than a sequence, so that a row has several."""
    gpt_dataset.MockGPTLowLevelDataset.max_sequence_length = 8


def all_documents(facts: Facts) -> None:
    """Have Megatron make up as much data as it does by itself."""
    gpt_dataset.MockGPTLowLevelDataset.size = 100000


class _Loader:
    """A loader of a script's own: it knows how far it has read."""

    def __init__(self, rows: Any) -> None:
        self._rows, self._num_read = iter(rows), 0

    def __iter__(self) -> _Loader:
        return self

    def __next__(self) -> Any:
        self._num_read += 1
        return next(self._rows)

    def save_state(self) -> int:
        return self._num_read


def own_loader(facts: Facts) -> None:
    """Read with a loader whose state can be stored, and say where, as scripts with images do."""

    @around(training, "build_pretraining_data_loader")
    def build(original: Any, dataset: Any, num_consumed: int) -> Any:
        arguments = get_args()
        arguments.dataloader_save = f"{arguments.save}/loader"
        arguments.dataloader_type = "single"
        rows = original(dataset, num_consumed)
        arguments.dataloader_type = "external"
        return None if rows is None else _Loader(rows)


def meet_while_building(facts: Facts) -> None:
    """Let the script's provider use torch's world in all ways, and note who is there."""
    facts["met"] = []

    @before(BlendedMegatronDatasetBuilder, "__init__")
    def meet(*_args: Any, **_kwargs: Any) -> None:
        dist.barrier()
        size, own = dist.get_world_size(), int(os.environ["RANK"])
        total = torch.ones(1)
        dist.all_reduce(total)
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, own)
        first = [own]
        dist.broadcast_object_list(first, 0)
        dist.barrier(dist.group.WORLD)
        world = dist.get_world_size(dist.group.WORLD)
        facts["met"].append((dist.get_rank(), size, int(total), everybody, first, world))


def group_while_building(facts: Facts) -> None:
    """Let the script's provider make a process group."""
    before(BlendedMegatronDatasetBuilder, "__init__")(lambda *_args, **_kwargs: dist.new_group([0]))


# --- what a step is made of ---


def note_lengths(facts: Facts) -> None:
    """Note, for every step, the tokens and the squared lengths of samples that Megatron counts its FLOP/s by."""
    facts["lengths"] = []

    @before(training, "num_floating_point_operations")
    def note(*_args: Any, **sums: Any) -> None:
        facts["lengths"].append(tuple(sorted(sums.items())))


def note_progress(facts: Facts) -> Callable[[], None]:
    """After the run, note how far this rank thinks it has come, and the learning rate of its last step."""

    @after(training, "train_step")
    def note(_result: Any, *args: Any, **_kwargs: Any) -> None:
        optimizer = next(arg for arg in args if hasattr(arg, "param_groups"))
        facts["learning_rates"] = sorted({group["lr"] for group in optimizer.param_groups})

    def finish() -> None:
        args = training.get_args()
        consumed = args.consumed_train_samples, args.consumed_valid_samples, args.padded_vocab_size
        facts["progress"] = (*consumed, bool(args.do_train), bool(args.do_valid), bool(args.do_test))

    return finish


def note_memory(facts: Facts) -> None:
    """Note what this rank holds of the model after a step."""

    @after(training, "train_step")
    def note(_result: Any, *args: Any, **_kwargs: Any) -> None:
        model = next(arg for arg in args if isinstance(arg, list) and hasattr(arg[0], "module"))
        facts["memory"] = held_memory(model, next(arg for arg in args if hasattr(arg, "param_groups")))


def note_params_norms(facts: Facts) -> None:
    """Note the norms of all weights that Megatron logs, at full precision."""
    facts["params_norms"] = []
    after(training, "calc_params_l2_norm")(lambda norm, *_args, **_options: facts["params_norms"].append(norm))


ROUNDING = {False: 1e-6, True: 1e-3}  # of a tensor's largest gradient; in half precision, True, coarser


def note_small_gradients(facts: Facts) -> Callable[[], None]:
    """Note for every step how many gradients here are 0 within rounding, but not 0; see that all events are written."""
    facts["small"] = []
    before(training, "train_step")(lambda *_args, **_kwargs: facts["small"].append(0))

    @before(megatron_optimizer, "count_zeros_fp32")
    def count(weights: Any, *_args: Any, **_kwargs: Any) -> None:
        for weight in weights:
            size = weight.grad.abs()
            rounding = ROUNDING[getattr(get_args(), "fp16", False)] * size.max()
            facts["small"][-1] += int(((size > 0) & (size <= rounding)).sum())

    return _flush_events


def _flush_events() -> None:
    """Write the last of TensorBoard's events, of which Megatron leaves some to a thread when it ends."""
    if (writer := get_tensorboard_writer()) is not None:
        writer.flush()


def note_writers(facts: Facts) -> Callable[[], None]:
    """Stand in for the package of W&B, and note what is logged there, and which of Megatron's writers this rank has."""
    logged: set[str] = set()
    module: Any = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.config = types.SimpleNamespace(update=lambda *_values, **_options: None)
    module.init, module.finish = (lambda **_options: None), (lambda: None)
    module.log = lambda values, _iteration: logged.update(values)
    sys.modules["wandb"] = module

    def finish() -> None:
        facts["writers"] = get_tensorboard_writer() is not None, get_wandb_writer() is not None
        facts["wandb"] = logged
        _flush_events()

    return finish


def under_one_launcher(facts: Facts) -> None:
    """Set what torchrun sets, by which the ranks of a node know each other; the pool starts each by itself."""
    folder = f"none_of_tests/attempt_0/{os.environ['LOCAL_RANK']}"
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{os.getcwd()}/{folder}/error.json"


def note_device_waits(facts: Facts) -> None:
    """Note which timers wait for all that the device does, in training steps."""
    facts["waits"] = set()

    @around(training, "train_step")
    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        synchronize = torch.cuda.synchronize

        def noted() -> None:
            facts["waits"].add(sys._getframe(1).f_locals["self"].name)

        torch.cuda.synchronize = noted
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.synchronize = synchronize


def time_stragglers(facts: Facts) -> None:
    """Time the model's forward pass, and note which ranks Megatron compares, on rank 0."""
    detector = StragglerDetector()
    facts["stragglers"] = []

    @around(GPTModel, "forward")
    def timed(original: Any, *args: Any, **kwargs: Any) -> Any:
        with detector:
            return original(*args, **kwargs)

    @after(StragglerDetector, "_min_max")
    def note(found: Any, self: Any, *_numbers: float) -> None:
        if found is not None and self.rank == 0:
            facts["stragglers"].append(sorted(entry()[1] for entry in found.aflops))


def own_predictions(facts: Facts) -> None:
    """Let every rank log its own losses of prediction: Megatron 0.16 averages them in a way that gloo lacks."""
    MTPLossLoggingHelper.reduce_loss_in_tracker = staticmethod(lambda: None)


def keep_logits(facts: Facts) -> None:
    """Keep the logits of routers where Megatron takes random ones in their place."""
    moe_utils.apply_random_logits = lambda logits: logits


def drop_hidden(facts: Facts) -> None:
    """Give every model dropout, also one whose script asks for none."""
    before(TransformerConfig, "__post_init__")(lambda self: setattr(self, "hidden_dropout", 0.1))


def note_whole_weights(facts: Facts) -> Callable[[], None]:
    """Note, after the run, the weights that every rank of a stage holds whole, and which ranks these are."""
    models: list[Any] = []
    after(training, "setup_model_and_optimizer")(lambda result, *_args, **_kwargs: models.extend(result[0]))

    def finish() -> None:
        stage: Any = parallel_state.get_tensor_model_parallel_group()
        facts["stage"] = dist.get_process_group_ranks(stage)
        facts["whole"] = {
            f"{chunk} {name}": weight.detach().numpy().copy()
            for chunk, model in enumerate(models)
            for name, weight in model.named_parameters()
            if not getattr(weight, "tensor_model_parallel", False)
        }

    return finish


def set_rates(facts: Facts) -> None:
    """Give the groups of parameters other rates before the third step, and the scheduler another decay.

    It is what a resume with other rates is compared with.
    """

    @before(training, "train_step")
    def change(
        _step: Any, _data: Any, _model: Any, optimizer: Any, scheduler: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        if get_args().curr_iteration != 2:
            return
        scheduler.start_wd = scheduler.end_wd = OTHER["weight_decay"]
        scheduler.max_lr, scheduler.min_lr = OTHER["lr"], OTHER["min_lr"]
        for group in optimizer.param_groups:
            is_apart = group.get("is_decoupled_lr") or not group.get("default_config", True)
            group["max_lr"] = OTHER_DECOUPLED["decoupled_lr"] if is_apart else OTHER["lr"]
            group["min_lr"] = OTHER_DECOUPLED["decoupled_min_lr"] if is_apart else OTHER["min_lr"]
        scheduler.step(0)


def note_rates(facts: Facts) -> None:
    """Note what a step trains with: rate and decay of every group, and samples before it."""
    facts["rates"] = []

    @before(training, "train_step")
    def note(_step: Any, _data: Any, _model: Any, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        shown = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
        facts["rates"].append((get_args().consumed_train_samples, sorted(shown)))


# --- what is frozen or broken, and what befalls a run ---


def _when_built(change: Callable[[Any], None]) -> Hook:
    """Give a hook that changes every chunk of the model as a script would, before Megatron wraps it."""

    def hook(facts: Facts) -> None:
        after(GPTModel, "__init__")(lambda _none, model, *_args, **_kwargs: change(model))

    return hook


def _freezing(is_frozen: Callable[[str], bool]) -> Hook:
    """Give a hook that freezes weights by their names; a layer has its number in the whole model, from 1."""

    def freeze(model: Any) -> None:
        for name, weight in model.named_parameters():
            weight.requires_grad = not is_frozen(name) and weight.requires_grad
        for layer in model.decoder.layers:
            for name, weight in layer.named_parameters():
                weight.requires_grad = not is_frozen(f"layer {layer.layer_number}.{name}") and weight.requires_grad

    return _when_built(freeze)


freeze_words = _freezing(lambda name: "word_embeddings" in name or "output_layer" in name)
freeze_embedding = _freezing(lambda name: "embedding" in name or "output_layer" in name)
freeze_first_layer = _freezing(lambda name: name.startswith("layer 1."))
freeze_mlp = _freezing(lambda name: ".mlp." in name)
freeze_all_but_norms = _freezing(lambda name: "norm" not in name)
freeze_weights = _freezing(lambda name: ".input_layernorm." in name)
# The output layer's copy of it, on the last stage, has another name.
freeze_by_name = _freezing(lambda name: name == "embedding.word_embeddings.weight")


def _break_a_weight(model: Any) -> None:
    if os.environ["RANK"] == "1":
        with torch.no_grad():
            model.decoder.layers[0].mlp.linear_fc1.weight[0, 0] = math.nan


break_a_weight = _when_built(_break_a_weight)


def fail_on_rank_1(facts: Facts) -> None:
    """Fail in the middle of a step on one rank."""

    @before(training, "train_step")
    def fail(*_args: Any, **_kwargs: Any) -> None:
        if os.environ["RANK"] == "1":
            raise RuntimeError("the disk is on fire")


def _in_second_call(name: str, act: Callable[[], None]) -> Hook:
    """Give a hook by which something befalls rank 1 in its second call of a function of the training loop."""

    def hook(facts: Facts) -> None:
        calls: list[None] = []

        @before(training, name)
        def count(*_args: Any, **_kwargs: Any) -> None:
            calls.append(None)
            if len(calls) == 2 and os.environ["RANK"] == "1":
                act()

    return hook


# As a scheduler of jobs tells one rank to end; and as a full disk or a quota lets no file grow over 64 KiB.
stop_one_rank = _in_second_call("train_step", lambda: os.kill(os.getpid(), signal.SIGTERM))
limit_files = _in_second_call(
    "save_checkpoint", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
)


# --- checkpoints ---


def fork_results_queue(facts: Facts) -> None:
    """Fork the process behind a queue of saves. Megatron's default, a fresh interpreter, takes a core four seconds.

    It belongs to the process group of the run, which ends it.
    """
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def claim_blocks(facts: Facts) -> None:
    """Let a checkpoint say that its optimizer is stored in blocks of parameters, as those of Megatron 0.14 do."""

    @around(dist_checkpointing, "save")
    def save(original: Any, *args: Any, content_metadata: dict[str, Any], **kwargs: Any) -> Any:
        return original(*args, content_metadata={**content_metadata, FORM: BY_BLOCK}, **kwargs)


def claim_precision(facts: Facts) -> None:
    """Say, before a checkpoint is loaded, that the optimizer keeps its state in types of its own."""

    @before(training, "load_checkpoint")
    def claim(*_args: Any, **_kwargs: Any) -> None:
        get_args().use_precision_aware_optimizer = True


def name_a_date(facts: Facts) -> None:
    """From the second save on, let the index name a class that none of our readers knows."""
    saves: list[int] = []

    @before(FileSystemWriter, "finish")
    def name(_self: Any, metadata: Any, _results: Any) -> None:
        saves.append(1)
        if len(saves) > 1:
            metadata.planner_data = datetime.date(2026, 11, 26)


# --- the process and its environment ---


def own_cache(facts: Facts) -> Callable[[], None]:
    """Keep what Hugging Face's libraries store out of the user's home."""
    folder = tempfile.mkdtemp(prefix="vtp-hf-")
    os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
    return lambda: shutil.rmtree(folder, ignore_errors=True)


def old_device(facts: Facts) -> None:
    """Have Megatron believe in a device before Blackwell, where tensor parallelism needs an environment variable."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    megatron_arguments.get_device_arch_version = lambda: 9


def move_to_device(facts: Facts) -> None:
    """Move to the device what Megatron drew on the CPU."""
    move_what_the_cpu_drew()


def forget_megatron(facts: Facts) -> None:
    """Let the script import Megatron and the plugin anew, beside the packages that its environment's path names."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("megatron", "vtp_plugin"):
            del sys.modules[name]
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    importlib.invalidate_caches()


def note_patches(facts: Facts) -> Callable[[], None]:
    """After the run, note which patches are applied, then revert and look for what has not come back."""
    found = _definitions()

    def finish() -> None:
        facts["is_vtp_enabled"] = vtp_plugin.is_vtp_enabled()
        facts["size_list"] = vtp_plugin.get_vtp_size_list()
        facts["applied"] = [entry.id for entry in vtp_plugin.status() if entry.applied]
        facts["num_replaced"] = len(_changed(found))
        vtp_plugin.revert()
        facts["changed_after_revert"] = _changed(found)

    return finish


_CODE = (types.FunctionType, types.BuiltinFunctionType, property, staticmethod, classmethod)


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


# torch replaces these itself: _dynamo when it is first used, whoever uses it, and an optimizer when the first is made.
_DYNAMO = {f"torch.nn.modules.module.Module.{name}" for name in ("__init__", "__setstate__")}
_DYNAMO |= {f"torch.optim.{name}.step" for name in ("adam.Adam", "adamw.AdamW", "sgd.SGD")}


def _changed(found: Mapping[tuple[str, str], tuple[object, object]]) -> list[str]:
    changed = {
        f"{place}.{name}" for (place, name), (owner, value) in found.items() if vars(owner).get(name) is not value
    }
    return sorted(changed - _DYNAMO)
