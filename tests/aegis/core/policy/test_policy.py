"""What the policy decides after each kind of fault: where the ranks start again, and when the run stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.attempts import (
    HARDWARE,
    NODES,
    NOW,
    STOPPING,
    excluded,
    fault,
    history,
    incident,
)
from tests.aegis.core.policy.decisions import EVERY, GOES_ON, WITH_SPARE, decided
from zslurm.aegis.core.policy.policy import MOST_REFUSALS, most_excluded
from zslurm.aegis.fault_kinds import FAULT_RULES, rule_of
from zslurm.aegis.types import Fault, History, Incident
from zslurm.config.aegis import AegisSection


def test_every_kind_of_fault_is_in_one_of_the_groups_that_are_tested_here() -> None:
    scheduler = {"slurm_time_limit", "slurm_requeue", "slurm_preempt", "slurm_task_failure", "slurm_step_refused"}
    responses = {kind for kind, rule in FAULT_RULES.items() if not rule.advisory}
    assert responses == {*EVERY, *scheduler, "straggler", "orphans_many"}


class TestNextStart:
    ECC = fault("gpu_ras_uncorrectable", gpu="0000:c1:00.0")
    DEAD = fault("node_dead")
    WITHOUT_NODE1 = ("node0", "node2")

    @pytest.mark.parametrize("kind", [kind for kind in GOES_ON if kind not in HARDWARE])
    def test_in_place_where_no_node_is_excluded(self, kind: str) -> None:
        decision = decided(fault(kind), there=WITH_SPARE)
        assert (decision.action, decision.nodes, decision.exclude) == ("restart", NODES[:3], ())
        assert decision.reason.endswith("1 of 3 without a new checkpoint, after 30 s") == (
            rule_of(kind).then == "wait"
        )

    def test_with_a_spare_that_the_job_has_even_where_it_dies_with_its_nodes(self) -> None:
        assert decided(self.ECC, there={"alive": NODES, "outlives_nodes": False}).action == "swap"

    def test_with_the_spare_that_costs_the_fewest_hops(self) -> None:
        """node4 shares the slices of all kept nodes, node3 none; without slices it is the first."""
        there: dict[str, Any] = {"alive": ("node0", "node2", "node3", "node4")}
        assert decided(self.DEAD, there=there).nodes == ("node0", "node2", "node3")
        near, far = ("a/0", "b/1"), ("c/2", "d/3")
        slices = {"node0": near, "node1": near, "node2": near, "node3": far, "node4": near}
        decision = decided(self.DEAD, there=there | {"slices": slices})
        assert (decision.action, decision.nodes) == ("swap", ("node0", "node2", "node4"))
        assert "node4 in place of node1" in decision.reason

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

    def test_a_run_that_continues_with_fewer_nodes_restarts_on_them(self) -> None:
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


def bug_on_rank_3(**fields: Any) -> Fault:
    bug = fault("user_error", rank=3, step=50, source="rank")
    return replace(bug, line="IndexError: index 7", **fields) if "line" not in fields else replace(bug, **fields)


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
        bug = fault("host_oom", step=50, source="rank")
        decision = decided(bug, past=history(*[incident(bug)] * 3))
        assert decision.reason.endswith("the same error after the same step 4 times")

    def test_an_error_of_the_program_that_comes_back_stops_the_run(self) -> None:
        """Neither another start nor another node changes what the program computes."""
        bug = bug_on_rank_3(line="IndexError: index 7 is out of range")
        decision = decided(bug, past=history(incident(bug)))
        assert decision.action == "stop"
        assert "the same error as in attempt" in decision.reason
        assert "on rank 3, and no step more: IndexError: index 7" in decision.reason

    @pytest.mark.parametrize("now", [{"rank": 2}, {"step": 51}, {"line": "KeyError: 'x'"}], ids=str)
    def test_another_error_or_one_after_more_steps_is_tried_again(self, now: dict[str, Any]) -> None:
        past = history(incident(bug_on_rank_3()))
        assert decided(bug_on_rank_3(**now), past=past, there=WITH_SPARE).action != "stop"

    def test_a_new_checkpoint_lets_an_error_of_the_program_be_tried_again(self) -> None:
        bug = bug_on_rank_3()
        assert decided(bug, past=history(incident(bug)), step=41).action == "restart"

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
        past = history(exclusions=excluded(*(f"x{i}" for i in range(8))))
        decision = decided(fault("gpu_bad_pages"), past=past, there=WITH_SPARE)
        assert (decision.action, decision.exclude) == ("stop", ())
        assert "aegis.max_excluded: 8" in decision.reason
        assert decided(fault("user_error"), past=past, there=WITH_SPARE).action == "restart"

    def test_a_dead_node_beyond_that_is_replaced_without_an_exclusion_or_left_to_slurm(self) -> None:
        past = history(exclusions=excluded(*(f"x{i}" for i in range(8))))
        decision = decided(fault("node_dead"), past=past, there={"alive": ("node0", "node2", "node3")})
        assert (decision.action, decision.exclude, decision.nodes) == ("swap", (), ("node0", "node2", "node3"))
        assert decision.reason.endswith("8 nodes are excluded already; aegis.max_excluded: 8")
        decision = decided(fault("node_dead"), past=past, there={"alive": ("node0", "node2")})
        assert (decision.action, decision.exclude) == ("requeue", ())

    def test_a_large_run_may_exclude_a_twentieth_of_its_nodes(self) -> None:
        settings = AegisSection()
        assert [most_excluded(settings, nodes) for nodes in (1, 160, 1024)] == [8, 8, 51]
        assert most_excluded(AegisSection(max_excluded=3), 1024) == 3

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
        assert decided(nan, past=history(incident(fault("nan_loss", rank=4, gpu="0")))).test_gpu is None
        unknown_gpu = fault("nan_loss", rank=5)
        again = decided(unknown_gpu, past=history(incident(unknown_gpu)))
        assert (again.action, again.test_gpu, again.exclude) == ("restart", ("node1", "5"), ())


class TestRefusedSteps:
    """Memory is not available: the controller has just come back, or Slurm counts that of a dead node still."""

    REFUSED = fault("slurm_step_refused", None, source="srun")

    def test_it_is_tried_again_with_growing_pauses_and_then_stops_with_slurms_message(self) -> None:
        incidents: list[Incident] = []
        waits = []
        while (decision := decided(self.REFUSED, past=History(tuple(incidents)))).action != "stop":
            assert (decision.action, decision.exclude, decision.nodes) == ("restart", (), NODES[:3])
            assert decision.wait_s is not None
            waits.append(decision.wait_s)
            incidents.append(incident(decision.root, ago=4000.0 - len(incidents), step=40))
            assert len(incidents) < 100, "it never stops"
        assert len(waits) == MOST_REFUSALS - 1
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
        refused = [incident(self.REFUSED, ago=100.0 - index) for index in range(MOST_REFUSALS - 1)]
        past = history(*refused, incident(fault("rank_killed"), ago=50.0))
        assert decided(self.REFUSED, past=history(*refused)).action == "stop"
        assert decided(self.REFUSED, past=past).action == "restart"

    def test_who_submits_the_run_again_starts_afresh(self) -> None:
        refused = [incident(self.REFUSED, ago=100.0 - index) for index in range(MOST_REFUSALS)]
        past = history(*refused[:-1], replace(refused[-1], action="stop"))
        assert decided(self.REFUSED, past=past).wait_s == 5.0
