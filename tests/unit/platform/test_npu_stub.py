"""The NPU platform without an NPU: a device module written in Python, and gloo under the name hccl."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.pool import run_code

torch_registration = pytest.importorskip("torch.utils.backend_registration")

STUB_DEVICE = """
    import sys, types
    import torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    from vtp_plugin.platform.detect import detect
    from vtp_plugin.errors import ConfigError

    class Npu(types.ModuleType):
        num_devices = 2
        def is_available(self): return self.num_devices > 0
        def device_count(self): return self.num_devices
        def current_device(self): return 1
        def is_initialized(self): return True
        def _is_in_bad_fork(self): return False
        def manual_seed_all(self, seed): pass

    npu = Npu("torch.npu")
"""

HCCL_ALIAS = """
    import os
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from vtp_plugin.platform.interface import NpuPlatform

    rank = int(os.environ["RANK"])

    def create(options, group_options):
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["cpu"])
    platform = NpuPlatform("stub")
    timeout = timedelta(seconds=30)
    dist.init_process_group(platform.backend, timeout=timeout)
    assert dist.get_backend() == "hccl"
    # No torch_npu, no HCCL options: the channel is made with the defaults and carries tensors.
    channel = dist.new_group([0, 1], timeout=timeout, pg_options=platform.group_options(1 << 20))
    assert dist.get_backend(channel) == "hccl"
    sent, received = torch.full((3,), float(rank)), torch.empty(3)
    works = [dist.isend(sent, 1 - rank, group=channel), dist.irecv(received, 1 - rank, group=channel)]
    for work in works:
        work.wait()
    assert received.tolist() == [1.0 - rank] * 3
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not hasattr(torch_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no device modules written in Python (needs 2.13)",
)
@pytest.mark.parametrize("num_devices", [2, 0])
def test_detect_finds_the_npu_module(num_devices: int) -> None:
    """With a device it wins and may not be replaced; a module that sees no device is no NPU."""
    checks = {
        2: """
            platform = detect()
            assert (platform.name, platform.backend, platform.host_blocking_wait) == ("npu", "hccl", False)
            assert "2 device(s)" in platform.reason
            assert platform.device() == torch.device("npu:1") and platform.module() is npu
            assert detect("npu").name == "npu"
            empty = torch.empty
            platform.install()
            assert torch.empty is empty and not platform.is_installed
            try:
                detect("cpu")
            except ConfigError as error:
                assert 'which the CPU cannot stand in for; hide it with ASCEND_RT_VISIBLE_DEVICES=""' in str(error)
            else:
                raise AssertionError("not refused")
        """,
        0: """
            assert detect().name == "cpu" and "torch.npu sees no device" in detect().reason
        """,
    }
    setup = f"npu.num_devices = {num_devices}\n_setup_privateuseone_for_python_backend('npu', npu)\n"
    run_code(textwrap.dedent(STUB_DEVICE) + setup + textwrap.dedent(checks[num_devices]))


def test_hccl_options_carry_the_buffer_size() -> None:
    """torch_npu's options object gets the message size in whole MB; without a size, HCCL's default stays."""
    run_code(
        """
        import sys, types
        from vtp_plugin.platform.interface import NpuPlatform
        class Options:
            pass
        bindings = types.ModuleType("torch_npu._C._distributed_c10d")
        bindings.ProcessGroupHCCL = type("ProcessGroupHCCL", (), {"Options": Options})
        platform = NpuPlatform("stub")
        assert platform.group_options(1) is None
        sys.modules[bindings.__name__] = bindings
        options = platform.group_options(5 * 2**20 + 1)
        assert isinstance(options, Options) and options.hccl_config == {"hccl_buffer_size": 6}
        assert platform.group_options() is None
        """
    )


