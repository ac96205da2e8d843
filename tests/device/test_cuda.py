"""What one NVIDIA GPU can show. Boundaries between stages need several, because NCCL takes one rank per GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.hosts import ROOT
from tests.support.pool import free_port
from vtp_plugin.errors import ConfigError
from vtp_plugin.platform.detect import detect
from vtp_plugin.runtime.health.monitor import Monitor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that works"),
]

TRAINING = """
import json, sys
import torch, torch.distributed as dist
if sys.argv[1] == "plugin":
    import vtp_plugin
    vtp_plugin.apply(vtp_size_list=[1], force=True, timeout_s=60)
dist.init_process_group("nccl", rank=0, world_size=1, init_method="tcp://127.0.0.1:" + sys.argv[2])
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
torch.manual_seed(1)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16,
                           pipeline_dtype=torch.bfloat16, hidden_dropout=0.1, attention_dropout=0.1)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32).cuda().bfloat16()
chunk = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
config.finalize_model_grads_func = finalize_model_grads
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True),
    [chunk])
tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(2)).cuda()
def forward_step(_, chunk):
    losses = chunk(tokens[:, :-1], torch.arange(32).cuda()[None].expand(2, -1), None, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach().clone()})
result = []
for _ in range(4):
    chunk.zero_grad_buffer(); optimizer.zero_grad()
    losses = get_forward_backward_func()(forward_step_func=forward_step, data_iterator=None, model=[chunk],
                                         num_microbatches=2, seq_length=32, micro_batch_size=2)
    result.append([loss["loss"].item() for loss in losses] + [float(optimizer.step()[1])])
print("RESULT " + json.dumps(result))
dist.destroy_process_group()
"""


def test_detection_finds_the_device_and_refuses_to_replace_it() -> None:
    platform = detect()
    assert (platform.name, platform.backend, platform.host_blocking_wait) == ("cuda", "nccl", False)
    assert platform.device() == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(ConfigError, match="cpu"):
        detect("cpu")


def test_group_options_are_accepted_by_nccl() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0], pg_options=detect().group_options(1 << 20), timeout=timedelta(seconds=60))
        value = torch.ones(4, device="cuda")
        dist.all_reduce(value, group=group)
        assert value.tolist() == [1.0] * 4
    finally:
        dist.destroy_process_group()


def test_a_wait_ends_with_the_stream_not_with_the_host() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monitor = Monitor(store, rank=0, world_size=1, timeout_s=60)
    wait = monitor.position.begin("boundary 0->1, forward, microbatch 0", "rank 1")
    torch.cuda._sleep(2_000_000_000)  # about a second
    event = torch.cuda.Event()
    event.record()
    wait.event = event
    assert not wait.is_over()
    assert "waited" in monitor.describe_position()
    deadline_s = time.monotonic() + 30
    while not wait.is_over() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert wait.is_over()


def test_one_stage_on_nccl_is_bitwise_stock_megatron() -> None:
    results = [_train(kind) for kind in ("stock", "plugin")]
    assert results[0] == results[1]
    assert results[0][-1][0] < results[0][0][0], "the loss did not fall"


def _train(kind: str) -> list[list[float]]:
    process = subprocess.run(
        [sys.executable, "-c", TRAINING, kind, str(free_port())],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, process.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))
