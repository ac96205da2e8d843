"""An adaptor that has patched Megatron, and of which the plugin knows nothing, ends a run with unequal stages alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

import vtp_plugin
from vtp_plugin.errors import ConfigError, PatchError
from vtp_plugin.host.mindspeed import UNKNOWN_ADAPTOR

WORDS = (
    r"megatron_adaptor patches Megatron .*core_r0\.17\.0.*; the plugin does not know what it replaces, .*; use MindS"
)


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Undo what a test has started."""
    yield
    parallel_state.destroy_model_parallel()
    vtp_plugin.revert()
    dist.destroy_process_group()


def start(*sizes: int, is_forced: bool = False) -> None:
    """Run Megatron's start-up with the plugin on one rank of a world that is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=sum(sizes))
    vtp_plugin.apply(vtp_size_list=list(sizes), device="cpu", force=is_forced)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=len(sizes), create_gloo_process_groups=False
    )


@pytest.mark.parametrize(("sizes", "is_forced"), [((1, 2), False), ((1, 1), True)])
def test_it_ends_a_run_that_our_channels_are_in(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], is_forced: bool
) -> None:
    monkeypatch.setitem(sys.modules, UNKNOWN_ADAPTOR, ModuleType(UNKNOWN_ADAPTOR))
    with pytest.raises(ConfigError, match=WORDS) as caught:
        start(*sizes, is_forced=is_forced)
    assert "\n" not in str(caught.value)


def test_equal_stages_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, UNKNOWN_ADAPTOR, ModuleType(UNKNOWN_ADAPTOR))
    start(1, 1)
    assert not vtp_plugin.is_vtp_enabled()


@pytest.mark.parametrize(("sizes", "ends"), [((1, 2), True), ((1, 1), False)])
def test_it_may_not_come_behind_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: tuple[int, ...], ends: bool
) -> None:
    (tmp_path / f"{UNKNOWN_ADAPTOR}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    start(*sizes)
    if ends:
        with pytest.raises(PatchError, match=WORDS):
            importlib.import_module(UNKNOWN_ADAPTOR)
    else:
        importlib.import_module(UNKNOWN_ADAPTOR)
    sys.modules.pop(UNKNOWN_ADAPTOR, None)
