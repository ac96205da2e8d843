"""The Ascend implementation's import lines give the plugin's functions, with and without it; its own tests of them.

The own tests are opt-in: ``VTP_MINDSPEED_MM`` names a tree of MindSpeed-MM 26.1.0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import ROOT
from tests.support.pool import ENVIRONMENT, run_code

HERE = Path(__file__).parent
TREE = os.environ.get("VTP_MINDSPEED_MM", "")
NAME = "mindspeed_mm.patchs.layerwise_disaggregated_training"

LINES = f"""
    import sys
    from unittest import mock
    import vtp_plugin
    from vtp_plugin import functional

    def ours():
        return [name for name in sys.modules if name.startswith("mindspeed_mm")]

    functional.install("{NAME}")
    functional.install("{NAME}")
    from {NAME} import p2p_communication_patch as p2p, parallel_state_patch
    from {NAME}.p2p_communication_patch import _communicate_impl, _VTPRecvWork, recv_forward_with_reqs, vtp_send_forward
    from {NAME}.parallel_state_patch import get_vtp_my_stage_idx, get_vtp_size_list, get_vtp_stage_ranks
    import {NAME}.parallel_state_patch as state

    assert vtp_send_forward is functional.vtp_send_forward and _VTPRecvWork is functional._VTPRecvWork
    assert recv_forward_with_reqs is p2p.recv_forward_with_reqs is functional.recv_forward_with_reqs
    assert state is parallel_state_patch and get_vtp_size_list is vtp_plugin.get_vtp_size_list
    assert "vtp_recv_forward" in dir(p2p) and state.__name__ == state.__spec__.name
    package = sys.modules["{NAME}"]

    # What a test replaces in the module, the functions use, and it comes back.
    if vtp_plugin.api.current_session() is None:
        with mock.patch.object(p2p, "is_vtp_stage_rank0", return_value=False):
            assert functional.vtp_send_forward(None) is None
    assert p2p.is_vtp_stage_rank0 is vtp_plugin.is_vtp_stage_rank0
"""


@pytest.mark.parametrize("is_applied", [True, False])
def test_import_lines_without_it(is_applied: bool) -> None:
    apply = """
    vtp_plugin.apply(vtp_size_list=[1, 2], device="cpu")
"""
    head, _, tail = LINES.partition("    functional.install")
    run_code(
        head
        + (apply if is_applied else "")
        + "    functional.install"
        + tail
        + """
    try:
        p2p.vtp_allreduce
    except AttributeError:
        pass
    else:
        raise AssertionError("a name from nowhere")
    p2p.mine = 1
    assert p2p.mine == 1 and not hasattr(functional.p2p, "mine")
    del p2p.mine
    assert not hasattr(p2p, "mine") and not hasattr(p2p, "__file__")
    vtp_plugin.revert()
    assert not ours(), ours()
    try:
        import mindspeed_mm
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError("a package from nowhere")
    """
    )


@pytest.mark.parametrize("is_loaded", [True, False])
def test_import_lines_with_it(is_loaded: bool) -> None:
    load = f"    import {NAME}.p2p_communication_patch as real\n" if is_loaded else ""
    run_code(
        f"""
    import sys
    sys.path.insert(0, {str(HERE / "fake_mm")!r})
"""
        + load
        + LINES
        + f"""
    from {NAME}.p2p_communication_patch import Shape
    assert Shape == state.vtp_allreduce == "theirs" and "fake_mm" in sys.modules["mindspeed_mm"].__file__
    assert "Shape" in dir(p2p) and package.p2p_communication_patch is p2p
    p2p.Shape = "mine"
    vtp_plugin.revert()
    from {NAME}.p2p_communication_patch import Shape, vtp_send_forward
    assert (Shape, vtp_send_forward) == ("mine", "theirs")
    from {NAME} import p2p_communication_patch, parallel_state_patch
    assert p2p_communication_patch.vtp_send_forward == parallel_state_patch.get_vtp_size_list == "theirs"
    assert {load != ""} is (globals().get("real") is p2p_communication_patch)
    """
    )


def test_a_package_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken_mm.py").write_text("import torch_npu_that_is_not_there\n")
    run_code(
        f"""
    import sys
    from vtp_plugin import functional
    from vtp_plugin.errors import ConfigError

    sys.path.insert(0, {str(tmp_path)!r})
    for name, text in (("broken_mm.patchs", "importing broken_mm fails"), ("no name", "a package has a dotted name")):
        try:
            functional.install(name)
        except ConfigError as error:
            assert text in str(error), error
        else:
            raise AssertionError(name)
    """
    )


@pytest.mark.skipif(not TREE, reason="VTP_MINDSPEED_MM names no tree of MindSpeed-MM")
def test_its_own_tests_pass(tmp_path: Path) -> None:
    """Those that fix no private state: of receives made by hand, and of sends off the leader."""
    file = Path(TREE) / "tests" / "ut" / "vtp" / "test_vtp_p2p_communication.py"
    off_leader = [
        f"{file}::{kind}::test_non_rank0_returns_none" for kind in ("TestVtpSendForward", "TestVtpSendBackward")
    ]
    words = ["-p", "reference_names", "-p", "no:cacheprovider", "--noconftest", "-q", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, f"{file}::TestVTPRecvWork", *off_leader],
        cwd=tmp_path,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
