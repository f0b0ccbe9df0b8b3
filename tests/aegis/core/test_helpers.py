"""Helper jobs: when one is asked for, and how ranks on its nodes join."""

from __future__ import annotations

import pytest

from tests.aegis.core.sites import PER_NODE, Site
from zslurm.aegis.core.messages import (
    AskForHelper,
    DismissHelper,
    HelperAsked,
    HelperEnded,
    HelperStarted,
    WeighFewer,
)
from zslurm.aegis.core.policy.shrinking import Weighed
from zslurm.aegis.fault_kinds import NODE_DEAD
from zslurm.train.recovery.generation import NEW


@pytest.fixture
def site() -> Site:
    """Two of three nodes are left, and no spare."""
    site = Site(heal="helper")
    site.memory.wanted, site.memory.spares, site.memory.waiting = 3, (), {"n0": ["n0/w1"], "n2": ["n2/w3"]}
    site.fewer = {2: ""}
    assert site.lose(dead=("n1",), kind=NODE_DEAD)
    site.recover(1)
    return site


def asked(site: Site) -> list[int]:
    return [action.nodes for action in site.actions if isinstance(action, AskForHelper)]


def join(site: Site, *names: str) -> None:
    """Let a helper job start, and processes get ready on its node."""
    site.tell(HelperStarted("h1", ("n7",)))
    site.tick(7)
    site.reports(*({"event": "warm", "member": name} for name in names), step=7)


def test_one_helper_job_is_asked_for_and_no_second_one_while_it_waits(site: Site) -> None:
    assert asked(site) == [1]
    site.tell(HelperAsked(waits=True))
    site.tick(8)
    assert asked(site) == [1]


def test_one_that_was_refused_is_asked_for_again_later(site: Site) -> None:
    site.tell(HelperAsked(waits=False, again_at=site.now + 600))
    site.tick(8)
    assert asked(site) == [1]
    site.now += 600
    site.tick(9)
    assert asked(site) == [1, 1]


def test_ranks_join_at_a_boundary_once_every_process_of_a_node_is_ready(site: Site) -> None:
    join(site, "n7/w8")
    assert (("n7",), PER_NODE) in site.asked and site.held == []
    site.reports({"event": "warm", "member": "n7/w9"}, step=7)
    (generation,) = site.held
    assert generation.members == ("n0/0", "n0/1", "n2/0", "n2/1", "n7/w8", "n7/w9")
    assert (generation.former, generation.former_size, generation.left) == ((0, 1, 2, 3, NEW, NEW), 4, ())
    site.reports({"event": "boundary", "number": 2, "step": 8}, step=8)
    site.recover(2, step=8)
    (joined,) = site.recorded("ranks_joined")
    assert (joined["ranks"], joined["world_size"], joined["nodes"]) == ([4, 5], 6, "n[0,2,7]")
    assert site.state.rank_nodes == ["n0", "n0", "n2", "n2", "n7", "n7"]
    site.tick(9)
    assert asked(site) == [1], "nothing is missing any more"


def test_the_ranks_continue_without_a_process_that_is_lost_while_it_joins(site: Site) -> None:
    join(site, "n7/w8", "n7/w9")
    site.reports({"event": "boundary", "number": 2, "step": 8}, step=8)
    site.end_warm("n7/w9")
    site.tick(8)
    generation = site.generations[-1]
    assert (generation.number, generation.members) == (3, ("n0/0", "n0/1", "n2/0", "n2/1"))
    assert (generation.former, generation.former_size) == ((0, 1, 2, 3), 4), "from the copies that they have"
    site.recover(3, step=8)
    assert site.recorded("recovery_failed") == [] and not site.memory.active
    assert len(site.state.rank_nodes) == 4


def test_a_node_that_is_not_fit_does_not_join_and_its_helper_job_is_ended(site: Site) -> None:
    site.check_spares(n7="gpus: 7 of 8")
    join(site, "n7/w8", "n7/w9")
    assert site.held == [] and site.memory.unfit == {"n7"}
    assert site.recorded("nodes_excluded")[-1]["reason"] == "spare n7 is not fit: gpus: 7 of 8"
    assert DismissHelper("h1", "its nodes can have no ranks") in site.actions
    site.tell(HelperEnded("h1", ("n7",), site.now))
    site.tick(9)
    assert asked(site) == [1, 1]


def test_ranks_of_a_helper_job_that_ends_are_left_out_again(site: Site) -> None:
    join(site, "n7/w8", "n7/w9")
    site.reports({"event": "boundary", "number": 2, "step": 8}, step=8)
    site.recover(2, step=8)
    site.tick(9)
    site.tell(HelperEnded("h1", ("n7",), site.now))
    site.tick(9)
    assert site.generations[-1].members == ("n0/0", "n0/1", "n2/0", "n2/1")
    site.recover(3, step=9)
    assert site.state.rank_nodes == ["n0", "n0", "n2", "n2"]


def test_fewer_nodes_than_wanted_join_only_if_the_batch_allows_it(site: Site) -> None:
    site.memory.wanted = 4
    site.fewer = {3: "the batch of 4 cannot be divided among 6 ranks"}
    join(site, "n7/w8", "n7/w9")
    assert site.held == []
    site.fewer, site.memory.fewer = {3: ""}, {}
    site.tick(8)
    assert len(site.held) == 1


