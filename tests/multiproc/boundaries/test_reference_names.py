"""The Ascend implementation's own tests of sends, receives and queries, by their names, on real ranks and messages.

MindSpeed-MM's ``tests/ut/vtp/test_vtp_p2p_communication.py`` and ``test_vtp_parallel_state_patch.py`` replace torch's
calls by mocks and set the state of its modules, which the plugin does not have. Here stages of 2 and 3 ranks exchange
an activation and its gradient through their leaders, under Megatron's default configuration.
"""

from __future__ import annotations

import pytest

from tests.multiproc.jobs.reference_job import Facts
from tests.support.pool import Pool

SIZES = (2, 3)
STAGES = [[0, 1], [2, 3, 4]]
NO_STAGES = {
    **{"is_vtp_enabled": False, "get_vtp_size_list": None, "get_vtp_stage_ranks": None},
    **{"get_vtp_my_stage_idx": None, "get_vtp_intra_stage_group": None, "is_vtp_stage_rank0": True},
}


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[Facts]:
    """What each of the five ranks saw."""
    return pool.run(5, "tests.multiproc.jobs.reference_job:facts", {"sizes": SIZES})


@pytest.fixture(scope="module")
def edge(pool: Pool) -> list[Facts]:
    """The same of stages of one rank and two."""
    return pool.run(3, "tests.multiproc.jobs.reference_job:facts", {"sizes": (1, 2)})


class TestVtpSendForward:
    def test_rank0_sends(self, ranks: list[Facts]) -> None:
        assert ranks[0]["sends"] == [1, 1] and ranks[0]["waited"] == [None, None]
        assert ranks[0]["sent"] == [("isend", 2), ("isend", 2)]

    def test_non_rank0_returns_none(self, ranks: list[Facts]) -> None:
        assert ranks[1]["sends"] == [None, None] and ranks[1]["sent"] == []


class TestVtpSendBackward:
    def test_rank0_sends(self, ranks: list[Facts]) -> None:
        assert ranks[2]["sends"] == [1, 1] and ranks[2]["waited"] == [None, None]
        assert ranks[2]["sent"] == [("isend", 0), ("isend", 0)]

    def test_non_rank0_returns_none(self, ranks: list[Facts]) -> None:
        assert all(ranks[rank]["sends"] == [None, None] and ranks[rank]["sent"] == [] for rank in (3, 4))


class TestVTPRecvWork:
    def test_wait_with_irecv_and_broadcast(self, ranks: list[Facts]) -> None:
        assert ranks[0]["made by hand"] and ranks[2]["made by hand"]

    def test_wait_no_irecv(self, ranks: list[Facts]) -> None:
        assert all(ranks[rank]["made by hand"] for rank in (1, 3, 4))

    def test_wait_dst_size_1_no_broadcast(self, edge: list[Facts]) -> None:
        assert edge[0]["made by hand"]


class TestVtpRecvForward:
    def test_sync_rank0_recv_and_broadcast(self, ranks: list[Facts]) -> None:
        assert ranks[2]["received"] == [("irecv", 0)] and ranks[2]["equal"][0]

    def test_sync_non_rank0_broadcast_only(self, ranks: list[Facts]) -> None:
        assert all(ranks[rank]["received"] == [] and ranks[rank]["equal"][0] for rank in (3, 4))

    def test_async_returns_tensor_and_reqs(self, ranks: list[Facts]) -> None:
        for facts in ranks[2:]:
            assert facts["reqs"] == ["recv_prev"] and facts["equal"][1] and facts["leaf"]


class TestVtpRecvBackward:
    def test_sync_rank0(self, ranks: list[Facts]) -> None:
        assert ranks[0]["received"] == [("irecv", 2)] and ranks[0]["equal"][0]

    def test_async_returns_recv_next(self, ranks: list[Facts]) -> None:
        for facts in ranks[:2]:
            assert facts["reqs"] == ["recv_next"] and facts["equal"][1] and facts["leaf"]

    def test_sync_non_rank0(self, ranks: list[Facts]) -> None:
        assert ranks[1]["received"] == [] and ranks[1]["equal"][0]


class TestInitVtpState:
    def test_sets_globals_and_finds_stage(self, ranks: list[Facts]) -> None:
        assert [facts["get_vtp_my_stage_idx"] for facts in ranks] == [0, 0, 1, 1, 1]
        assert all(facts["is_vtp_enabled"] and facts["get_vtp_size_list"] == [*SIZES] for facts in ranks)

    def test_finds_first_stage(self, edge: list[Facts]) -> None:
        assert edge[0]["get_vtp_my_stage_idx"] == 0

    def test_finds_last_stage(self, edge: list[Facts]) -> None:
        assert [facts["get_vtp_my_stage_idx"] for facts in edge[1:]] == [1, 1]


class TestCreateVtpGroups:
    def test_creates_group_for_multi_rank_stage(self, edge: list[Facts]) -> None:
        assert all(facts["get_vtp_intra_stage_group"] == [1, 2] for facts in edge[1:])

    def test_skips_single_rank_stage(self, edge: list[Facts]) -> None:
        """The group of this rank alone; the reference has none."""
        assert edge[0]["get_vtp_intra_stage_group"] == [0]

    def test_rank_not_in_multi_rank_stage(self, ranks: list[Facts]) -> None:
        assert [facts["get_vtp_intra_stage_group"] for facts in ranks] == [STAGES[0]] * 2 + [STAGES[1]] * 3


class TestGetters:
    def test_is_vtp_enabled(self, ranks: list[Facts]) -> None:
        assert all(facts["is_vtp_enabled"] is True for facts in ranks)

    def test_get_vtp_size_list(self, ranks: list[Facts]) -> None:
        assert all(facts["get_vtp_size_list"] == [*SIZES] for facts in ranks)

    def test_get_vtp_stage_ranks(self, ranks: list[Facts]) -> None:
        assert all(facts["get_vtp_stage_ranks"] == STAGES for facts in ranks)

    def test_get_vtp_intra_stage_group(self, ranks: list[Facts]) -> None:
        assert ranks[4]["get_vtp_intra_stage_group"] == STAGES[1]

    def test_get_vtp_my_stage_idx(self, ranks: list[Facts]) -> None:
        assert [facts["get_vtp_my_stage_idx"] for facts in ranks] == [0, 0, 1, 1, 1]


class TestIsVtpStageRank0:
    def test_returns_true_when_stage_ranks_none(self, ranks: list[Facts]) -> None:
        assert all(facts["before"] == NO_STAGES for facts in ranks)

    def test_returns_true_when_stage_ranks_empty(self, ranks: list[Facts]) -> None:
        assert all(not facts["before"]["get_vtp_stage_ranks"] for facts in ranks)
        assert all(facts["before"]["is_vtp_stage_rank0"] is True for facts in ranks)

    def test_returns_true_when_stage_idx_none(self, ranks: list[Facts]) -> None:
        assert all(facts["before"]["get_vtp_my_stage_idx"] is None for facts in ranks)
        assert all(facts["before"]["is_vtp_stage_rank0"] is True for facts in ranks)

    def test_returns_true_when_rank_is_first(self, ranks: list[Facts]) -> None:
        assert ranks[0]["is_vtp_stage_rank0"] is True and ranks[2]["is_vtp_stage_rank0"] is True

    def test_returns_false_when_rank_is_not_first(self, ranks: list[Facts]) -> None:
        assert [ranks[rank]["is_vtp_stage_rank0"] for rank in (1, 3, 4)] == [False] * 3
