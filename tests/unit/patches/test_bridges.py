"""Where the plugin's bridges stand, and where it has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import vtp_plugin
from tests.support.pool import run_code
from vtp_plugin.config import VtpConfig, read_keywords
from vtp_plugin.errors import ConfigError, PatchError
from vtp_plugin.host.versions import find_host
from vtp_plugin.session import Session

# Before apply(), as a script that is written against Megatron's names.
HELD = """
    import torch
    import vtp_plugin
    from megatron.core.pipeline_parallel import multimodule_communicator
    from megatron.core.models.mimo.comm.colocated_communicator import BridgeDirection, SliceInfo
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator as taken, CommRole, RankCommInfo

    class Script:
        bridge = taken

    kept = (taken,)  # what lies in a tuple is not rebound

    def check(is_ours):
        from megatron.core.pipeline_parallel import bridge_communicator
        from vtp_plugin import bridge

        (stock,) = kept
        held = (bridge_communicator.BridgeCommunicator, multimodule_communicator.BridgeCommunicator, Script.bridge)
        assert len(set(held)) == 1 and (held[0] is not stock) == is_ours, held
        assert issubclass(bridge.BridgeCommunicator, stock) and bridge.BridgeCommunicator is not stock
        assert (bridge.BridgeCommunicator is held[0]) == is_ours
        assert bridge.CommRole is CommRole and bridge.RankCommInfo is RankCommInfo
        assert bridge.SliceInfo is SliceInfo and bridge.BridgeDirection is BridgeDirection
