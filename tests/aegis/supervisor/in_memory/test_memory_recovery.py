"""The supervisor's part in a recovery in memory: generations, deadlines, and when the ranks are restarted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.waiting import wait_for
from zslurm.aegis.fault_kinds import GPU_RAS_UNCORRECTABLE, NODE_DEAD, RANK_HANG, RANK_KILLED, FaultKind
from zslurm.aegis.supervisor.in_memory.memory_recovery import MemoryRecovery
from zslurm.aegis.supervisor.in_memory.rank_places import RankPlaces
from zslurm.aegis.supervisor.in_memory.warm_pool import WarmPool
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.spare_checks import NO_ANSWER, SpareChecks
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.run.run_dir import RunDir
from zslurm.slurm.on_nodes.srun_output import TaskFailure
from zslurm.train.recovery.generation import Generation

PER_NODE = 2


class Store:
    """A store server that reports what a test has it report."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.generations: list[Generation] = []
        self.moves: list[Generation] = []
        self.alive, self.has_ended, self.never_listened = True, False, False

    def poll(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def generation(self, generation: Generation) -> bool:
        self.generations.append(generation)
        return self.alive

    def move(self, generation: Generation) -> bool:
        self.moves.append(generation)
        return self.alive

    def stop(self) -> None: ...


class Pool(WarmPool):
    """A pool whose processes a test declares to be there or gone."""

    def __init__(self) -> None:
        self.waiting, self._left = {}, set()
        self.coming = Counter()
        self._came: set[str] = set()
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.gone: list[tuple[str, TaskFailure]] = []

    @property
    def started(self) -> bool:
        return bool(self.asked)

    def start(self, nodes: Any, per_node: int = 1) -> str:
        if nodes:
            self.asked.append((tuple(nodes), per_node))
            self.coming.update(dict.fromkeys(nodes, per_node))
        return ""

    def ended(self) -> list[tuple[str, TaskFailure]]:
        gone, self.gone = self.gone, []
        for member, _ in gone:
            self._come(member)
        self.take(member for member, _ in gone)
        return gone

    def end(self) -> None: ...


class Site:
    """Three nodes of two ranks and a spare; warm processes wait."""

    def __init__(self, directory: Path, *, step: int = 0, **aegis: Any) -> None:
        """Begin after a step; -1: before the first, and without warm processes."""
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.store, self.pool = Store(), Pool()
        settings = AegisSection.model_validate({"recovery": "memory", "recovery_s": 10} | aegis)
        job = SimpleNamespace(
            spec=SimpleNamespace(ranks_per_node=PER_NODE, aegis=settings),
            record=lambda event: self.events.append((event.NAME, event.fields())),
            stop=SimpleNamespace(asked=False),
        )
        job.exclude = partial(Job.exclude, cast(Job, job))
        self.memory = MemoryRecovery(
            cast(Job, job), RunDir(directory).attempt(1), cast(StoreClient, self.store), self.pool,
            RankPlaces(PER_NODE, ["n0", "n0", "n1", "n1", "n2", "n2"], ("n3",)),
        )  # fmt: skip
        self.memory.tend(step)
        names = ("n0/w1", "n1/w2", "n2/w3", "n3/w4", "n3/w5") if step >= 0 else ()
        self.reports(*({"event": "warm", "member": name} for name in names), step=step)

    def reports(self, *events: dict[str, Any], step: int = 5) -> None:
        self.store.events += events
        self.memory.tend(step)

    def lose(self, *ranks: int, dead: tuple[str, ...] = (), kind: FaultKind = RANK_KILLED, step: int = 5) -> bool:
        return self.memory.consider(ranks, dead, [Fault.of_kind(kind, 1.0, "srun", "it happened")], step)

    def recover(self, number: int, step: int = 6) -> None:
        self.reports({"event": "recovered", "number": number, "step": step, "rolled_back": 1, "seconds": 0.1})

    def check_spares(self, **unfit: str) -> list[set[str]]:
        """Check spares from now on, of which some are `unfit`; returns those of each check that was made."""
        checked: list[set[str]] = []

        def check(nodes: Collection[str]) -> dict[str, str]:
            checked.append(set(nodes))
            return {node: unfit[node] for node in nodes if node in unfit}

        self.memory.spare_checks = SpareChecks(check)
        return checked

    def is_late(self) -> None:
        """Let the limit of the recovery that is under way be over."""
        assert self.memory._regrouping is not None
        self.memory._regrouping.deadline = 0.0

    def recorded(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_warm_processes_are_started_once_the_ranks_train(site: Site) -> None:
    assert site.pool.asked == [(("n0", "n1", "n2"), 1), (("n3",), PER_NODE)]
    assert site.recorded("recovery_ready") == [{"attempt": 1, "nodes": "n[0-2]"}], "once every node has one"


def test_a_lost_rank_makes_a_generation(site: Site) -> None:
    assert not site.memory.consider([], [], [], 5)
    assert site.lose(3)
    assert site.lose(3), "it is not begun again"
    (generation,) = site.store.generations
    assert (generation.number, generation.lost, generation.deadline_s) == (1, (3,), 10.0)
    assert generation.members == ("n0/0", "n0/1", "n1/0", "n1/w2", "n2/0", "n2/1")
    site.recover(1)
    assert not site.memory.active
    (event,) = site.recorded("recovered_in_memory")
    assert (event["ranks"], event["step"], event["rolled_back"], event["nodes"]) == ([3], 6, 1, "n[0-2]")
    assert site.memory.take_recovered() == ({3}, set())
    assert not site.memory.recovered
    assert site.pool.asked[2:] == [(("n1",), 1)], "the next fault may come to the same node"


def test_the_replacement_is_a_rank_that_can_be_lost_too(site: Site) -> None:
    site.lose(3)
    site.recover(1)
    site.reports({"event": "warm", "member": "n1/w9"}, step=9)
    site.pool.gone = [("n1/w2", TaskFailure("n1", (0,), "Killed"))]
    ((rank, failure),) = site.memory.lost_members()
    assert (rank, failure.what) == (3, "Killed")
    assert site.lose(3, step=9)
    assert site.store.generations[-1].members[3] == "n1/w9"


def test_a_dead_node_s_ranks_move_to_the_spare(site: Site) -> None:
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    assert site.store.generations[-1].lost == (2, 3)
    site.recover(1)
    assert site.memory.places.nodes == ["n0", "n0", "n3", "n3", "n2", "n2"]
    assert site.memory.take_recovered() == ({2, 3}, {"n1"})
    assert site.recorded("recovered_in_memory")[0]["nodes"] == "n[0,3],n2"


def test_a_spare_is_checked_again_before_each_use(site: Site) -> None:
    checked = site.check_spares()
    assert site.lose(3), "its node's process takes its place, and no check is needed"
    site.recover(1)
    assert site.lose(dead=("n1",), kind=NODE_DEAD), "the others wait for the check"
    wait_for(lambda: site.lose(dead=("n1",), kind=NODE_DEAD) and len(site.store.generations) == 2, "the check")
    site.recover(2)
    assert site.memory.places.nodes == ["n0", "n0", "n3", "n3", "n2", "n2"]
    site.reports(*({"event": "warm", "member": f"n4/w{number}"} for number in (10, 11)), step=9)
    wait_for(lambda: site.lose(dead=("n2",), kind=NODE_DEAD, step=9) and len(site.store.generations) == 3, "it")
    assert checked == [{"n3"}, {"n4"}]
    assert site.recorded("nodes_excluded") == []


def test_an_unfit_spare_is_excluded_and_another_one_used(site: Site) -> None:
    checked = site.check_spares(n3="nics: ionic_2 is down")
    site.reports(*({"event": "warm", "member": name} for name in ("n4/w6", "n4/w7")))
    wait_for(lambda: site.lose(dead=("n1",), kind=NODE_DEAD) and bool(site.store.generations), "the checks")
    assert site.store.generations[-1].members == ("n0/0", "n0/1", "n4/w6", "n4/w7", "n2/0", "n2/1")
    assert checked == [{"n3"}, {"n4"}]
    (excluded,) = site.recorded("nodes_excluded")
    assert (excluded["nodes"], excluded["reason"]) == ("n3", "spare n3 is not fit: nics: ionic_2 is down")


@pytest.mark.parametrize(("reason", "excluded"), [("gpu-idle: it is not", 1), (NO_ANSWER, 0)])
def test_without_a_fit_spare_the_ranks_are_restarted(site: Site, reason: str, excluded: int) -> None:
    """Of an agent that does not answer in time no more is known: the restart gives it longer."""
    site.check_spares(n3=reason)
    wait_for(lambda: not site.lose(dead=("n1",), kind=NODE_DEAD), "the check")
    (failed,) = site.recorded("recovery_failed")
    assert failed["reason"].startswith("no spare node has 2 warm processes")
    assert len(site.recorded("nodes_excluded")) == excluded
    assert site.store.generations == []


def test_a_check_that_does_not_end_ends_the_recovery(site: Site) -> None:
    over = threading.Event()
    site.memory.spare_checks = SpareChecks(lambda nodes: {node: "" for node in nodes if over.wait()})
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    site.is_late()
    site.memory.tend(5)
    over.set()
    (failed,) = site.recorded("recovery_failed")
    assert failed["reason"] == "the check of a spare did not end within 10 s (aegis.recovery_s)"


def test_without_a_spare_the_others_get_new_numbers_on_fewer_nodes(site: Site) -> None:
    site.pool.take(["n3/w4", "n3/w5"])
    site.memory.why_not_fewer = lambda nodes: "" if nodes == 2 else "too few"
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    (generation,) = site.store.generations
    assert generation.members == ("n0/0", "n0/1", "n2/0", "n2/1")
    assert (generation.former, generation.former_size, generation.lost) == ((0, 1, 4, 5), 6, ())
    site.recover(1)
    assert site.memory.places.nodes == ["n0", "n0", "n2", "n2"]
    assert site.memory.resized
    (event,) = site.recorded("recovered_in_memory")
    assert (event["ranks"], event["world_size"], event["nodes"]) == ([2, 3], 4, "n[0,2]")
    assert site.lose(3, step=9), "rank 3 is what was rank 5"
    assert site.store.generations[-1].members == ("n0/0", "n0/1", "n2/0", "n2/w3")
    site.recover(2, step=9)
    assert not site.memory.resized


def test_a_process_that_waited_on_a_node_that_died_before_takes_no_place(site: Site) -> None:
    """Slurm may report its end late."""
    site.lose(dead=("n1",), kind=NODE_DEAD)
    site.recover(1)
    assert "n1" in site.pool.waiting
    site.reports({"event": "warm", "member": "n1/w8"}, step=9)
    assert not site.lose(dead=("n2",), kind=NODE_DEAD, step=9)
    assert site.recorded("recovery_failed")[0]["reason"].startswith("no spare node has 2 warm processes")


def test_a_further_loss_while_they_regroup_makes_a_further_generation(site: Site) -> None:
    assert site.lose(3)
    assert site.lose(3, 0)
    assert [generation.lost for generation in site.store.generations] == [(3,), (0, 3)]
    site.recover(1)
    assert site.memory.active, "the first one is overtaken"
    site.recover(2)
    assert site.memory.take_recovered() == ({0, 3}, set())


def test_a_warm_process_that_is_lost_on_its_way_in_is_replaced(site: Site) -> None:
    site.reports({"event": "warm", "member": "n1/w6"})
    site.lose(3)
    site.pool.gone = [("n1/w2", TaskFailure("n1", (0,), "Killed"))]
    assert site.memory.lost_members() == []
    assert site.lose(3)
    assert site.store.generations[-1].members[3] == "n1/w6"


def test_two_ranks_of_a_node_wait_for_the_process_that_is_missing(site: Site) -> None:
    assert site.lose(2, 3)
    assert site.store.generations == []
    assert site.pool.asked[2:] == [(("n1",), 1)], "one is there"
    assert site.lose(2, 3), "it is not asked for again"
    assert len(site.pool.asked) == 3
    site.reports({"event": "warm", "member": "n1/w9"})
    assert site.lose(2, 3)
    (generation,) = site.store.generations
    assert (generation.lost, generation.members[2:4]) == ((2, 3), ("n1/w2", "n1/w9"))
    site.recover(1)
    assert site.memory.take_recovered() == ({2, 3}, set())


def test_a_rank_that_is_lost_again_waits_for_the_process_that_is_being_started(site: Site) -> None:
    site.lose(3)
    site.recover(1)
    asked = list(site.pool.asked)
    assert site.lose(3, step=9)
    assert site.pool.asked == asked, "it is on its way"
    site.reports({"event": "warm", "member": "n1/w9"}, step=9)
    assert site.lose(3, step=9)
    assert site.store.generations[-1].members[3] == "n1/w9"


def test_a_process_that_does_not_start_is_asked_for_again(site: Site) -> None:
    site.lose(2, 3)
    site.pool.gone = [("n1/w9", TaskFailure("n1", (0,), "Killed"))]
    assert site.memory.lost_members() == []
    assert site.lose(2, 3)
    assert site.pool.asked[2:] == [(("n1",), 1)] * 2


def test_processes_that_do_not_come_in_time_go_down_a_rung(tmp_path: Path) -> None:
    site = Site(tmp_path, recovery_s=0.001)
    site.lose(2, 3)
    site.is_late()
    site.memory.tend(5)
    assert "no process was ready to take a place within" in site.recorded("recovery_failed")[0]["reason"]


def test_what_the_policy_refuses_goes_down_a_rung_with_its_reason(site: Site) -> None:
    assert not site.lose(3, kind=RANK_HANG)
    assert site.store.generations == []
    (event,) = site.recorded("recovery_failed")
    assert event["reason"].startswith("a rank hangs")
    assert not site.lose(3, 4), "what follows is the next rung's"
    assert len(site.recorded("recovery_failed")) == 1


def test_a_fault_that_ends_the_attempt_with_no_rank_lost_leaves_its_reason_once(site: Site) -> None:
    broken = Fault.of_kind(GPU_RAS_UNCORRECTABLE, 1.0, "kernel_log", "it happened")
    site.memory.leave(broken)
    site.memory.leave(broken)
    (event,) = site.recorded("recovery_failed")
    assert event["reason"] == "uncorrectable memory error of a GPU: every rank must be started again"
    assert not site.lose(3)


def test_ranks_that_do_not_agree_go_down_a_rung(site: Site) -> None:
    site.lose(3)
    site.reports({"event": "failed", "number": 1, "rank": 0, "reason": "no whole step"})
    assert not site.memory.active
    assert site.recorded("recovery_failed")[0]["reason"] == "no whole step"
    site.recover(1)
    assert site.recorded("recovered_in_memory") == [], "too late"


def test_ranks_that_never_answer_go_down_a_rung(tmp_path: Path) -> None:
    site = Site(tmp_path, recovery_s=0.001)
    site.lose(3)
    site.is_late()
    site.memory.tend(5)
    assert "did not regroup within 0.001 s" in site.recorded("recovery_failed")[0]["reason"]


def test_a_store_that_is_gone_goes_down_a_rung(site: Site) -> None:
    site.store.alive = False
    assert not site.lose(3)
    assert site.recorded("recovery_failed")[0]["reason"] == "the store server of the ranks is gone"


def test_recoveries_without_progress_end(tmp_path: Path) -> None:
    site = Site(tmp_path, retries=2)
    for number in (1, 2):
        site.reports({"event": "warm", "member": f"n1/w1{number}"})
        assert site.lose(3, step=6)
        site.recover(number)
    assert not site.lose(3, step=6)
    assert site.recorded("recovery_failed")[0]["reason"] == "2 recoveries in memory led to no new step"


def test_processes_that_are_lost_on_their_way_in_one_after_the_other_end(tmp_path: Path) -> None:
    """Each makes a further generation with a deadline of its own; something is wrong with all of them."""
    site = Site(tmp_path, retries=2)
    assert site.lose(3)
    for number in (1, 2):
        member = site.store.generations[-1].members[3]
        site.reports({"event": "warm", "member": f"n1/w1{number}"})
        site.pool.gone = [(member, TaskFailure("n1", (0,), "Killed"))]
        assert site.memory.lost_members() == []
        assert site.lose(3) == (number < 2)
    assert len(site.store.generations) == 2
    assert site.recorded("recovery_failed")[0]["reason"] == "2 recoveries in memory led to no new step"


def test_a_store_that_ends_while_the_ranks_regroup_is_not_waited_for(site: Site) -> None:
    assert site.lose(3)
    site.store.has_ended = True
    site.memory.tend(5)
    assert site.recorded("recovery_failed")[0]["reason"] == "the store server of the ranks has ended"


def test_ranks_that_cannot_be_recovered_in_memory_get_no_warm_processes(tmp_path: Path) -> None:
    """On AMD GPUs by default, and with versions of NCCL that crash: a fault restarts the ranks at once."""
    site = Site(tmp_path, step=-1)
    site.reports({"event": "off", "reason": "NCCL 2.28.5 crashes when it is aborted"}, step=-1)
    (event,) = site.recorded("recovery_unavailable")
    assert event["reason"] == "NCCL 2.28.5 crashes when it is aborted"
    site.memory.tend(0)
    assert site.pool.asked == []
    assert not site.lose(3)
    assert site.store.generations == []
    assert site.recorded("recovery_failed") == [], "nothing was tried"
