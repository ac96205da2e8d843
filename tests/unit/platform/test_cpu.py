"""The CPU platform, each part in its own process: the mapping changes torch for the whole process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from functools import cache, partial
from typing import Any

import pytest

from tests.support.hosts import ROOT
from tests.support.pool import ENVIRONMENT, run_code

STEPS = 3


# A C++ compiler must never be needed: if torch.compile called one, this would fail.
NO_COMPILER = {"CXX": "false", "CC": "false"}


def run_python(*arguments: str) -> str:
    """Run a fresh Python where no CUDA device is visible and return its standard output."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **NO_COMPILER},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def run_installed(code: str) -> None:
    """Run ``code`` with the mapping installed; its asserts are the test. ``platform`` is the installed platform."""
    prologue = (
        "import torch\nfrom vtp_plugin.platform.detect import detect\nplatform = detect('cpu')\nplatform.install()\n"
    )
    run_code(prologue + textwrap.dedent(code), env=NO_COMPILER)


# --- Megatron trains -------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, bool]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "distributed_optimizer": {"distributed_optimizer": True},
    "bf16_distributed_optimizer": {"bf16": True, "distributed_optimizer": True},
    "recompute": {"recompute": True},
    "dropout": {"dropout": True},
}


@cache
def training_report() -> dict[str, Any]:
    """Train every case twice in one process, uninstall, and return what it measured."""
    (report,) = re.findall("^REPORT (.*)$", run_python("-m", "tests.unit.platform.test_cpu"), re.MULTILINE)
    return json.loads(report)


@pytest.mark.parametrize("case", CASES)
def test_unmodified_megatron_trains(case: str) -> None:
    """The loss falls, and a second run gives the same numbers."""
    losses, again = training_report()["losses"][case]
    assert len(losses) == STEPS
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.05
    assert losses == again


@pytest.mark.needs("bf16_to_a_percent")
def test_features_do_not_change_the_loss() -> None:
    """Recomputation and the distributed optimizer compute what the plain run computes."""
    losses = training_report()["losses"]
    assert losses["recompute"][0] == losses["fp32"][0]
    assert losses["distributed_optimizer"][0] == pytest.approx(losses["fp32"][0], rel=1e-6)
    assert losses["bf16"][0] == pytest.approx(losses["fp32"][0], rel=1e-2)
    assert losses["bf16"][0] != losses["fp32"][0]
    assert losses["dropout"][0] != losses["fp32"][0]


def test_clipping_reports_the_gradient_norm() -> None:
    """Every step gave a positive, finite gradient norm."""
    assert all(0 < norm < 100 for norm in training_report()["grad_norms"])


def test_uninstall_restores_every_attribute() -> None:
    """After training, torch holds the same objects as before install()."""
    report = training_report()
    assert report["num_replaced"] > 80
    assert report["not_restored"] == []