"""


@pytest.mark.needs("bridges")
def test_names_stand_in_all_modules_without_a_list_and_on_the_cpu() -> None:
    run_code(
        HELD
        + """
    check(is_ours=False)
    vtp_plugin.apply(device="cpu", bridges=True)
    check(is_ours=True)
    assert torch.zeros(1, device="cuda").device.type == "cpu", "not mapped"
    vtp_plugin.revert()
    check(is_ours=False)
    """
    )


@pytest.mark.needs("bridges")
@pytest.mark.parametrize(("num_src", "num_dst"), [(2, 3), (3, 2)])
def test_leaders_of_counts_that_do_not_divide_are_mapped_by_what_they_share(num_src: int, num_dst: int) -> None:
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator, CommRole

    from vtp_plugin.patches.core.pipeline_parallel.bridge_communicator import bridge_class

    # Two ranks a replica, the first of them the leader.
    bridge: Any = object.__new__(bridge_class(lambda: Session(VtpConfig()), BridgeCommunicator))
    bridge.src_grid = SimpleNamespace(rank_offset=0, size=2 * num_src)
    bridge.dest_grid = SimpleNamespace(rank_offset=2 * num_src, size=2 * num_dst)
    sources = [2 * i for i in range(num_src)]
    destinations = [2 * (num_src + j) for j in range(num_dst)]
    bridge.build_comm_map(sources, destinations)
    shared = {
        (src, dst)
        for i, src in enumerate(sources)
        for j, dst in enumerate(destinations)
        if max(i * num_dst, j * num_src) < min((i + 1) * num_dst, (j + 1) * num_src)
    }
    sent = {(src, dst) for src in sources for dst in bridge.comm_map[src].send_to_ranks}
    received = {(src, dst) for dst in destinations for src in bridge.comm_map[dst].recv_from_ranks}
    assert sent == received == shared
    roles = {rank: info.role for rank, info in bridge.comm_map.items()}
    assert roles == {
        rank: CommRole.SENDER if rank in sources else CommRole.RECEIVER if rank in destinations else CommRole.MEMBER
        for rank in range(2 * (num_src + num_dst))
    }


@pytest.mark.needs("bridges")
@pytest.mark.parametrize(
    "words", [("--vtp-bridges",), ("--vtp-bridges", "extended", "--vtp-size-list", "1", "--vtp-force")]
)
def test_names_stand_by_the_flag_with_and_without_a_list(words: tuple[str, ...]) -> None:
    run_code(
        f"""
    import sys

    sys.argv = ["script.py", *{words!r}, "--vtp-device", "cpu"] + '''--num-layers 2 --hidden-size 16
        --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 1
        --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm'''.split()
    """
        + HELD
        + """
    vtp_plugin.apply()
    check(is_ours=False)
    from megatron.training.arguments import parse_args, validate_args

    validate_args(parse_args())
    check(is_ours=True)
    vtp_plugin.revert()
    check(is_ours=False)
    """,
        env={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    )


@pytest.mark.needs("bridges")
def test_a_list_that_the_plugin_looks_for_leaves_nothing_out() -> None:
    """Bridges apply at once, such a list later: what both need must come with one of them."""
    run_code(
        """
    import vtp_plugin
    from vtp_plugin.patches.activation import activate
    from vtp_plugin.api import _Holder
    from vtp_plugin.host.versions import find_host
    from vtp_plugin.patches.hosts import load_host
    from vtp_plugin.patches.patch_set import Moment
    from vtp_plugin.patches.registry import declared_at

    vtp_plugin.apply(vtp_size_list="auto", device="cpu", bridges=True)
    session, host = _Holder.session, load_host(find_host()[0].name)
    wanted = {record.id for record in host.placed(declared_at(Moment.STAGES, host))}
    placed = [record.id for applied in session.applied for record in applied.records]
    assert wanted <= set(placed), (wanted, placed)
    activate(session, host)
    placed = [record.id for applied in session.applied for record in applied.records]
    assert len(set(placed)) == len(placed), placed
    vtp_plugin.revert()
    """
    )


@pytest.mark.needs("no_bridges")
def test_older_megatrons_are_refused_by_their_version() -> None:
    version = find_host()[1].version
    with pytest.raises(PatchError, match=f"megatron-core {version} has no such bridges between modules; use 0.19"):
        vtp_plugin.apply(device="cpu", bridges=True)
    vtp_plugin.revert()
    with pytest.raises(PatchError, match=f"vtp_plugin.bridge: megatron-core {version}"):
        from vtp_plugin.bridge import BridgeCommunicator  # noqa: F401


def test_a_value_that_is_none() -> None:
    assert read_keywords({"bridges": "extended"}) == VtpConfig(bridges="extended")
    with pytest.raises(ConfigError, match="vtp_bridges 'all' is unknown"):
        read_keywords({"bridges": "all"})


@pytest.mark.needs("bridges")
def test_names_of_tokens_are_noted_also_in_fan_in() -> None:
    """MimoModel refuses images of different sizes from an encoder with more replicas; with our bridges it does not."""
    run_code(
        """
    from types import SimpleNamespace

    import torch
    import vtp_plugin
    from megatron.core.models.mimo.config.role import ModuleLayout
    from megatron.core.models.mimo.model.base import MIMO_LANGUAGE_MODULE_KEY, MimoModel

    def grid(dp):
        return SimpleNamespace(shape=[1, dp], dim_names=["tp", "dp"])

    def sizes():
        model = SimpleNamespace(
            special_token_ids={"vision": 7},
            role=SimpleNamespace(mode=ModuleLayout.NON_COLOCATED),
            mimo_config=SimpleNamespace(module_to_grid_map={"vision": grid(4), MIMO_LANGUAGE_MODULE_KEY: grid(2)}),
        )
        output = torch.zeros(3, 5)
        MimoModel._attach_modality_split_sizes(model, output, torch.tensor([[7, 7, 1], [7, 1, 1]]), "vision")
        return output._mimo_bridge_split_sizes

    def is_refused():
        try:
            sizes()
        except AssertionError:
            return True
        return False

    assert is_refused()
    vtp_plugin.apply(device="cpu", bridges=True)
    assert sizes() == [2, 1]
    vtp_plugin.revert()
    assert is_refused()
    """
    )
