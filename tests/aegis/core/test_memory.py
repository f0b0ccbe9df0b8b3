"""Recovery in memory: generations, deadlines, and when the ranks are restarted."""

from __future__ import annotations

import pytest

from tests.aegis.core.sites import PER_NODE, Site
from zslurm.aegis.core.messages import NO_ANSWER, GiveUp, Paused, SparesChecked
from zslurm.aegis.core.policy.shrinking import Weighed
from zslurm.aegis.fault_kinds import GPU_RAS_UNCORRECTABLE, NODE_DEAD, RANK_HANG
from zslurm.aegis.types import Fault


@pytest.fixture
def site() -> Site:
    return Site()


def test_warm_processes_are_started_once_the_ranks_train(site: Site) -> None:
    assert site.asked == [(("n0", "n1", "n2"), 1), (("n3",), PER_NODE)]
    assert site.recorded("recovery_ready") == [{"attempt": 1, "nodes": "n[0-2]"}], "once every node has one"


def test_a_lost_rank_makes_a_generation(site: Site) -> None:
    assert not site.lose()
    assert site.lose(3)
    assert site.lose(3), "it is not begun again"
    (generation,) = site.generations
    assert (generation.number, generation.lost, generation.deadline_s) == (1, (3,), 10.0)
    assert generation.members == ("n0/0", "n0/1", "n1/0", "n1/w2", "n2/0", "n2/1")
    site.recover(1)
    assert not site.memory.active
    (event,) = site.recorded("recovered_in_memory")
    assert (event["ranks"], event["step"], event["rolled_back"], event["nodes"]) == ([3], 6, 1, "n[0-2]")
    assert site.replaced == ({3}, set())
    assert site.asked[2:] == [(("n1",), 1)], "the next fault may come to the same node"


def test_the_replacement_is_a_rank_that_can_be_lost_too(site: Site) -> None:
    site.lose(3)
    site.recover(1)
    site.reports({"event": "warm", "member": "n1/w9"}, step=9)
    site.end_warm("n1/w2")
    (ended,) = site.recorded("ranks_ended")
    assert (ended["ranks"], ended["what"], ended["warm"]) == ([3], "Killed", True)
    site.tick(9)
    assert site.generations[-1].members[3] == "n1/w9"


def test_a_dead_node_s_ranks_move_to_the_spare(site: Site) -> None:
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    assert site.generations[-1].lost == (2, 3)
    site.recover(1)
    assert site.state.rank_nodes == ["n0", "n0", "n3", "n3", "n2", "n2"]
    assert site.replaced == ({2, 3}, {"n1"})
    assert site.recorded("recovered_in_memory")[0]["nodes"] == "n[0,3],n2"


def test_a_spare_is_checked_again_before_each_use(site: Site) -> None:
    site.check_spares()
    assert site.lose(3), "its node's process takes its place, and no check is needed"
    site.recover(1)
    site.checks_end = False
    assert site.lose(dead=("n1",), kind=NODE_DEAD), "the others wait for the check"
    assert len(site.generations) == 1
    site.tell(SparesChecked({"n3": ""}, site.memory.check_round - 1))
    site.tick()
    assert len(site.generations) == 1, "the check of an earlier recovery"
    site.tell(SparesChecked({"n3": ""}, site.memory.check_round))
    site.tick()
    assert len(site.generations) == 2
    site.recover(2)
    assert site.state.rank_nodes == ["n0", "n0", "n3", "n3", "n2", "n2"]
    site.checks_end = True
    site.reports(*({"event": "warm", "member": f"n4/w{number}"} for number in (10, 11)), step=9)
    assert site.lose(dead=("n2",), kind=NODE_DEAD, step=9) and len(site.generations) == 3
    assert site.checked == [{"n3"}, {"n4"}]
    assert [row["nodes"] for row in site.recorded("nodes_excluded")] == [("n1",)], "the node that died"


def test_an_unfit_spare_is_excluded_and_another_one_used(site: Site) -> None:
    site.check_spares(n3="nics: ionic_2 is down")
    site.reports(*({"event": "warm", "member": name} for name in ("n4/w6", "n4/w7")))
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    assert site.generations[-1].members == ("n0/0", "n0/1", "n4/w6", "n4/w7", "n2/0", "n2/1")
    assert site.checked == [{"n3"}, {"n4"}]
    (excluded,) = site.recorded("nodes_excluded")
    assert (excluded["nodes"], excluded["reason"]) == (("n3",), "spare n3 is not fit: nics: ionic_2 is down")


