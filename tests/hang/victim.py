"""One rank of a small core-only training that can block, raise or finish at a chosen moment.

Started as a plain process, without a launcher that would end the others for us: as a script of its own, or by
``serve``, a process that has imported torch and Megatron already and forks a rank for every line that it reads.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NUM_MICROBATCHES = 4
BLOCK_STEP, BLOCK_MICROBATCH = 1, 1
SEQ, BATCH, VOCAB, HIDDEN = 8, 2, 36, 24
PR_SET_PDEATHSIG = 1


class Script:
    """What this rank does beside training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ["RANK"])

    def reach(self, moment: str) -> None:
        """Tell the test that this rank is here; the victim stays, or fails, at its moment."""
        if moment != self.options.moment:
            return
        (Path(self.options.folder) / f"{self.rank}.reached").touch()
        if self.rank != self.options.victim:
            return
        if self.options.act == "raise":
            time.sleep(self.options.delay_s)
            raise ValueError("the victim's own error")
        if self.options.act == "exit":
            sys.exit(self.options.status)
        if self.options.act == "starve":
            starve()
        time.sleep(1000)


def starve() -> None:
    """Use up the address space, so that no thread can be started any more, and stay here."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A few find the place of those that have ended; one may lack the memory to begin, and is waited for then.
    with suppress(RuntimeError, MemoryError):
        while True:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    time.sleep(1000)


def train(script: Script) -> None:
    """Train a few steps, save once, and end normally."""
    options = script.options
    take(options)
    if not options.without_plugin:
        apply_plugin(options)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    script.reach("start")
    from megatron.core import parallel_state

    num_stages = len(options.vtp_size_list.split(","))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_size, pipeline_model_parallel_size=options.pipeline_size or num_stages
    )
    if options.apply_again == "late":
        from vtp_plugin.api import _Holder

        _Holder.session = None
        apply_plugin(options)
    model, optimizer = build(options, num_stages)
    for step in range(options.num_steps):
        run_step(script, step, model, optimizer)
    save(script, model)
    print("trained", flush=True)
    time.sleep(options.linger_s * (script.rank != 0))
    if options.timed_end:
        from vtp_plugin.api import _Holder

        dist.barrier()
        begin_s = time.monotonic()
        assert _Holder.session is not None
        _Holder.session.ranks.stop()
        print(f"stopped within {time.monotonic() - begin_s:.3f} s", flush=True)


def cross(script: Script) -> None:
    """Send tensors over a bridge from two replicas to one rank, and gradients back."""
    import vtp_plugin

    vtp_plugin.apply(device="cpu", bridges=True, timeout_s=script.options.timeout_s)
    dist.init_process_group("gloo")
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    names = ["tp", "cp", "pp", "dp"]
    grids = HyperCommGrid([1, 1, 1, 2], names), HyperCommGrid([1, 1, 1, 1], names, 2)
    bridge = BridgeCommunicator(*grids, {"s": 0, "b": 1, "h": 2}, torch.float32, "vision", "language")
    for microbatch in range(NUM_MICROBATCHES):
        if microbatch == BLOCK_MICROBATCH:
            script.reach("forward")
        if script.rank < 2:
            bridge.send_forward(torch.zeros(SEQ, BATCH, HIDDEN))
            assert bridge.recv_backward() is not None
            continue
        tensor = bridge.recv_forward()
        if microbatch == BLOCK_MICROBATCH:
            script.reach("backward")
        bridge.send_backward(torch.zeros_like(tensor))
    print("crossed", flush=True)


def take(options: argparse.Namespace) -> None:
    """Take something from Megatron before the plugin is applied, and keep it where no name leads to it."""
    if options.takes_original:
        from megatron.core.distributed import finalize_model_grads

        options.kept = [finalize_model_grads]


def apply_plugin(options: argparse.Namespace) -> None:
    """Apply the plugin, maybe pretending another version, maybe twice."""
    import vtp_plugin
    from vtp_plugin.session import ranks

    if options.pretend_version:
        ranks.__version__ = options.pretend_version

    def apply(timeout_s: float) -> None:
        vtp_plugin.apply(
            vtp_size_list=options.vtp_size_list,
            device="cpu",
            timeout_s=timeout_s,
            force=options.force,
            schedule=options.schedule,
            split_backward=options.split_backward,
        )

    apply(options.timeout_s)
    if options.apply_again == "same":
        apply(options.timeout_s)
    elif options.apply_again == "other":
        apply(options.timeout_s + 1)


def build(options: argparse.Namespace, num_stages: int) -> tuple[Any, Any]:
    """Make this rank's part of the model and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=num_stages,
        hidden_size=HIDDEN,
        num_attention_heads=12,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        tensor_model_parallel_size=options.config_tensor_size or parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=num_stages,
        pipeline_dtype=getattr(torch, options.pipeline_dtype),
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config.finalize_model_grads_func = options.kept[0] if options.takes_original else finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    for name in options.switched_on:
        setattr(config, name, True)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    return wrapped, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0), [wrapped])