def train(
    *, bf16: bool = False, distributed_optimizer: bool = False, recompute: bool = False, dropout: bool = False
) -> tuple[list[float], list[float]]:
    """Train a small GPT for a few steps on one batch and return the losses and the gradient norms."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    recompute_options: dict[str, Any] = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}
    )
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        hidden_dropout=0.1 if dropout else 0.0,
        attention_dropout=0.1 if dropout else 0.0,
        **recompute_options,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16).cuda()
    module = Float16Module(config, model) if bf16 else model
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    wrapped = DistributedDataParallel(config, ddp_config, module)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=bf16, clip_grad=1.0, use_distributed_optimizer=distributed_optimizer
        ),
        [wrapped],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss

    def forward_step(iterator: Any, model: Any) -> Any:
        tokens = next(iterator).cuda(non_blocking=True)
        positions = torch.arange(16, device=torch.cuda.current_device()).expand_as(tokens)
        output = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))
        return output, partial(lambda out: (out.float().mean(), {"loss": out.float().mean().detach()}))

    batch = torch.randint(64, (2, 16), device="cuda")
    losses, norms = [], []
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch, batch]),
            model=[wrapped],
            num_microbatches=2,
            seq_length=16,
            micro_batch_size=2,
            forward_only=False,
        )
        step: Any = optimizer.step()
        losses.append(sum(part["loss"].item() for part in reduced) / 2)
        norms.append(float(step[1]))
    return losses, norms


def snapshot() -> dict[tuple[str, str], object]:
    """Return the attributes of everything that the mapping may touch."""
    import torch
    import torch.cuda.profiler
    import torch.utils._device

    owners: tuple[Any, ...] = (
        torch,
        torch._C,
        torch.Tensor,
        torch.nn.Module,
        torch.cuda,
        torch.cuda.random,
        torch.cuda.memory,
        torch.cuda.streams,
        torch.cuda.nvtx,
        torch.cuda.profiler,
        torch.accelerator,
        torch.distributed,
        torch.amp.autocast_mode.autocast,
        torch.utils._device.DeviceContext,
    )
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


def main() -> None:
    """Train all cases, uninstall, and print the report as the last line."""
    import torch

    # Imports torch._dynamo, so that the snapshots do not differ by torch's own submodules.
    from vtp_plugin.platform.detect import detect

    before = snapshot()
    platform = detect("cpu")
    platform.install()
    during = snapshot()
    from megatron.core import parallel_state

    from tests.support.mended_wheel import mend_wheel

    applied = mend_wheel()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    losses: dict[str, list[list[float]]] = {}
    grad_norms: list[float] = []
    for name, options in CASES.items():
        first, norms = train(**options)
        second, _ = train(**options)
        losses[name] = [first, second]
        grad_norms += norms
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    applied.revert()
    platform.uninstall()
    after = snapshot()
    report = {
        "losses": losses,
        "grad_norms": grad_norms,
        "num_replaced": sum(during[key] is not before[key] for key in before),
        "not_restored": [".".join(key) for key in before if after.get(key) is not before[key]]
        + [".".join(key) for key in during if key not in before and key in after],
    }
    print("REPORT", json.dumps(report))


# --- the mapping itself ----------------------------------------------------------------------------------------------


def test_every_way_to_name_the_device_gives_a_cpu_tensor() -> None:
    """Factories, methods and modules take "cuda", an index and a device object."""
    run_installed(
        """
        for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.cuda.current_device()):
            x = torch.ones(2, device=device)
            tensors = [
                torch.empty(2, device=device), torch.tensor([1], device=device), torch.arange(3, device=device),
                torch.rand(2, device=device), torch.randint(3, (2,), device=device), torch.zeros_like(x, device=device),
                torch.full((2,), 1.0, device=device), torch.eye(2, device=device), torch.as_tensor([1], device=device),
                x.new_zeros(2, device=device), x.to(device), x.to(device=device, dtype=torch.bfloat16),
                x.to(device, torch.float64), x.cuda(device), torch.nn.Linear(2, 2, device=device).weight,
                torch.nn.Linear(2, 2).to(device).weight, torch.nn.Linear(2, 2).cuda(device).weight,
                torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight,
                torch.empty(2, pin_memory=True), torch.ones(2).pin_memory(),
            ]
            assert all(tensor.device.type == "cpu" for tensor in tensors)
        with torch.device("cuda"):
            assert torch.zeros(1).device.type == "cpu"
        with torch.device("meta"):
            assert torch.zeros(1).device.type == "meta"
        assert torch.zeros(1).to(torch.float64).dtype == torch.float64
        assert torch.zeros(1).to(torch.zeros(1, dtype=torch.int8)).dtype == torch.int8
        """
    )


def test_type_strings_are_those_of_cuda_tensors() -> None:
    """Megatron sorts parameters by these strings; conversions keep working."""
    run_installed(
        """
        x = torch.ones(2)
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.half().type() == "torch.cuda.HalfTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.nn.Parameter(x).type() == "torch.cuda.FloatTensor"
        for half in (torch.float16, "torch.HalfTensor", "torch.cuda.HalfTensor", torch.cuda.HalfTensor):
            assert x.type(half).dtype == torch.float16
        assert torch.nn.Linear(2, 2).type(torch.bfloat16).weight.dtype == torch.bfloat16
        """
    )


def test_the_device_has_its_own_random_generator() -> None:
    """Drawing "on the device" leaves the CPU's generator alone, and the device's state can be saved and set."""
    run_installed(
        """
        torch.manual_seed(5)
        assert torch.cuda.initial_seed() == 5
        cpu, device = torch.get_rng_state(), torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.randn(3, device="cuda"), torch.randint_like(torch.ones(3), 9, device="cuda")
        with platform.device_random():
            torch.nn.functional.dropout(torch.ones(9)), torch.empty(9).normal_()
            inside = torch.cuda.get_rng_state()
        assert torch.equal(cpu, torch.get_rng_state())
        assert torch.equal(inside, torch.cuda.get_rng_state()) and not torch.equal(device, inside)
        torch.cuda.set_rng_state(device)
        with platform.device_random(), platform.device_random():
            assert torch.equal(first, torch.rand(3))
        generator = torch.Generator().manual_seed(1)
        expected = torch.rand(2, generator=torch.Generator().manual_seed(1))
        assert torch.equal(torch.rand(2, generator=generator, device="cuda"), expected)
        """
    )


def test_what_modules_compute_is_drawn_on_the_device() -> None:
    """A data loader's draws move the host's generator alone, dropout's the device's, also where it is done again."""
    run_installed(
        """
        from torch.utils.checkpoint import checkpoint
        torch.manual_seed(5)
        device = torch.cuda.get_rng_state()
        layer, moved = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)), []
        for is_loaded in (False, True):
            torch.manual_seed(5)
            before = torch.get_rng_state()
            list(torch.utils.data.DataLoader(range(4))) if is_loaded else None
            host = torch.get_rng_state()
            assert torch.equal(host, before) != is_loaded and torch.equal(device, torch.cuda.get_rng_state())
            moved.append(layer(torch.ones(64)))
            assert torch.equal(host, torch.get_rng_state()) and not torch.equal(device, torch.cuda.get_rng_state())
        assert torch.equal(*moved) and 0 < moved[0].count_nonzero() < 64
        for is_reentrant in (False, True):
            x = torch.ones(64, requires_grad=True)
            y = checkpoint(layer, x, use_reentrant=is_reentrant)
            layer(x)  # what comes between draws, too
            y.sum().backward()
            assert torch.equal(x.grad, y) and 0 < y.count_nonzero() < 64
        call, engine = torch.nn.Module.__call__, torch.autograd.Variable._execution_engine
        platform.uninstall()
        assert torch.nn.Module.__call__ is not call and torch.autograd.Variable._execution_engine is not engine
        """
    )


def test_megatron_rng_tracker_uses_the_device_generator() -> None:
    """Fork and its plumbing (graph-safe and plain) work, whether Megatron was imported before or after install()."""
    code = """
        from megatron.core.tensor_parallel import random as mcore_random
        {install}
        tracker = mcore_random.CudaRNGStatesTracker()
        tracker.add("x", 7)
        cpu, device = torch.get_rng_state(), torch.cuda.get_rng_state()
        with tracker.fork("x"):
            first = torch.rand(2, device="cuda")
        with tracker.fork("x"):
            second = torch.rand(2, device="cuda")
        expected = torch.rand(2, 2, generator=torch.Generator().manual_seed(7))
        assert torch.equal(torch.stack([first, second]), expected)
        assert torch.equal(cpu, torch.get_rng_state()) and torch.equal(device, torch.cuda.get_rng_state())
        assert torch.equal(mcore_random._get_cuda_rng_state(), device)
    """
    run_installed(code.format(install=""))
    install = "from vtp_plugin.platform.detect import detect; detect('cpu').install()"
    run_python("-c", "import torch\n" + textwrap.dedent(code).format(install=install))


def test_compiled_functions_run_uncompiled_while_installed() -> None:
    """Functions compiled before and after install() never reach their backend until uninstall()."""
    run_code(
        """
        import torch
        from vtp_plugin.platform.detect import detect
        compiled = []
        def backend(graph, inputs):
            compiled.append(graph)
            return graph.forward
        before = torch.compile(lambda x: x + 1, backend=backend)
        native = torch.compile(lambda x: x * 3)
        platform = detect("cpu")
        platform.install()
        after = torch.compile(lambda x: x + 2, backend=backend)
        x = torch.ones(2)
        assert before(x).tolist() == [2, 2] and after(x).tolist() == [3, 3] and native(x).tolist() == [3, 3]
        assert compiled == []
        platform.uninstall()
        before(x), after(x)
        assert len(compiled) == 2
        whole = torch.compile(lambda x: x + torch.zeros(2), backend=backend, fullgraph=True)
        assert whole(x).tolist() == [1, 1] and len(compiled) == 3
        """,
        env=NO_COMPILER,
    )


def test_no_call_asks_for_a_driver() -> None:
    """What Megatron asks of torch.cuda and torch.accelerator works without a driver."""
    run_installed(
        """
        cuda = torch.cuda
        assert cuda.is_available() and cuda.device_count() == 1 and cuda.current_device() == 0
        assert not torch.accelerator.is_available() and torch.accelerator.current_accelerator() is None
        cuda.set_device(0), cuda.synchronize(), cuda.empty_cache(), cuda.reset_peak_memory_stats(), cuda._lazy_init()
        properties = cuda.get_device_properties(torch.device("cuda:0"))
        assert properties.total_memory > 2**20 and (properties.major, properties.minor) == cuda.get_device_capability()
        free, total = cuda.mem_get_info()
        assert 0 < free <= total == properties.total_memory
        assert cuda.memory_stats()["allocated_bytes.all.current"] == cuda.memory_allocated() == 0
        cuda.nvtx.range_push("x"), cuda.nvtx.range_pop()
        with cuda.nvtx.range("x"), cuda.device(0), torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
        with torch.autocast("cuda", torch.float16):
            assert torch.get_autocast_dtype("cuda") == torch.float16
        side = cuda.Stream()
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        with cuda.stream(side):
            assert cuda.current_stream() is side
        assert cuda.current_stream() is cuda.default_stream() is not side
        side.wait_stream(cuda.current_stream()), side.record_event().wait(), end.record()
        assert start.elapsed_time(end) >= 0
        torch.ones(2).record_stream(side)
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        torch.optim.AdamW([parameter]).step()
        loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, pin_memory=True)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        """
    )


def test_install_is_idempotent_exclusive_and_visible() -> None:
    """A second install() does nothing, another platform object may not install, and detect() still says cpu."""
    run_installed(
        """
        from vtp_plugin.errors import ConfigError, PatchError
        wrapped = torch.empty
        platform.install()
        assert platform.is_installed and torch.empty is wrapped and wrapped.__wrapped__.__name__ == "empty"
        other = detect()
        assert other.name == "cpu" and not other.is_installed
        for attempt, error in ((other.install, PatchError), (lambda: detect("cuda"), ConfigError)):
            try:
                attempt()
            except error as caught:
                assert "cpu" in str(caught).lower() and "\\n" not in str(caught)
            else:
                raise AssertionError("not refused")
        platform.uninstall()
        platform.uninstall()
        assert not platform.is_installed
        other.install()
        other.uninstall()
        """
    )


def test_install_refuses_beside_a_working_accelerator() -> None:
    """The mapping never hides a device that works, and leaves torch alone when it refuses."""
    run_code(
        """
        import torch
        from vtp_plugin.errors import ConfigError
        from vtp_plugin.platform.detect import detect
        platform = detect("cpu")
        torch.cuda.is_available = lambda: True
        empty = torch.empty
        for attempt in (platform.install, lambda: detect("cpu")):
            try:
                attempt()
            except ConfigError as error:
                assert "this machine has a working accelerator" in str(error)
                assert 'CUDA_VISIBLE_DEVICES=""' in str(error)
            else:
                raise AssertionError("not refused")
        assert torch.empty is empty and not platform.is_installed
        """,
        env=NO_COMPILER,
    )


if __name__ == "__main__":
    main()