def test_fewer_nodes_than_wanted_join_though_a_requeue_would_have_cost_less(site: Site) -> None:
    """The ranks train on even fewer, and the job is not requeued for that."""
    site.memory.wanted = 4
    site.fewer, site.weighed = {3: "the expected wait for a replacement is 10 min"}, {3: weighed(None, 600.0)}
    join(site, "n7/w8", "n7/w9")
    assert len(site.held) == 1


def test_the_next_helper_job_avoids_nodes_that_the_ranks_cannot_use_and_no_others(site: Site) -> None:
    """Not those of one that was cancelled: they are fine."""
    site.tell(HelperStarted("h1", ("n6",)))
    site.tick(7)
    site.tell(HelperEnded("h1", ("n6",), site.now))
    site.check_spares(n7="gpus: 7 of 8")
    join(site, "n7/w8", "n7/w9")
    site.tell(HelperEnded("h1", ("n7",), site.now))
    site.tick(9)
    requests = [action for action in site.actions if isinstance(action, AskForHelper)]
    assert requests[-1] == AskForHelper(1, ("n1", "n7"))


def test_of_two_helper_jobs_at_once_the_one_that_is_not_needed_is_ended(site: Site) -> None:
    """The submission of the second one got no answer, and the first one was found late."""
    join(site, "n7/w8", "n7/w9")
    site.tell(HelperStarted("h2", ("n8",)))
    site.reports({"event": "boundary", "number": 2, "step": 8}, step=8)
    site.recover(2, step=8)
    site.tick(9)
    ended = {action.helper: action.reason for action in site.actions if isinstance(action, DismissHelper)}
    assert ended == {"h2": "no node is missing any more"}


def test_ranks_train_on_while_a_helper_job_never_starts(site: Site) -> None:
    site.tell(HelperAsked(waits=True))
    for step in range(8, 40):
        site.now += 3600
        site.tick(step)
    assert asked(site) == [1] and not site.memory.given_up and not site.memory.active
    assert len(site.state.rank_nodes) == 4


def test_a_helper_job_that_is_killed_while_its_ranks_hold_to_join_costs_only_these(site: Site) -> None:
    join(site, "n7/w8", "n7/w9")
    assert len(site.held) == 1
    site.tell(HelperEnded("h1", ("n7",), site.now))
    site.reports({"event": "boundary", "number": 2, "step": 8}, step=8)
    assert (site.generations[-1].number, site.generations[-1].members) == (3, ("n0/0", "n0/1", "n2/0", "n2/1"))
    site.recover(3, step=8)
    assert site.recorded("recovery_failed") == [] and len(site.state.rank_nodes) == 4


def test_a_process_that_is_lost_before_the_ranks_hold_does_not_join(site: Site) -> None:
    join(site, "n7/w8", "n7/w9")
    site.end_warm("n7/w9")
    site.reports({"event": "boundary", "number": 2, "step": 8}, step=8)
    assert (site.generations[-1].number, site.generations[-1].members) == (3, ("n0/0", "n0/1", "n2/0", "n2/1"))


@pytest.fixture
def weighing() -> Site:
    """Two of three nodes are left, no spare, and a helper job is asked for only if it costs less."""
    site = Site(heal="auto", min_nodes=1)
    site.memory.wanted, site.memory.weighs_helper, site.memory.spares = 3, True, ()
    site.memory.waiting = {"n0": ["n0/w1"], "n2": ["n2/w3"]}
    return site


def weighed(helper_s: float | None, wait_s: float | None = 9000.0) -> Weighed:
    return Weighed(2, 1.5, 1000.0, wait_s, None if helper_s is None else 3 * helper_s, helper_s)


def test_a_helper_job_is_asked_for_if_it_costs_least_with_the_numbers(weighing: Site) -> None:
    weighing.fewer, weighing.weighed = {2: ""}, {2: weighed(100.0)}
    assert weighing.lose(dead=("n1",), kind=NODE_DEAD)
    (started,) = weighing.recorded("recovery_started")
    numbers = ("heal", "lost_s", "helper_wait_s", "helper_lost_s", "expected_wait_s")
    assert [started[name] for name in numbers] == ["helper", 1000.0, 300.0, 100.0, 9000.0]
    weighing.recover(1)
    weighing.tick(7)
    (request,) = [action for action in weighing.actions if isinstance(action, AskForHelper)]
    assert request.weighed == weighed(100.0)


@pytest.mark.parametrize("helper_s", [None, 1000.0], ids=["unknown", "too long"])
def test_the_ranks_train_on_with_fewer_nodes_if_no_helper_job_is_expected_in_time(
    weighing: Site, helper_s: float | None
) -> None:
    weighing.fewer, weighing.weighed = {2: ""}, {2: weighed(helper_s)}
    assert weighing.lose(dead=("n1",), kind=NODE_DEAD)
    weighing.recover(1)
    weighing.tick(7, times=20)
    assert asked(weighing) == [] and weighing.recorded("recovery_started")[0]["heal"] == "shrink"
    weighings = sum(isinstance(action, WeighFewer) for action in weighing.actions)
    weighing.weighed = {2: weighed(10.0)}
    weighing.now += 600
    weighing.tick(8)
    assert asked(weighing) == [1], "it is weighed again, but not all the time"
    assert sum(isinstance(action, WeighFewer) for action in weighing.actions) == weighings + 1
