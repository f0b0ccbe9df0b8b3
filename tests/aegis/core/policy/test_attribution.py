"""Which fault is the root cause, and which nodes are excluded for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aegis.attempts import (
    BLAMELESS,
    HARDWARE,
    NETWORK,
    NODES,
    NOW,
    STOPPING,
    UNEXPLAINED,
    excluded,
    fault,
    history,
    incident,
)
from tests.aegis.core.policy.decisions import WITH_SPARE, decided, past_of, raised
from zslurm.aegis.types import Alarm


class TestExclusion:
    @pytest.mark.parametrize("kind", HARDWARE)
    def test_broken_hardware_at_once(self, kind: str) -> None:
        decision = decided(fault(kind), there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("swap", ("node1",))
        assert decision.nodes == ("node0", "node2", "node3")
        assert decision.reason.startswith("node1: ")

    @pytest.mark.parametrize(("kind", "times"), [*((k, 2) for k in NETWORK), *((k, 3) for k in UNEXPLAINED)])
    def test_a_doubtful_fault_when_it_names_the_same_node_again(self, kind: str, times: int) -> None:
        for before in range(times):
            decision = decided(fault(kind), past=past_of(kind, *["node1"] * before), there=WITH_SPARE)
            last = before + 1 == times
            assert decision.action == ("swap" if last else "restart")
            assert decision.exclude == (("node1",) if last else ())

    @pytest.mark.parametrize("kind", [*NETWORK, *UNEXPLAINED])
    def test_none_when_it_names_one_node_after_the_other(self, kind: str) -> None:
        decision = decided(fault(kind), past=past_of(kind, "node0", "node2", "node0"), there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("restart", ())

    @pytest.mark.parametrize("kind", [*NETWORK, *UNEXPLAINED])
    def test_no_node_when_it_was_long_ago(self, kind: str) -> None:
        old = history(*(incident(fault(kind), step=i, ago=8 * 86400.0) for i in range(3)))
        assert decided(fault(kind), past=old, there=WITH_SPARE).exclude == ()

    @pytest.mark.parametrize("kind", UNEXPLAINED)
    def test_no_node_when_it_is_always_after_the_same_step(self, kind: str) -> None:
        past = past_of(kind, "node1", "node1", step=1)
        same = history(*(incident(fault(kind, step=50), step=i) for i in range(2)))
        assert decided(fault(kind, step=60), past=past, there=WITH_SPARE).exclude == ("node1",)
        assert decided(fault(kind, step=50), past=same, there=WITH_SPARE).exclude == ()

    @pytest.mark.parametrize("kind", [*NETWORK, *UNEXPLAINED])
    def test_no_node_when_several_nodes_say_the_same(self, kind: str) -> None:
        past = past_of(kind, *["node1"] * 4)
        decision = decided(fault(kind), fault(kind, "node2", ago=4.0), past=past, there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("restart", ())
        assert decision.root is not None
        assert decision.root.node is None

    @pytest.mark.parametrize("kind", BLAMELESS)
    def test_no_node_for_a_program_a_setting_or_a_service_however_often(self, kind: str) -> None:
        decision = decided(fault(kind), past=past_of(kind, *["node1"] * 9), there=WITH_SPARE)
        assert decision.exclude == ()
        assert decision.action == ("stop" if kind in STOPPING else "restart")

    def test_both_of_two_nodes_that_break_together(self) -> None:
        faults = fault("node_dead"), fault("node_dead", "node2", ago=3.0)
        decision = decided(*faults, there={"alive": ("node0", "node3", "node4")})
        assert (decision.action, decision.exclude) == ("swap", ("node1", "node2"))
        assert decision.nodes == ("node0", "node3", "node4")

    def test_no_node_when_every_node_is_said_to_be_dead(self) -> None:
        faults = [fault("node_dead", node) for node in NODES[:3]]
        assert decided(*faults).exclude == ()
        assert raised(*faults) == Alarm(True, None, "no node of the attempt answers")

    def test_a_nic_whose_link_stayed_down(self) -> None:
        decision = decided(fault("nic_link_down", ago=61.0, nic="ionic_3"), there=WITH_SPARE)
        assert decision.exclude == ("node1",)
        assert decision.reason.startswith("node1, NIC ionic_3: the link of a NIC is down")

    def test_a_node_that_is_excluded_already_is_not_excluded_again(self) -> None:
        past = history(exclusions=excluded("node1"))
        assert decided(fault("gpu_ras_uncorrectable"), past=past, there=WITH_SPARE).exclude == ()

    def test_a_spare_that_broke_while_it_waited_is_excluded_and_is_no_root(self) -> None:
        broken, killed = fault("gpu_bad_pages", "node3"), fault("rank_killed", source="srun")
        assert not raised(broken).give_up
        decision = decided(broken, killed, there=WITH_SPARE)
        assert (decision.action, decision.root, decision.exclude) == ("restart", killed, ("node3",))
        decision = decided(broken, fault("node_dead"), there={"alive": ("node0", "node2", "node3", "node4")})
        assert (decision.action, decision.exclude) == ("swap", ("node1", "node3"))
        assert decision.nodes == ("node0", "node2", "node4")
        assert decided(broken, killed, there=WITH_SPARE, says={"max_excluded": 0}).exclude == ()

    def test_an_expired_exclusion_counts_no_more(self) -> None:
        past = history(exclusions=excluded(*(f"old{i}" for i in range(9)), ago=8 * 86400))
        assert decided(fault("gpu_ras_uncorrectable"), past=past, there=WITH_SPARE).action == "swap"


class TestRootCause:
    def test_the_earliest_root(self) -> None:
        first = fault("storage_fault", ago=9.0)
        assert decided(fault("user_error", ago=3.0), first, fault("nic_fault", ago=5.0)).root == first

    @pytest.mark.parametrize("role", ["cascade", "teardown", "advisory", "benign"])
    @pytest.mark.parametrize("kind", ["gpu_ras_uncorrectable", "peer_lost", "user_error", "nic_fault_cascade"])
    def test_never_what_is_no_root(self, role: Any, kind: str) -> None:
        decision = decided(fault(kind, role=role, source="srun"), there=WITH_SPARE)
        assert (decision.action, decision.root, decision.exclude) == ("restart", None, ())
        assert decision.reason.startswith("the cause is unknown; ")

    @pytest.mark.parametrize("kind", ["gpu_ras_uncorrectable", "node_dead", "slurm_node_fail"])
    @pytest.mark.parametrize("earlier", ["rank_killed", "user_error", "rank_hang", "nic_fault", "user_import"])
    def test_a_machine_that_says_it_is_broken_though_a_program_complained_first(
        self, kind: str, earlier: str
    ) -> None:
        decision = decided(fault(earlier, "node0", ago=9.0), fault(kind, ago=1.0), there=WITH_SPARE)
        assert decision.root is not None
        assert (decision.root.kind, decision.exclude) == (kind, ("node1",))

    def test_a_host_out_of_memory_explains_the_rank_that_was_killed_on_it(self) -> None:
        killed, oom = fault("rank_killed", ago=5.0, rank=5, source="srun"), fault("host_oom", ago=2.0)
        assert decided(killed, oom).root == oom
        assert decided(killed, fault("host_oom", "node0", ago=2.0)).root == killed

    def test_what_a_rank_said_explains_its_end(self) -> None:
        killed = fault("rank_killed", ago=5.0, rank=5, source="srun")
        said = fault("gpu_memory_fault", ago=2.0, rank=5, source="log")
        assert decided(killed, said).root == said
        assert decided(killed, fault("user_error", ago=2.0, rank=4, source="log")).root == killed

    def test_a_file_system_that_stalled_several_nodes_explains_a_hang(self) -> None:
        hang = fault("rank_hang", ago=90.0, rank=5)
        stalled = fault("storage_fault", None, ago=9.0, source="agent")
        assert decided(hang, stalled).root == stalled
        assert decided(hang, fault("storage_fault", "node0", ago=9.0)).root == hang
        assert decided(fault("user_error", ago=90.0), stalled).reason.startswith("node1: error of the program")

    @pytest.mark.parametrize("kind", ["rccl_timeout", "hang_heartbeat"])
    def test_who_waited_only_where_there_is_no_other(self, kind: str) -> None:
        waiter, hang = fault(kind, "node0", ago=9.0), fault("rank_hang", ago=2.0, rank=5)
        assert decided(waiter, hang).root == hang
        assert decided(waiter).root == waiter

    def test_not_what_the_run_overcame(self) -> None:
        old, killed = fault("nic_fault", ago=900.0), fault("rank_killed", "node2", source="srun")
        assert decided(old, killed, progressed_at=NOW - 10).root == killed
        assert decided(old, killed, progressed_at=NOW - 901).root == old

    def test_the_end_of_a_rank_though_its_peers_finished_their_step(self) -> None:
        killed = fault("rank_killed", ago=30.0, source="srun")
        assert decided(killed, progressed_at=NOW - 1).root == killed

    def test_not_a_glitch_that_was_over_long_before(self) -> None:
        glitch = fault("nic_link_down", ago=900.0), fault("nic_link_down", ago=880.0, cleared=True)
        assert decided(*glitch, fault("user_error")).reason.startswith("node1: error of the program")

    def test_a_glitch_that_was_over_too_late(self) -> None:
        glitch = fault("nic_link_down", ago=30.0), fault("nic_link_down", ago=10.0, cleared=True)
        decision = decided(*glitch, fault("rank_exit", ago=9.0))
        assert decision.root == glitch[0]
        assert (decision.action, decision.exclude) == ("restart", ())

    def test_a_slow_node_only_where_settings_say_so_and_a_spare_is_there(self) -> None:
        slow, act = fault("straggler", ago=700.0, role="advisory"), {"straggler": {"act": True}}
        assert decided(slow, there=WITH_SPARE, says=act).exclude == ("node1",)
        assert decided(slow, there=WITH_SPARE).root is None
        assert decided(slow, says=act).root is None
        assert decided(slow, fault("user_error"), there=WITH_SPARE, says=act).exclude == ()