CHANNELS = (
    HCCL_ALIAS.partition("    def create(")[0]
    + """
    import sys, types
    from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
    from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
    from vtp_plugin.plan.layout.pipeline_layout import Direction
    from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
    from vtp_plugin.runtime.step.communicator import open_channels

    class Options:
        hccl_config = None

    bindings = types.ModuleType("torch_npu._C._distributed_c10d")
    bindings.ProcessGroupHCCL = type("ProcessGroupHCCL", (), {"Options": Options})
    sys.modules[bindings.__name__] = bindings
    configs = []

    def create(options, group_options):
        configs.append(getattr(group_options, "hccl_config", None))
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    class Host(NpuPlatform):
        def device(self): return torch.device("cpu")
        def module(self): return torch.cpu

    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["cpu"])
    dist.init_process_group("hccl", timeout=timedelta(seconds=30))
    layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    stage = dist.new_group([1, 2])
    configs.clear()

    def open_for(**known):
        rules = TransportRules(**known)
        boundaries = pipeline_boundaries(layout, is_ring=False, rules=rules)
        specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
        open_channels(
            specs, stage_group=stage if rank else None, platform=Host("stub"), monitor=None, timeout_s=30.0
        )
        found = configs.copy()
        configs.clear()
        return found

    # Slices of 6 MiB for two ranks; the leader's link carries all of it; what is not known keeps HCCL's default.
    assert open_for(transport="sliced", tensor_bytes=6 << 20) == [{"hccl_buffer_size": 3}] * 2
    leaders = open_for(transport="rank0", tensor_bytes=(6 << 20) + 1)
    assert leaders == ([] if rank == 2 else [{"hccl_buffer_size": 7}] * 2), leaders
    assert open_for(transport="sliced") == [None] * 2
    dist.barrier()
    dist.destroy_process_group()
"""
)


def test_channels_are_opened_with_buffers_for_their_largest_message() -> None:
    """By the way of a run, `open_channels`; no NPU has run it: HCCL itself may see it otherwise."""
    run_code(CHANNELS, world_size=3)


def test_two_ranks_talk_over_a_backend_named_hccl() -> None:
    """Nothing in the platform depends on the backend's name being one that torch knows."""
    run_code(HCCL_ALIAS, world_size=2)


EVENTS = (
    HCCL_ALIAS.partition("    # No torch_npu, no HCCL options")[0]
    + """
    from vtp_plugin.runtime.health.monitor import Monitor
    from vtp_plugin.runtime.comm.work import Recorder
    from vtp_plugin.runtime.comm.work import TimedWaits

    log, passed = [], []

    class Event:
        def record(self): log.append("event recorded")
        def query(self): return bool(passed)

    class Module:
        Event = Event

    class Host(NpuPlatform):
        def device(self): return torch.device("cpu")
        def module(self): return Module

    class Work:
        def __init__(self, work, name): self.work, self.name = work, name
        def wait(self):
            self.work.wait()
            log.append(self.name)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monitor = Monitor(store, rank=0, world_size=1, timeout_s=60)
    waits = TimedWaits(platform=Host("stub"), monitor=monitor, recorder=Recorder(Host("stub")))
    sent, received = torch.full((3,), float(rank)), torch.empty(3)
    works = [Work(dist.irecv(received, 1 - rank), "received"), Work(dist.isend(sent, 1 - rank), "sent")]
    with waits.timed("boundary 0->1, forward, microbatch 0", "rank 1"):
        for work in works: work.wait()
    # The event lies behind both messages on the stream: when it has passed, they have.
    assert log == ["received", "sent", "event recorded"], log
    assert received.tolist() == [1.0 - rank] * 3
    # The host goes on at once; the wait is over when the stream has come so far.
    assert "waited" in monitor.describe_position()
    passed.append(True)
    assert "waited" not in monitor.describe_position(), monitor.describe_position()
    dist.barrier()
    dist.destroy_process_group()
"""
)


def test_an_event_is_recorded_behind_the_wait_for_messages() -> None:
    """On a stream a wait holds up the device, not the host; the monitor asks the event whether it is over."""
    run_code(EVENTS, world_size=2)