@pytest.mark.parametrize(("reason", "excluded"), [("gpu-idle: it is not", 1), (NO_ANSWER, 0)])
def test_without_a_fit_spare_the_ranks_are_restarted(site: Site, reason: str, excluded: int) -> None:
    """Of an agent that does not answer in time no more is known: the restart gives it longer."""
    site.check_spares(n3=reason)
    assert not site.lose(dead=("n1",), kind=NODE_DEAD)
    (failed,) = site.recorded("recovery_failed")
    assert failed["reason"].startswith("no spare node has 2 warm processes")
    assert len(site.recorded("nodes_excluded")) == excluded
    assert site.generations == []


def test_a_check_that_does_not_end_ends_the_recovery(site: Site) -> None:
    site.check_spares()
    site.checks_end = False
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    site.be_late()
    (failed,) = site.recorded("recovery_failed")
    assert failed["reason"] == "the check of a spare did not end within 10 s (aegis.recovery_s)"


def test_without_a_spare_the_others_get_new_numbers_on_fewer_nodes(site: Site) -> None:
    site.memory.take_warm(["n3/w4", "n3/w5"])
    site.fewer = {2: ""}
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    (generation,) = site.generations
    assert generation.members == ("n0/0", "n0/1", "n2/0", "n2/1")
    assert (generation.former, generation.former_size, generation.lost) == ((0, 1, 4, 5), 6, ())
    site.recover(1)
    assert site.state.rank_nodes == ["n0", "n0", "n2", "n2"]
    (event,) = site.recorded("recovered_in_memory")
    assert (event["ranks"], event["world_size"], event["nodes"]) == ([2, 3], 4, "n[0,2]")
    assert site.lose(3, step=9), "rank 3 is what was rank 5"
    assert site.generations[-1].members == ("n0/0", "n0/1", "n2/0", "n2/w3")
    site.recover(2, step=9)


def test_what_fewer_nodes_were_weighed_against_is_recorded(site: Site) -> None:
    site.memory.take_warm(["n3/w4", "n3/w5"])
    site.fewer, site.weighed = {2: ""}, {2: Weighed(2, 1.5, 120.0, 600.0)}
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    (started,) = site.recorded("recovery_started")
    assert (started["step_time_ratio"], started["lost_s"], started["expected_wait_s"]) == (1.5, 120.0, 600.0)


def test_a_process_that_waited_on_a_node_that_died_before_takes_no_place(site: Site) -> None:
    """Slurm may report its end late."""
    site.lose(dead=("n1",), kind=NODE_DEAD)
    site.recover(1)
    assert "n1" in site.memory.waiting
    site.reports({"event": "warm", "member": "n1/w8"}, step=9)
    assert not site.lose(dead=("n2",), kind=NODE_DEAD, step=9)
    assert site.recorded("recovery_failed")[0]["reason"].startswith("no spare node has 2 warm processes")


def test_a_further_loss_while_they_regroup_makes_a_further_generation(site: Site) -> None:
    assert site.lose(3)
    assert site.lose(3, 0)
    assert [generation.lost for generation in site.generations] == [(3,), (0, 3)]
    site.recover(1)
    assert site.memory.active, "the first one is overtaken"
    site.recover(2)
    assert site.replaced == ({0, 3}, set())


def test_a_warm_process_that_is_lost_on_its_way_in_is_replaced(site: Site) -> None:
    site.reports({"event": "warm", "member": "n1/w6"})
    site.lose(3)
    site.end_warm("n1/w2")
    assert site.lose(3)
    assert site.generations[-1].members[3] == "n1/w6"
    assert site.recorded("ranks_ended") == [], "it was no rank yet"


def test_two_ranks_of_a_node_wait_for_the_process_that_is_missing(site: Site) -> None:
    assert site.lose(2, 3)
    assert site.generations == []
    assert site.asked[2:] == [(("n1",), 1)], "one is there"
    assert site.lose(2, 3), "it is not asked for again"
    assert len(site.asked) == 3
    site.reports({"event": "warm", "member": "n1/w9"})
    assert site.lose(2, 3)
    (generation,) = site.generations
    assert (generation.lost, generation.members[2:4]) == ((2, 3), ("n1/w2", "n1/w9"))
    site.recover(1)
    assert site.replaced == ({2, 3}, set())


def test_a_rank_that_is_lost_again_waits_for_the_process_that_is_being_started(site: Site) -> None:
    site.lose(3)
    site.recover(1)
    asked = list(site.asked)
    assert site.lose(3, step=9)
    assert site.asked == asked, "it is on its way"
    site.reports({"event": "warm", "member": "n1/w9"}, step=9)
    assert site.lose(3, step=9)
    assert site.generations[-1].members[3] == "n1/w9"


