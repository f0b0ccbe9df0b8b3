"""What the policy does about every kind of fault, with every kind of past."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.attempts import (
    BLAMELESS,
    HARDWARE,
    NETWORK,
    NODES,
    NOW,
    SETTINGS,
    STOPPING,
    UNEXPLAINED,
    attempt_state,
    fault,
    history,
    incident,
    resources,
    settings,
)
from zslurm.aegis.fault_kinds import FAULT_KINDS, fault_kind
from zslurm.aegis.policy.policy import _MOST_REFUSALS, alarm, decide
from zslurm.aegis.root_cause import without_overcome
from zslurm.aegis.types import Alarm, Decision, Exclusion, Fault, History, Incident

EVERY = (*HARDWARE, *NETWORK, *UNEXPLAINED, *BLAMELESS)
GOES_ON = tuple(kind for kind in EVERY if kind not in STOPPING)
WITH_SPARE = {"alive": NODES}


def decided(
    *faults: Fault, past: History | None = None, there: dict[str, Any] | None = None,
    says: dict[str, Any] | None = None, **more: Any,
) -> Decision:  # fmt: skip
    return decide(
        attempt_state(*faults, **more), past or history(), resources(**there or {}), settings(**says or {})
    )


def raised(
    *faults: Fault, past: History | None = None, says: dict[str, Any] | None = None, spares: int = 0, **more: Any
) -> Alarm:
    now = attempt_state(*faults, outcome=None, **more)
    return alarm(now, past or history(), settings(**says or {}), spares=spares)


def past_of(kind: str, *nodes: str, step: int = 40, **more: Any) -> History:
    """Failures for the same reason on these nodes, one after the other, each a checkpoint further."""
    roots = [fault(kind, node, ago=600.0 - i, **more) for i, node in enumerate(nodes)]
    return history(*(incident(root, step=step - len(nodes) + i) for i, root in enumerate(roots)))


def test_every_kind_of_fault_is_in_one_of_the_groups_that_are_tested_here() -> None:
    scheduler = {"slurm_time_limit", "slurm_requeue", "slurm_preempt", "slurm_task_failure", "slurm_step_refused"}
    responses = {kind for kind in FAULT_KINDS.values() if not kind.advisory}
    assert responses == {*EVERY, *scheduler, "straggler", "orphans_many"}


class TestStepsThatSlurmRefuses:
    """Memory is not available: the controller has just come back, or Slurm counts that of a dead node still."""

    REFUSED = fault("slurm_step_refused", None, source="srun")

    def test_it_is_tried_again_with_growing_pauses_and_then_stops_with_slurms_words(self) -> None:
        incidents: list[Incident] = []
        waits = []
        while (decision := decided(self.REFUSED, past=History(tuple(incidents)))).action != "stop":
            assert (decision.action, decision.exclude, decision.nodes) == ("restart", (), NODES[:3])
            assert decision.wait_s is not None
            waits.append(decision.wait_s)
            incidents.append(incident(decision.root, ago=4000.0 - len(incidents), step=40))
            assert len(incidents) < 100, "it never stops"
        assert len(waits) == _MOST_REFUSALS - 1
        assert waits == sorted(waits)
        assert 300.0 < sum(waits) < 3600.0, "longer than Slurm needs to notice a dead node"
        assert decision.reason.endswith("12 times in a row: words of slurm_step_refused")

    @pytest.mark.parametrize("kind", ["rank_killed", "nan_loss"])
    def test_it_spends_nothing_of_the_budget(self, kind: str) -> None:
        refused = [incident(self.REFUSED, ago=100.0 - index) for index in range(9)]
        past = history(*refused, incident(fault(kind, "node0"), ago=50.0))
        starts = tuple(NOW - 100.0 + index for index in range(10))
        says = {"retries": 2, "restarts_per_hour": 3}
        assert decided(fault(kind, "node2"), past=replace(past, starts=starts), says=says).action == "restart"

    def test_another_failure_in_between_counts_the_refusals_anew(self) -> None:
        refused = [incident(self.REFUSED, ago=100.0 - index) for index in range(_MOST_REFUSALS - 1)]
        past = history(*refused, incident(fault("rank_killed"), ago=50.0))
        assert decided(self.REFUSED, past=history(*refused)).action == "stop"
        assert decided(self.REFUSED, past=past).action == "restart"

    def test_who_submits_the_run_again_starts_afresh(self) -> None:
        refused = [incident(self.REFUSED, ago=100.0 - index) for index in range(_MOST_REFUSALS)]
        past = history(*refused[:-1], replace(refused[-1], action="stop"))
        assert decided(self.REFUSED, past=past).wait_s == 5.0


class TestWhoIsExcluded:
    @pytest.mark.parametrize("kind", HARDWARE)
    def test_broken_hardware_at_once(self, kind: str) -> None:
        decision = decided(fault(kind), there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("swap", ("node1",))
        assert decision.nodes == ("node0", "node2", "node3")
        assert decision.reason.startswith("node1: ")

    @pytest.mark.parametrize(("kind", "times"), [*((k, 2) for k in NETWORK), *((k, 3) for k in UNEXPLAINED)])
    def test_doubtful_evidence_when_it_points_at_the_same_node_again(self, kind: str, times: int) -> None:
        for before in range(times):
            decision = decided(fault(kind), past=past_of(kind, *["node1"] * before), there=WITH_SPARE)
            last = before + 1 == times
            assert decision.action == ("swap" if last else "restart")
            assert decision.exclude == (("node1",) if last else ())

    @pytest.mark.parametrize("kind", [*NETWORK, *UNEXPLAINED])
    def test_nobody_when_it_points_at_one_node_after_the_other(self, kind: str) -> None:
        decision = decided(fault(kind), past=past_of(kind, "node0", "node2", "node0"), there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("restart", ())

    @pytest.mark.parametrize("kind", [*NETWORK, *UNEXPLAINED])
    def test_nobody_when_it_was_long_ago(self, kind: str) -> None:
        old = history(*(incident(fault(kind), step=i, ago=8 * 86400.0) for i in range(3)))
        assert decided(fault(kind), past=old, there=WITH_SPARE).exclude == ()

    @pytest.mark.parametrize("kind", UNEXPLAINED)
    def test_nobody_when_it_is_always_after_the_same_step(self, kind: str) -> None:
        past = past_of(kind, "node1", "node1", step=1)
        same = history(*(incident(fault(kind, step=50), step=i) for i in range(2)))
        assert decided(fault(kind, step=60), past=past, there=WITH_SPARE).exclude == ("node1",)
        assert decided(fault(kind, step=50), past=same, there=WITH_SPARE).exclude == ()

    @pytest.mark.parametrize("kind", [*NETWORK, *UNEXPLAINED])
    def test_nobody_when_several_nodes_say_the_same(self, kind: str) -> None:
        past = past_of(kind, *["node1"] * 4)
        decision = decided(fault(kind), fault(kind, "node2", ago=4.0), past=past, there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("restart", ())
        assert decision.root is not None
        assert decision.root.node is None

    @pytest.mark.parametrize("kind", BLAMELESS)
    def test_nobody_for_a_program_a_setting_or_a_service_however_often(self, kind: str) -> None:
        decision = decided(fault(kind), past=past_of(kind, *["node1"] * 9), there=WITH_SPARE)
        assert decision.exclude == ()
        assert decision.action == ("stop" if kind in STOPPING else "restart")

    def test_both_of_two_nodes_that_break_together(self) -> None:
        faults = fault("node_dead"), fault("node_dead", "node2", ago=3.0)
        decision = decided(*faults, there={"alive": ("node0", "node3", "node4")})
        assert (decision.action, decision.exclude) == ("swap", ("node1", "node2"))
        assert decision.nodes == ("node0", "node3", "node4")

    def test_nobody_when_every_node_is_said_to_be_dead(self) -> None:
        faults = [fault("node_dead", node) for node in NODES[:3]]
        assert decided(*faults).exclude == ()
        assert raised(*faults) == Alarm(True, None, "no node of the attempt answers")

    def test_a_nic_whose_link_stayed_down(self) -> None:
        decision = decided(fault("nic_link_down", ago=61.0, nic="ionic_3"), there=WITH_SPARE)
        assert decision.exclude == ("node1",)
        assert decision.reason.startswith("node1, NIC ionic_3: the link of a NIC is down")

    def test_a_node_that_is_excluded_already_is_not_excluded_again(self) -> None:
        past = history(exclusions=(Exclusion("node1", NOW - 60, "bad"),))
        assert decided(fault("gpu_ras_uncorrectable"), past=past, there=WITH_SPARE).exclude == ()

    def test_a_spare_that_broke_while_it_waited_is_excluded_and_takes_no_blame(self) -> None:
        broken, killed = fault("gpu_bad_pages", "node3"), fault("rank_killed", source="srun")
        assert not raised(broken).give_up
        decision = decided(broken, killed, there=WITH_SPARE)
        assert (decision.action, decision.root, decision.exclude) == ("restart", killed, ("node3",))
        decision = decided(broken, fault("node_dead"), there={"alive": ("node0", "node2", "node3", "node4")})
        assert (decision.action, decision.exclude) == ("swap", ("node1", "node3"))
        assert decision.nodes == ("node0", "node2", "node4")
        assert decided(broken, killed, there=WITH_SPARE, says={"max_excluded": 0}).exclude == ()

    def test_an_expired_exclusion_counts_no_more(self) -> None:
        past = history(exclusions=tuple(Exclusion(f"old{i}", NOW - 8 * 86400, "bad") for i in range(9)))
        assert decided(fault("gpu_ras_uncorrectable"), past=past, there=WITH_SPARE).action == "swap"


class TestWhoTakesTheBlame:
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
    def test_who_waited_only_where_there_is_nobody_else(self, kind: str) -> None:
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


class TestAlarm:
    @pytest.mark.parametrize("kind", [*HARDWARE, "rank_hang"])
    def test_ends_the_attempt_at_once(self, kind: str) -> None:
        given = raised(fault(kind, ago=0.0))
        assert given.give_up
        assert given.exclude == (() if kind == "rank_hang" else ("node1",))

    @pytest.mark.parametrize("kind", [k for k in FAULT_KINDS if fault_kind(k).while_running == "record"])
    def test_lets_it_go_on(self, kind: str) -> None:
        assert not raised(fault(kind, ago=900.0), spares=1).give_up

    @pytest.mark.parametrize("kind", [*HARDWARE, "rank_hang", "nic_link_down", "straggler", "benign"])
    @pytest.mark.parametrize("role", ["advisory", "benign", "teardown"])
    def test_never_for_a_remark(self, kind: str, role: Any) -> None:
        assert not raised(fault(kind, ago=900.0, role=role), spares=1).give_up

    @pytest.mark.parametrize("kind", ["nic_link_down", "nic_fault", "rccl_timeout", "hang_heartbeat"])
    def test_tolerates_the_network_for_a_while(self, kind: str) -> None:
        assert not raised(fault(kind, ago=59.0)).give_up
        assert raised(fault(kind, ago=61.0)).give_up
        assert not raised(fault(kind, ago=61.0), says={"tolerate_s": 90}).give_up
        assert raised(fault(kind, ago=61.0)).reason.endswith("for more than 60 s")

    @pytest.mark.parametrize("node", ["node1", None])
    def test_a_fault_that_stands_still_ends_one_attempt_and_no_second(self, node: str | None) -> None:
        """The link is down, and there was no other node to go on with."""
        down = fault("nic_link_down", ago=200.0, nic="n3")
        past = history(incident(replace(down, node=node, nic=node and "n3")))
        assert raised(down).give_up
        assert not raised(down, past=past).give_up
        assert raised(fault("nic_link_down", ago=100.0, nic="n3"), past=past).give_up, "it went down again"
        assert raised(fault("nic_link_down", "node2", ago=200.0, nic="n3"), past=past).give_up == (
            node is not None
        )

    def test_is_silent_when_the_link_came_back(self) -> None:
        down, up = fault("nic_link_down", ago=80.0, nic="n3"), fault("nic_link_down", nic="n3", cleared=True)
        assert not raised(down, up).give_up
        assert not raised(down, fault("nic_fault", ago=70.0), up).give_up
        assert raised(down, fault("nic_link_down", nic="n4", cleared=True)).give_up
        assert raised(down, fault("nic_link_down", "node2", nic="n3", cleared=True)).give_up
        assert raised(fault("nic_link_down", ago=99.0, nic="n3", cleared=True), down).give_up

    def test_is_silent_when_all_ranks_went_on_though_not_about_a_link_that_is_still_down(self) -> None:
        assert not raised(fault("nic_fault", ago=80.0), progressed_at=NOW - 1).give_up
        assert raised(fault("nic_fault", ago=80.0), progressed_at=NOW - 90).give_up
        assert raised(fault("nic_link_down", ago=80.0), progressed_at=NOW - 1).give_up
        assert raised(fault("gpu_hang_reset", ago=80.0), progressed_at=NOW - 1).give_up

    def test_what_the_run_overcame_is_forgotten(self) -> None:
        """A NIC that hiccups for days: each look at its thousands of faults would take seconds."""
        old = [fault("nic_fault", ago=ago, nic="n1", cleared=ago % 2 == 1) for ago in range(100, 4100)]
        down, up = fault("nic_link_down", ago=9.0, nic="n1"), fault("nic_link_down", nic="n1", cleared=True)
        now = attempt_state(*old, fault("host_oom", ago=90.0), down, up, outcome=None, progressed_at=NOW - 20)
        assert without_overcome(now, SETTINGS) == [down, up]
        later = replace(now, progressed_at=NOW - 1)
        assert without_overcome(later, SETTINGS) == []
        standing = attempt_state(down, fault("rank_killed", ago=90.0, source="srun"), progressed_at=NOW - 1)
        assert without_overcome(standing, SETTINGS) == list(standing.faults)

    def test_ends_after_a_collective_timed_out_whoever_it_waited_for(self) -> None:
        assert raised(fault("rccl_timeout", ago=80.0, role="cascade")).give_up
        assert not raised(fault("peer_lost", ago=80.0, role="cascade")).give_up

    def test_hang_that_was_over_by_itself(self) -> None:
        hang, over = fault("rank_hang", ago=9.0, rank=5), fault("rank_hang", rank=5, cleared=True)
        assert not raised(hang, over).give_up
        assert raised(hang, fault("rank_hang", rank=6, cleared=True)).give_up

    def test_straggler_only_where_settings_say_so_and_a_spare_is_there(self) -> None:
        slow, act = fault("straggler", role="advisory"), {"straggler": {"act": True}}
        assert raised(slow, says=act, spares=1).exclude == ("node1",)
        assert not raised(slow, says=act).give_up
        assert not raised(slow, spares=1).give_up


class TestHowItGoesOn:
    ECC = fault("gpu_ras_uncorrectable", gpu="0000:c1:00.0")
    DEAD = fault("node_dead")
    WITHOUT_NODE1 = ("node0", "node2")

    @pytest.mark.parametrize("kind", [kind for kind in GOES_ON if kind not in HARDWARE])
    def test_in_place_where_nobody_is_excluded(self, kind: str) -> None:
        decision = decided(fault(kind), there=WITH_SPARE)
        assert (decision.action, decision.nodes, decision.exclude) == ("restart", NODES[:3], ())
        assert decision.reason.endswith("1 of 3 without a new checkpoint, after 30 s") == (
            fault_kind(kind).then == "wait"
        )

    def test_with_a_spare_that_the_job_has_even_where_it_dies_with_its_nodes(self) -> None:
        assert decided(self.ECC, there={"alive": NODES, "outlives_nodes": False}).action == "swap"

    def test_with_fewer_nodes_where_that_is_allowed(self) -> None:
        decision = decided(self.ECC, says={"min_nodes": 2})
        assert (decision.action, decision.nodes, decision.exclude) == ("shrink", self.WITHOUT_NODE1, ("node1",))

    def test_in_the_queue_where_it_is_not(self) -> None:
        for says in ({}, {"min_nodes": 3}):
            decision = decided(self.ECC, says=says)
            assert (decision.action, decision.exclude, decision.n_nodes) == ("requeue", ("node1",), None)
        assert decision.reason == (
            "node1, GPU 0000:c1:00.0: uncorrectable memory error of a GPU; requeue without node1"
        )

    def test_in_the_queue_where_the_job_ends_with_its_node(self) -> None:
        alive = ("node0", "node2", "node3")
        assert decided(self.DEAD, there={"alive": alive, "outlives_nodes": False}).action == "requeue"
        assert decided(self.DEAD, there={"alive": alive}).action == "swap"

    def test_a_run_that_goes_on_with_fewer_nodes_restarts_on_them(self) -> None:
        there = {"alive": self.WITHOUT_NODE1, "in_use": self.WITHOUT_NODE1}
        decision = decided(fault("user_error", "node0"), there=there, says={"min_nodes": 2})
        assert (decision.action, decision.nodes) == ("restart", self.WITHOUT_NODE1)

    @pytest.mark.parametrize(
        ("elsewhere", "asked", "min_nodes", "n_nodes"),
        [(4, 3, None, None), (4, 4, None, 3), (3, 3, 2, 2), (3, 3, 1, 2), (None, 4, None, None)],
    )
    def test_on_as_many_nodes_as_slurm_can_give(
        self, elsewhere: int | None, asked: int, min_nodes: int | None, n_nodes: int | None
    ) -> None:
        """Slurm still counts node1: it is alive."""
        there = {"elsewhere": elsewhere, "asked": asked, "outlives_nodes": False}
        says = {"min_nodes": min_nodes} if min_nodes else {}
        decision = decided(self.ECC, there=there, says=says, asked_to_stop="SIGUSR2")
        assert (decision.action, decision.exclude, decision.n_nodes) == ("requeue", ("node1",), n_nodes)

    def test_on_the_same_nodes_while_they_live_where_none_can_be_replaced(self) -> None:
        for there in ({"elsewhere": 3}, {"can_requeue": False}, {"demanded": frozenset({"node1"})}):
            decision = decided(self.ECC, there=there)
            assert (decision.action, decision.nodes, decision.exclude) == ("restart", NODES[:3], ())
            spent = history(*[incident(self.ECC)] * 3)
            assert decided(self.ECC, past=spent, there=there).action == "stop"

    def test_never_on_a_gpu_that_computes_wrong_numbers(self) -> None:
        decision = decided(fault("nan_loss", ago=9.0), fault("gpu_test_failed"), there={"can_requeue": False})
        assert (decision.action, decision.exclude) == ("stop", ())

    def test_it_waits_in_the_queue_for_dead_nodes_where_there_are_no_others(self) -> None:
        for there in ({"elsewhere": 2}, {"demanded": frozenset({"node1"})}):
            decision = decided(self.DEAD, there={"alive": self.WITHOUT_NODE1, **there})
            assert (decision.action, decision.exclude, decision.n_nodes) == ("requeue", (), None)

    def test_it_stops_where_a_dead_node_cannot_be_replaced_at_all(self) -> None:
        decision = decided(self.DEAD, there={"alive": self.WITHOUT_NODE1, "can_requeue": False})
        assert decision.action == "stop"
        assert "the job cannot be requeued" in decision.reason

    def test_never_beside_what_cannot_be_killed_on_several_nodes(self) -> None:
        """It is left to Slurm, which gives the job no node on which it could not end everything."""
        left = [fault("rank_hang", ago=9.0), fault("storage_fault", None), fault("orphans_many", None)]
        decision = decided(*left, there=WITH_SPARE)
        assert (decision.action, decision.exclude, decision.root) == ("requeue", (), left[-1])
        assert decision.reason == "processes of the ended attempt are left on several nodes; requeue"
        alive = {"alive": ("node0", "node2", "node3")}
        decision = decided(*left, fault("node_dead", ago=20.0), there=alive)
        assert (decision.action, decision.exclude) == ("requeue", ("node1",))
        assert decided(*left, there={**WITH_SPARE, "can_requeue": False}).action == "stop"
        assert decided(*left, past=history(*[incident(None)] * 3), there=WITH_SPARE).action == "stop"

    @pytest.mark.parametrize("kind", EVERY)
    def test_on_one_machine_it_restarts_or_stops(self, kind: str) -> None:
        there = {"alive": ("laptop",), "in_use": ("laptop",), "needed": 1, "elsewhere": None, "can_requeue": False}
        decision = decided(fault(kind, "laptop"), there=there)
        assert decision.action == ("stop" if kind in (*STOPPING, "gpu_test_failed", "orphans") else "restart")
        assert decision.exclude == ()

    def test_a_missing_node_without_a_known_cause_is_replaced_and_not_excluded(self) -> None:
        decision = decided(there={"alive": ("node0", "node2", "node3")})
        assert (decision.action, decision.exclude) == ("swap", ())

    @pytest.mark.parametrize("kind", ["storage_full", "storage_fault"])
    def test_it_waits_longer_each_time_for_a_file_system(self, kind: str) -> None:
        waits = [
            decided(fault(kind), past=history(*[incident(fault(kind))] * before)).wait_s for before in range(3)
        ]
        assert waits == [30.0, 60.0, 120.0]


class TestLimits:
    @pytest.mark.parametrize("kind", [kind for kind in GOES_ON if kind not in HARDWARE])
    def test_it_stops_when_the_budget_is_spent(self, kind: str) -> None:
        spent = history(*(incident(fault(kind, f"node{i}", ago=60.0)) for i in range(3)))
        decision = decided(fault(kind, None), past=spent)
        assert (decision.action, decision.exclude) == ("stop", ())
        assert decision.reason.endswith("4 failures without a new checkpoint; aegis.retries: 3")

    def test_a_new_checkpoint_gives_the_budget_back(self) -> None:
        spent = history(*[incident(fault("user_error"))] * 9)
        assert decided(fault("user_error"), past=spent, step=41).action == "restart"
        assert decided(fault("user_error"), past=spent, step=40).action == "stop"
        assert decided(fault("user_error"), past=spent, step=39).action == "stop"

    def test_who_submits_a_stopped_run_again_starts_afresh(self) -> None:
        root = fault("user_error")
        for end in ("stop", "finish"):
            past = history(*[incident(root)] * 3, incident(root, action=end, ago=60.0), starts=(NOW - 90,) * 20)
            assert decided(root, past=past).action == "restart"

    def test_an_exclusion_spends_nothing(self) -> None:
        past = history(*(incident(fault("node_dead", f"x{i}"), excluded=(f"x{i}",)) for i in range(5)))
        assert decided(fault("user_error"), past=past).action == "restart"
        spent = history(*[incident(fault("user_error"))] * 5)
        assert decided(fault("node_dead"), past=spent, there=WITH_SPARE).action == "swap"

    def test_what_only_a_log_calls_a_time_limit_spends_the_budget(self) -> None:
        said = fault("slurm_time_limit", source="log")
        assert decided(said).action == "restart"
        assert decided(said, past=history(*[incident(said)] * 3)).action == "stop"

    def test_no_retries_at_all(self) -> None:
        decision = decided(fault("rank_killed"), says={"retries": 0})
        assert decision.action == "stop"
        assert decision.reason == "node1: a rank was killed; 1 failure without a new checkpoint; aegis.retries: 0"

    def test_the_same_error_after_the_same_step_is_named(self) -> None:
        bug = fault("user_error", step=50, source="rank")
        decision = decided(bug, past=history(*[incident(bug)] * 3))
        assert decision.reason == (
            "node1, after step 50: error of the program; the same error after the same step 4 times"
        )

    @pytest.mark.parametrize("kind", STOPPING)
    def test_what_no_start_can_change_stops_at_once(self, kind: str) -> None:
        assert decided(fault(kind)).action == "stop"

    def test_out_of_gpu_memory_is_retried_where_settings_say_so(self) -> None:
        assert decided(fault("gpu_oom"), says={"gpu_oom": "retry"}).action == "restart"

    def test_too_many_starts_within_an_hour(self) -> None:
        starts = tuple(NOW - 60.0 * i for i in range(12))
        assert decided(fault("rank_killed"), past=history(starts=starts)).action == "stop"
        assert decided(fault("rank_killed"), past=history(starts=starts[1:])).action == "restart"
        earlier = tuple(start - 3600 for start in starts)
        assert decided(fault("rank_killed"), past=history(starts=earlier)).action == "restart"

    def test_too_many_exclusions(self) -> None:
        past = history(exclusions=tuple(Exclusion(f"x{i}", NOW - 60, "bad") for i in range(8)))
        decision = decided(fault("gpu_bad_pages"), past=past, there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("stop", ())
        assert "aegis.max_excluded: 8" in decision.reason
        assert decided(fault("user_error"), past=past, there=WITH_SPARE).action == "restart"

    def test_a_dead_node_beyond_that_is_left_to_slurm(self) -> None:
        past = history(exclusions=tuple(Exclusion(f"x{i}", NOW - 60, "bad") for i in range(8)))
        decision = decided(fault("node_dead"), past=past, there={"alive": ("node0", "node2", "node3")})
        assert (decision.action, decision.exclude) == ("requeue", ())

    def test_the_same_numbers_at_the_same_step_stop_the_second_time_once_the_gpu_passed_its_test(self) -> None:
        nan = fault("nan_loss", rank=5, source="rank", step=41, fingerprint="5e1f")
        assert decided(nan).action == "restart", "the first time"
        again = decided(nan, past=history(incident(nan)))
        assert (again.action, again.test_gpu) == ("stop", ("node1", "5"))
        assert "those of attempt 1 to the last bit" in again.reason and "optim.skip_limit" in again.reason
        other = incident(fault("rank_killed", rank=2))
        assert decided(nan, past=history(incident(nan), other)).action == "stop", "whatever happened in between"
        unknown = replace(nan, node=None, rank=None)
        assert decided(unknown, past=history(incident(unknown))).test_gpu is None
        broken = decided(nan, fault("gpu_test_failed", ago=0), past=history(incident(nan)), there=WITH_SPARE)
        assert (broken.action, broken.exclude) == ("swap", ("node1",))

    @pytest.mark.parametrize(
        ("before", "saved"),
        [({"step": 30}, 40), ({"fingerprint": "77aa"}, 40), ({"fingerprint": None}, 40), ({}, 30)],
        ids=["another step", "other numbers", "of an older version", "a checkpoint later"],
    )
    def test_nan_that_differs_is_tried_again(self, before: dict[str, Any], saved: int) -> None:
        nan = fault("nan_loss", rank=5, source="rank", step=41, fingerprint="5e1f")
        past = history(incident(replace(nan, **before), step=saved))
        assert decided(nan, past=past).action == "restart"

    def test_nan_from_one_gpu_again_and_again_is_tested_there(self) -> None:
        nan = fault("nan_loss", rank=5, gpu="1", source="rank")
        past = history(incident(nan, step=30))
        assert decided(nan).test_gpu is None
        assert decided(nan, past=past).test_gpu == ("node1", "1")
        assert decided(nan, past=past, says={"nan_repeats": 3}).test_gpu is None
        assert decided(nan, past=history(incident(fault("nan_loss", rank=4, gpu="0")))).test_gpu is None
        unknown_gpu = fault("nan_loss", rank=5)
        again = decided(unknown_gpu, past=history(incident(unknown_gpu)))
        assert (again.action, again.test_gpu, again.exclude) == ("restart", ("node1", "5"), ())


class TestAskedToStop:
    def test_a_completed_run_is_finished_whatever_was_noticed(self) -> None:
        assert decided(fault("gpu_ras_uncorrectable"), outcome="completed").action == "finish"

    @pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
    @pytest.mark.parametrize("outcome", ["interrupted", "failed"])
    def test_asked_by_a_person(self, signal: str, outcome: str) -> None:
        decision = decided(fault("rank_killed"), asked_to_stop=signal, outcome=outcome)
        assert (decision.action, decision.exclude) == ("finish", ())

    def test_requeued_by_slurm(self) -> None:
        assert decided(fault("rank_killed"), requeued=True).action == "finish"
        said = fault("slurm_requeue", role="teardown", source="srun")
        assert decided(fault("rank_killed"), said).action == "finish"
        rumour = fault("slurm_preempt", role="teardown", source="log")
        assert decided(fault("rank_killed"), rumour).action == "restart"

    def test_saved_without_being_asked_by_us(self) -> None:
        assert decided(outcome="interrupted").action == "finish"

    def test_saved_because_of_a_fault(self) -> None:
        assert decided(fault("gpu_bad_pages"), outcome="interrupted", there=WITH_SPARE).action == "swap"

    @pytest.mark.parametrize("outcome", ["interrupted", "failed"])
    def test_time_limit(self, outcome: str) -> None:
        limit = {"asked_to_stop": "SIGUSR2", "outcome": outcome}
        killed = fault("rank_killed", source="srun")
        decision = decided(killed, **limit)
        assert (decision.action, decision.exclude, decision.n_nodes) == ("requeue", (), None)
        assert decision.root is not None
        assert decision.root.kind == "slurm_time_limit"
        assert decided(killed, says={"requeue_at_time_limit": False}, **limit).action == "finish"
        assert decided(killed, there={"can_requeue": False}, **limit).action == "finish"
        assert decided(killed, says={"retries": 0}, **limit).action == "requeue"

    @pytest.mark.parametrize("signal", [None, "SIGUSR2"])
    @pytest.mark.parametrize("outcome", ["interrupted", "failed"])
    def test_preempted_in_a_grace_time(self, signal: str | None, outcome: str) -> None:
        """Back into the queue, whatever the settings say of the time limit: nothing is blamed or counted."""
        asked = {"preempted": "requeue", "asked_to_stop": signal, "outcome": outcome}
        killed = fault("rank_killed", source="srun")
        decision = decided(killed, says={"requeue_at_time_limit": False, "retries": 0}, **asked)
        assert (decision.action, decision.exclude) == ("requeue", ())
        assert decision.root is not None
        assert decision.root.kind == "slurm_preempt"
        assert decided(killed, there={"can_requeue": False}, **asked).action == "finish"
        assert decided(fault("gpu_bad_pages"), **asked).exclude == ("node1",), "what is broken stays behind"
        often = history(*[incident(decision.root, action="requeue")] * 9)
        assert decided(past=often, **asked).action == "requeue"
        assert decided(fault("user_error"), past=often).action == "restart", "no retry is spent"

    def test_preempted_and_cancelled_or_requeued_by_slurm(self) -> None:
        assert decided(preempted="cancel", outcome="interrupted").action == "finish"
        assert decided(preempted="cancel", asked_to_stop="SIGUSR2", outcome="interrupted").action == "finish"
        due_to = fault("slurm_preempt", role="teardown", source="srun")  # srun reports it in either mode
        assert "cancels it" in decided(due_to, preempted="cancel", outcome="interrupted").reason
        assert decided(preempted="requeue", requeued=True, asked_to_stop="SIGTERM").action == "finish"
        cancelled = decided(preempted="requeue", asked_to_stop="SIGTERM", outcome="interrupted")
        assert cancelled.action == "finish", "a person cancelled the job in its grace time"

    @pytest.mark.parametrize("signal", ["SIGUSR1", "SIGUSR2"])
    def test_either_user_signal_is_a_time_limit(self, signal: str) -> None:
        assert decided(asked_to_stop=signal, outcome="interrupted").action == "requeue"

    def test_time_limit_that_slurm_itself_tells_of(self) -> None:
        said = fault("slurm_time_limit", role="teardown", source="srun")
        assert decided(fault("rank_killed", source="srun"), said).action == "requeue"

    def test_time_limit_takes_a_broken_node_along(self) -> None:
        for outcome in ("interrupted", "failed"):
            decision = decided(fault("gpu_bad_pages"), asked_to_stop="SIGUSR2", outcome=outcome)
            assert (decision.action, decision.exclude) == ("requeue", ("node1",))

    def test_time_limits_between_which_nothing_is_saved(self) -> None:
        limit = fault("slurm_time_limit", role="teardown")
        in_vain = history(*[incident(limit, action="requeue")] * 4)
        says = {"asked_to_stop": "SIGUSR2", "outcome": "interrupted"}
        assert decided(past=in_vain, **says).action == "stop"
        assert decided(past=in_vain, step=41, **says).action == "requeue"
        assert decided(fault("user_error"), past=in_vain).action == "restart"


def row(
    name: str, faults: list[Fault], action: str, *exclude: str, there: dict[str, Any] | None = None,
    says: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """A fault of the matrix, and what must be done about it; a spare is there unless `there` says otherwise."""
    return pytest.param(faults, there or WITH_SPARE, says or {}, more, action, exclude, id=name)


@pytest.mark.parametrize(
    ("faults", "there", "says", "more", "action", "exclude"),
    [
        row("1 one rank killed", [fault("rank_killed", rank=5, source="srun")], "restart"),
        row("2 one rank exits 1 once", [fault("rank_exit", rank=5, source="srun")], "restart"),
        row("3 rank stopped", [fault("rank_hang", rank=5, ago=0)], "restart"),
        row(
            "4 node dies",
            [
                fault("peer_lost", "node0", role="cascade"),
                fault("rank_killed", "node0", ago=4),
                fault("node_dead", ago=1),
            ],
            "swap", "node1", there={"alive": ("node0", "node2", "node3")},
        ),
        row(
            "5 two nodes die together", [fault("node_dead"), fault("node_dead", "node2")],
            "shrink", "node1", "node2", there={"alive": ("node0",)}, says={"min_nodes": 1},
        ),
        row(
            "6 node dies during a checkpoint write",
            [fault("storage_fault", "node0"), fault("node_dead", step=40)],
            "requeue", "node1", there={"alive": ("node0", "node2")},
        ),
        row(
            "7 uncorrectable ECC, line and counter",
            [fault("gpu_ras_uncorrectable", gpu="0"), fault("gpu_ras_uncorrectable", source="gpu", ago=1)],
            "swap", "node1",
        ),
        row("8 NIC link down", [fault("nic_link_down", ago=61)], "swap", "node1"),
        row(
            "9 NIC glitch of 20 s that a rank did not survive",
            [
                fault("nic_link_down", ago=25),
                fault("nic_link_down", ago=5, cleared=True),
                fault("rank_exit", ago=4, source="srun"),
            ],
            "restart",
        ),
        row("10 host OOM kill", [fault("rank_killed", rank=5), fault("host_oom", ago=2)], "restart"),
        row("11 GPU out of memory", [fault("gpu_oom")], "stop"),
        row("11 GPU out of memory, retried", [fault("gpu_oom")], "restart", says={"gpu_oom": "retry"}),
        row("12 NaN loss burst", [fault("nan_loss", None)], "restart"),
        row("13 newest checkpoint damaged", [fault("checkpoint_corrupt")], "restart"),
        row("14 disk full while saving", [fault("storage_full")], "restart"),
        row("15 time limit", [], "requeue", asked_to_stop="SIGUSR2", outcome="interrupted"),
        row("16 requeued from outside", [], "finish", asked_to_stop="SIGTERM", requeued=True),
        row(
            "17 slurmctld down while a rank is killed",
            [fault("slurm_control_plane", role="advisory"), fault("rank_killed", source="srun")],
            "restart",
        ),
        row("18 the batch host dies: the attempt is lost", [], "restart", outcome="lost"),
        row("19 deterministic bug at step 50", [fault("user_error", step=50, source="rank")], "restart"),
        row("20 bug at import", [fault("user_import", source="rank")], "stop"),
        row(
            "21 all spares used up, then one more node lost", [fault("node_dead")],
            "requeue", "node1", there={"alive": ("node0", "node2")},
        ),
        row(
            "22 agent killed, and later a rank",
            [fault("agent_lost", role="advisory", ago=99), fault("rank_killed", "node2")],
            "restart",
        ),
        row("23 supervisor killed: its successor finds a killed rank", [fault("rank_killed")], "restart"),
        row(
            "24 excluded node on a full partition", [fault("gpu_ras_uncorrectable")],
            "requeue", "node1", there={"elsewhere": 3}, says={"min_nodes": 2}, asked_to_stop="SIGUSR2",
        ),
        row(
            "25 NaN from one rank, and its GPU fails the test",
            [fault("nan_loss", rank=5), fault("gpu_test_failed", ago=0)],
            "swap", "node1",
        ),
    ],
)  # fmt: skip
def test_fault_matrix(
    faults: list[Fault], there: dict[str, Any], says: dict[str, Any], more: dict[str, Any], action: str,
    exclude: tuple[str, ...],
) -> None:  # fmt: skip
    decision = decided(*faults, there=there, says=says, **more)
    assert (decision.action, decision.exclude) == (action, exclude), decision.reason
    assert decision.reason
    assert "\n" not in decision.reason


def test_fault_matrix_9_a_glitch_of_20_s_restarts_nothing() -> None:
    down, up = fault("nic_link_down", ago=70.0), fault("nic_link_down", ago=50.0, cleared=True)
    assert not raised(fault("nic_link_down", ago=20.0)).give_up
    assert not raised(down, up).give_up


def test_fault_matrix_19_a_deterministic_bug_stops_after_the_budget() -> None:
    bug, incidents = fault("user_error", step=50, source="rank"), []
    while (decision := decided(bug, past=history(*incidents))).action == "restart":
        incidents.append(incident(bug))
    assert len(incidents) == SETTINGS.retries
    assert "the same error after the same step 4 times" in decision.reason


def test_fault_matrix_22_a_lost_agent_restarts_nothing() -> None:
    assert not raised(fault("agent_lost", role="advisory", ago=900.0)).give_up


def test_fault_matrix_23_a_new_supervisor_decides_alike() -> None:
    """It has the same events, and so the same faults and history, in whatever order it found them."""
    faults = [
        fault("rank_killed", ago=9.0, rank=5),
        fault("host_oom", ago=2.0),
        fault("peer_lost", role="cascade"),
    ]
    assert decided(*faults) == decided(*reversed(faults))


def test_fault_matrix_25_nan_from_one_rank_is_tested_before_it_is_blamed() -> None:
    nan = fault("nan_loss", rank=5, source="rank")
    decision = decided(nan, past=history(incident(nan)))
    assert (decision.action, decision.test_gpu, decision.exclude) == ("restart", ("node1", "5"), ())
