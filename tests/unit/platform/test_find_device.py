"""detect(), the undo stack, and the platforms' plain answers."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.platform.cpu import CpuPlatform, probe_npu
from vtp_plugin.platform.detect import detect
from vtp_plugin.platform.interface import CudaPlatform, NpuPlatform, Platform, buffer_size_mb
from vtp_plugin.util.undo import UndoStack

has_cuda = torch.cuda.is_available()
without_cuda = pytest.mark.skipif(has_cuda, reason="needs a machine without a CUDA device")
with_cuda = pytest.mark.skipif(not has_cuda, reason="needs a CUDA device")


@without_cuda
def test_without_an_accelerator_the_cpu_is_chosen() -> None:
    """The reason names both accelerators that were asked."""
    platform = detect()
    assert (platform.name, platform.backend, platform.host_blocking_wait) == ("cpu", "gloo", True)
    assert "npu" in platform.reason and "cuda" in platform.reason.lower()
    assert platform.device() == torch.device("cpu")
    assert platform.module() is torch.cpu
    assert platform.group_options(1 << 20) is None
    assert not platform.is_installed


@without_cuda
@pytest.mark.parametrize("requested", ["cuda", "npu"])
def test_a_missing_accelerator_is_refused(requested: str) -> None:
    """The error is one line with the value, the rule and the way out."""
    with pytest.raises(ConfigError, match=f"^platform {requested}: no such device here, .*; use platform") as caught:
        detect(requested)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_an_unknown_platform_is_refused() -> None:
    """The error lists the choices."""
    with pytest.raises(ConfigError, match="platform tpu: unknown; choose one of auto, cuda, npu, cpu"):
        detect("tpu")  # type: ignore[arg-type]


@with_cuda
def test_a_working_cuda_device_is_chosen_and_not_replaced() -> None:
    """Auto and "cuda" give CUDA; "cpu" is refused with the way out; install() changes nothing."""
    platform = detect()
    assert (platform.name, detect("cuda").name, platform.module()) == ("cuda", "cuda", torch.cuda)
    empty = torch.empty
    platform.install()
    assert torch.empty is empty and not platform.is_installed
    assert torch.ones(1, device=platform.device()).is_cuda
    with pytest.raises(ConfigError, match="this machine has a working accelerator"):
        detect("cpu")


@without_cuda
def test_a_torch_npu_that_does_not_import_is_no_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure of the import counts, and its first line becomes part of the reason."""
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('libhccl.so is missing\\nmore lines')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    platform = detect()
    assert platform.name == "cpu"
    assert "torch_npu does not import: libhccl.so is missing," in platform.reason
    with pytest.raises(ConfigError, match="libhccl.so is missing; use platform auto"):
        detect("npu")


def test_torch_npu_is_not_imported_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported to find out that there is no NPU."""

    def refuse(name: str, package: str | None = None) -> ModuleType:
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    monkeypatch.setattr(importlib, "import_module", refuse)
    assert probe_npu() == (False, "torch_npu is not installed")


@pytest.mark.parametrize("kind", [CpuPlatform, CudaPlatform, NpuPlatform])
def test_platforms_keep_the_protocol(kind: type) -> None:
    """Each class has every member of the protocol, and uninstall() without install() is harmless."""
    platform = kind("test")
    assert isinstance(platform, Platform)
    assert platform.reason == "test"
    platform.uninstall()
    assert not platform.is_installed


def test_nccl_options_ask_for_a_high_priority_stream() -> None:
    """The options object is NCCL's own, where this torch has NCCL."""
    options = CudaPlatform("test").group_options(1 << 20)
    if torch.distributed.is_nccl_available():
        assert isinstance(options, torch.distributed.ProcessGroupNCCL.Options)
        assert options.is_high_priority_stream
    else:
        assert options is None


@pytest.mark.parametrize(("size_bytes", "size_mb"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (200 << 20, 200)])
def test_hccl_buffers_are_whole_mb_and_hold_the_message(size_bytes: int, size_mb: int) -> None:
    """Rounded up, never 0."""
    assert buffer_size_mb(size_bytes) == size_mb


class Base:
    """Has what its subclass inherits."""

    def inherited(self) -> int:
        """Return 1."""
        return 1


class Owner(Base):
    """Has a static method, whose wrapper object getattr() would lose."""

    @staticmethod
    def static() -> int:
        """Return 2."""
        return 2


def test_undo_restores_the_same_objects() -> None:
    """Replaced twice, inherited, static and absent attributes: all as before, in one undo()."""
    before = dict(vars(Owner))
    undo = UndoStack()
    for name in ("static", "static", "inherited", "new"):
        undo.set(Owner, name, lambda: 3)
    assert (Owner.static(), len(undo)) == (3, 4)
    undo.undo()
    assert dict(vars(Owner)) == before
    assert vars(Owner)["static"] is before["static"]
    assert (Owner().inherited(), Owner.static(), len(undo)) == (1, 2, 0)