def run_step(script: Script, step: int, model: Any, optimizer: Any) -> None:
    """Run Megatron's schedule and the optimizer once."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens = torch.randint(0, VOCAB, (NUM_MICROBATCHES, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))

    def forward(batches: Iterator[tuple[int, torch.Tensor]], module: Any) -> Any:
        microbatch, batch = next(batches)
        is_moment = step == BLOCK_STEP and microbatch == BLOCK_MICROBATCH
        if is_moment:
            script.reach("forward")
        positions = torch.arange(SEQ)[None].expand(BATCH, SEQ)
        output = module(batch[:, :-1], positions, None, labels=batch[:, 1:])
        if is_moment:
            output.register_hook(lambda grad: script.reach("backward"))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    if step == BLOCK_STEP:
        script.reach("step")
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(enumerate(tokens)),
        model=[model],
        num_microbatches=NUM_MICROBATCHES,
        seq_length=SEQ,
        micro_batch_size=BATCH,
    )
    if step == BLOCK_STEP:
        script.reach("optimizer")
    optimizer.step()


def save(script: Script, model: Any) -> None:
    """Save the model as Megatron does by default; the victim stays inside."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class Strategy(TorchDistSaveShardedStrategy):
        def save(self, *args: Any, **kwargs: Any) -> None:
            script.reach("save")
            super().save(*args, **kwargs)

    folder = Path(script.options.folder) / "checkpoint"
    folder.mkdir(exist_ok=True)
    strategy = Strategy("torch_dist", 1, thread_count=1)  # the defaults of Megatron 0.19
    dist_checkpointing.save(model.module.sharded_state_dict(), str(folder), sharded_strategy=strategy)


def serve() -> argparse.Namespace:
    """Fork a rank for every line of standard input; return its options in the child.

    A line is JSON with ``env``, ``arguments``, ``script`` and ``output``; the answer is the process id. When the rank
    has ended, its exit status stands in the file ``<output>.status``.
    """
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.models.gpt
    import megatron.core.optimizer

    with suppress(ImportError):  # older wheels have megatron.core only
        import megatron.training.arguments  # noqa: F401

    gc.freeze()  # what was imported is not searched again in every rank
    outputs: dict[int, str] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
            if not line:
                os._exit(0)
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return _become_rank(order)
            outputs[pid] = order["output"]
            print(pid, flush=True)
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                path = Path(outputs.pop(pid) + ".status")
                path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
                path.with_suffix(".part").rename(path)


def _become_rank(order: dict[str, Any]) -> argparse.Namespace:
    os.setpgid(0, 0)  # the test ends it with its children
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["env"])
    if order["script"] != __file__:
        sys.argv = [order["script"], *order["arguments"]]
        runpy.run_path(order["script"], run_name="__main__")
        sys.exit()
    return parse(order["arguments"])


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--vtp-size-list", default="1,2")
    parser.add_argument("--timeout-s", type=float, default=8.0)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--moment", default="never")
    parser.add_argument("--victim", type=int, default=-1)
    parser.add_argument("--act", default="block", choices=("block", "raise", "exit", "starve"))
    parser.add_argument("--status", type=int, default=3, help="with which --act=exit ends")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--num-steps", type=int, default=2)
    parser.add_argument("--linger-s", type=float, default=0.0)
    parser.add_argument("--timed-end", action="store_true")
    parser.add_argument("--without-plugin", action="store_true")
    parser.add_argument("--pretend-version")
    parser.add_argument("--apply-again", choices=("same", "other", "late"))
    parser.add_argument("--pipeline-size", type=int)
    parser.add_argument("--tensor-size", type=int, default=1)
    parser.add_argument("--config-tensor-size", type=int)
    parser.add_argument("--pipeline-dtype", default="float32")
    parser.add_argument("--takes-original", action="store_true")
    parser.add_argument("--schedule", default="stock")
    parser.add_argument("--split-backward", action="store_true")
    parser.add_argument("--bridge", action="store_true", help="cross a bridge instead of training")
    parser.add_argument("--switched-on", nargs="*", default=[], help="switches of the model's configuration")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    script = Script(serve() if sys.argv[1:] == ["serve"] else parse(sys.argv[1:]))
    cross(script) if script.options.bridge else train(script)