def test_a_process_that_does_not_start_is_asked_for_again(site: Site) -> None:
    site.lose(2, 3)
    site.end_warm("n1/w9")
    assert site.lose(2, 3)
    assert site.asked[2:] == [(("n1",), 1)] * 2


def test_processes_that_do_not_come_in_time_go_down_a_rung() -> None:
    site = Site()
    site.lose(2, 3)
    site.be_late()
    assert "no process was ready to take a place within" in site.recorded("recovery_failed")[0]["reason"]


def test_what_the_policy_refuses_goes_down_a_rung_with_its_reason(site: Site) -> None:
    assert not site.lose(3, kind=RANK_HANG)
    assert site.generations == []
    (event,) = site.recorded("recovery_failed")
    assert event["reason"].startswith("a rank hangs")
    assert not site.lose(3, 4), "what follows is the next rung's"
    assert len(site.recorded("recovery_failed")) == 1


def test_a_fault_that_ends_the_attempt_with_no_rank_lost_leaves_its_reason_once() -> None:
    site = Site(max_excluded=0)
    site.state.faults = [Fault.of_kind(GPU_RAS_UNCORRECTABLE, 1.0, "kernel_log", "it happened", node="n1")]
    site.tick(times=2)
    (event,) = site.recorded("recovery_failed")
    assert event["reason"] == "uncorrectable memory error of a GPU: every rank must be started again"
    assert isinstance(site.actions[-1], GiveUp), "the reason is recorded before the attempt is ended"
    assert not site.lose(3)


def test_ranks_that_do_not_agree_go_down_a_rung(site: Site) -> None:
    site.lose(3)
    site.reports({"event": "failed", "number": 1, "rank": 0, "reason": "no whole step"})
    assert not site.memory.active
    assert site.recorded("recovery_failed")[0]["reason"] == "no whole step"
    site.recover(1)
    assert site.recorded("recovered_in_memory") == [], "too late"


def test_ranks_that_never_answer_go_down_a_rung() -> None:
    site = Site()
    site.lose(3)
    site.be_late()
    assert "did not regroup within 10 s" in site.recorded("recovery_failed")[0]["reason"]


def test_a_pause_of_the_supervisor_does_not_end_a_recovery(site: Site) -> None:
    assert site.lose(3)
    site.now += 100.0
    site.tell(Paused(100.0, site.now))
    site.tick()
    assert site.memory.active
    site.be_late()
    assert not site.memory.active


def test_a_store_that_is_gone_goes_down_a_rung(site: Site) -> None:
    site.store_alive = False
    assert not site.lose(3)
    assert site.recorded("recovery_failed")[0]["reason"] == "the store server of the ranks is gone"


def test_recoveries_without_progress_end() -> None:
    site = Site(retries=2)
    for number in (1, 2):
        site.reports({"event": "warm", "member": f"n1/w1{number}"})
        assert site.lose(3, step=6)
        site.recover(number)
    assert not site.lose(3, step=6)
    assert site.recorded("recovery_failed")[0]["reason"] == "2 recoveries in memory led to no new step"


def test_processes_that_are_lost_on_their_way_in_one_after_the_other_end() -> None:
    """Each makes a further generation with a deadline of its own; something is wrong with all of them."""
    site = Site(retries=2)
    assert site.lose(3)
    for number in (1, 2):
        member = site.generations[-1].members[3]
        site.reports({"event": "warm", "member": f"n1/w1{number}"})
        site.end_warm(member)
        assert site.lose(3) == (number < 2)
    assert len(site.generations) == 2
    assert site.recorded("recovery_failed")[0]["reason"] == "2 recoveries in memory led to no new step"


def test_a_store_that_ends_while_the_ranks_regroup_is_not_waited_for(site: Site) -> None:
    assert site.lose(3)
    site.tick(broken="it has ended")
    assert site.recorded("recovery_failed")[0]["reason"] == "the store server of the ranks has ended"


def test_ranks_that_cannot_be_recovered_in_memory_get_no_warm_processes() -> None:
    """On AMD GPUs by default, and with versions of NCCL that crash: a fault restarts the ranks at once."""
    site = Site(step=-1)
    site.reports({"event": "off", "reason": "NCCL 2.28.5 crashes when it is aborted"}, step=-1)
    (event,) = site.recorded("recovery_unavailable")
    assert event["reason"] == "NCCL 2.28.5 crashes when it is aborted"
    site.tick(0)
    assert site.asked == []
    assert not site.lose(3)
    assert site.generations == []
    assert site.recorded("recovery_failed") == [], "nothing was tried"
