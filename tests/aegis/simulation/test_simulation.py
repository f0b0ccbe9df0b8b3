"""Random schedules keep every invariant, and those that did not once are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest

from tests.aegis.simulation import simulation
from tests.aegis.simulation.invariants import INVARIANTS, Violation
from tests.aegis.simulation.schedules import Schedule, drawn, shortest
from tests.aegis.simulation.simulation import play, play_all, violates
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.world import Happening, What
from zslurm.config.aegis import Heal

SEEDS, IN_SOAK = 10_000, 1_000_000
"""Schedules that `make test` plays, on 1 to 8 nodes, and `make soak`, on 4 to 64."""

FOUND = {
    "a node dies while the supervisor is dead, and another node's agent is silent for the next one": Schedule(
        4,
        0,
        4,
        (
            Happening(20, "supervisor_killed", 47),
            Happening(40, "node_dies", 2),
            Happening(42, "agent_stalls", 1, 10),
        ),
        in_memory=True,
        helped=True,
    ),
    "a helper job ends while Slurm is away, and all ranks are started again": Schedule(
        3,
        0,
        6,
        (
            Happening(25, "node_dies", 1),
            Happening(47, "slurm_away", 10, 40),
            Happening(54, "nic_down", 0, 1),
            Happening(58, "job_suspended", 37, 3),
            Happening(60, "helper_ends", 2),
        ),
        in_memory=True,
        least=1,
        helped=True,
    ),
    "the program fails while an agent is silent": Schedule(
        5, 1, 8, (Happening(80, "agent_stalls", 1, 10), Happening(81, "user_bug", 26))
    ),
    "a link is down while another node's agent is silent": Schedule(
        3, 1, 5, (Happening(32, "nic_down", 0, 20), Happening(37, "agent_stalls", 1, 10))
    ),
    "a node dies while another node's agent is silent": Schedule(
        4, 2, 7, (Happening(49, "agent_stalls", 1, 10), Happening(49, "node_dies", 3))
    ),
    "an attempt is ended for a link while another node's agent is silent": Schedule(
        5, 0, 5, (Happening(83, "nic_down", 8, 20), Happening(83, "agent_stalls", 9, 40))
    ),
    "a link has recovered and a node dies while another node's agent is silent": Schedule(
        9,
        1,
        10,
        (Happening(18, "nic_down", 7, 10), Happening(23, "agent_stalls", 12, 10), Happening(27, "node_dies", 6)),
    ),
    "a link stays down, no other node is there, and another node's agent is silent": Schedule(
        3, 0, 3, (Happening(51, "nic_down", 3, 100), Happening(72, "agent_stalls", 2, 40))
    ),
    "a link of the supervisor's own node is down while its agent and another are silent": Schedule(
        6,
        1,
        7,
        (
            Happening(51, "agent_stalls", 0, 20),
            Happening(51, "nic_down", 7, 20),
            Happening(56, "agent_stalls", 1, 10),
        ),
    ),
    "a silent agent reports in the second in which its ranks finish": Schedule(
        5, 0, 7, (Happening(5, "agent_stalls", 12, 100), Happening(12, "node_dies", 3))
    ),
    "a rank hangs and is replaced in memory while another one waited for it": Schedule(
        1, 1, 2, (Happening(40, "rank_hangs", 1),), in_memory=True
    ),
    "a dead node is replaced in memory while another node's agent is silent": Schedule(
        3, 2, 7, (Happening(59, "agent_stalls", 2, 20), Happening(64, "node_dies", 8)), in_memory=True
    ),
    "a link is down for a second before its node's agent is silent": Schedule(
        6, 1, 8, (Happening(54, "nic_down", 8, 1), Happening(55, "agent_stalls", 0, 40))
    ),
    "the supervisor's node is cut off from all others": Schedule(4, 2, 6, (Happening(24, "cut_off", 6, 10),)),
    "the supervisor's node is cut off from all others until a rank passes its limit": Schedule(
        3, 0, 4, (Happening(11, "cut_off", 4, 40),), in_memory=True
    ),
    "a link is up again while the supervisor's node is cut off": Schedule(
        4, 0, 5, (Happening(31, "nic_down", 2, 6), Happening(35, "cut_off", 5, 20)), least=1
    ),
    "the program fails after the supervisor's node was cut off, while another node's agent is silent": Schedule(
        3,
        1,
        5,
        (Happening(67, "agent_stalls", 6, 10), Happening(68, "cut_off", 5, 6), Happening(68, "user_bug", 10)),
    ),
    "Slurm calls a node down before the supervisor's node is cut off": Schedule(
        3, 0, 3, (Happening(56, "called_down", 1, 3), Happening(58, "cut_off", 0, 10)), in_memory=True, least=1
    ),
    "the job is suspended as soon as its ranks have regrouped": Schedule(
        3, 1, 6, (Happening(30, "rank_hangs", 3), Happening(64, "job_suspended", 1, 40)), in_memory=True
    ),
    "a node is cut off while the ranks are to leave another one": Schedule(
        5,
        1,
        6,
        (Happening(63, "move_asked", 2), Happening(63, "cut_off", 3, 40), Happening(85, "agent_stalls", 1, 10)),
        in_memory=True,
        least=4,
    ),
    "the supervisor's node is cut off from one other and the spares": Schedule(
        2, 2, 6, (Happening(33, "cut_off", 6, 10),)
    ),
    "the supervisor's node is cut off until Slurm requeues the job, and another node dies later": Schedule(
        2, 2, 5, (Happening(3, "cut_off", 0, 40), Happening(69, "node_dies", 4)), in_memory=True, least=1
    ),
    "the supervisor's node is cut off while Slurm calls it down, and the time is up at the next start": Schedule(
        2,
        1,
        5,
        (Happening(15, "called_down", 0, 20), Happening(33, "cut_off", 0, 10), Happening(42, "time_is_up")),
        in_memory=True,
        least=1,
    ),
    "a person has the ranks leave a node when as many are excluded as may be": Schedule(
        8,
        2,
        12,
        (
            *(Happening(12, "ecc_error", 17, 1), Happening(15, "nic_down", 8, 20)),
            *(Happening(15, "ecc_error", 21, 1), Happening(73, "move_asked", 15, 1)),
        ),
        in_memory=True,
    ),
    "Slurm preempts the job while it does not answer for longer than a minute": Schedule(
        6, 0, 6, (Happening(5, "answers_unknown", 4, 100), Happening(12, "preempted", 5, 100))
    ),
    "a supervisor decides a requeue before ranks have started, and dies": Schedule(
        3, 0, 3, (Happening(1, "supervisor_killed", 9), Happening(2, "time_is_up"))
    ),
    "a node dies in the second in which its ranks finish": Schedule(
        5, 1, 6, (Happening(86, "node_dies", 4),), in_memory=True, least=4
    ),
    "a rank is killed, no port can be tried, and the last reports of another node are late": Schedule(
        4,
        0,
        4,
        (
            Happening(7, "rank_killed", 12),
            Happening(7, "answers_unknown", 0, 6),
            Happening(9, "reports_late", 3, 3),
        ),
    ),
    "a node is left for its GPU, no port can be tried, and the last reports of another node are late": Schedule(
        3,
        0,
        4,
        (
            *(Happening(45, "rank_killed", 43), Happening(45, "ecc_error", 20)),
            *(Happening(45, "answers_unknown", 35, 3), Happening(45, "reports_late", 18, 3)),
        ),
        in_memory=True,
    ),
    "an agent is silent long after the ranks have ended, while Slurm is asked who stopped them": Schedule(
        3,
        0,
        3,
        (
            *(Happening(7, "preempted", 20, 1), Happening(8, "slurm_away", 50, 100)),
            *(Happening(8, "supervisor_killed", 59), Happening(91, "agent_stalls", 4, 10)),
        ),
        least=2,
    ),
    "a link is up again in the second in which the agent of another node counts as silent": Schedule(
        3,
        0,
        3,
        (Happening(44, "user_bug", 18), Happening(69, "agent_stalls", 10, 10), Happening(69, "nic_down", 3, 6)),
        in_memory=True,
    ),
    "a link is up again while the next supervisor starts": Schedule(
        3,
        0,
        3,
        (Happening(3, "supervisor_killed", 2, 1), Happening(3, "nic_down", 14, 10)),
        in_memory=True,
        helped=True,
    ),
    "a node dies when as many are excluded as may be": Schedule(
        10,
        1,
        13,
        (
            *(Happening(11, "ecc_error", 52), Happening(11, "node_dies", 42)),
            *(Happening(13, "drained", 54, 20), Happening(59, "node_dies", 30)),
        ),
        in_memory=True,
        least=9,
    ),
    "a spare is found unfit, and a link is down, when as many are excluded as may be": Schedule(
        4,
        1,
        8,
        (
            *(Happening(32, "node_dies", 4, 1), Happening(42, "time_is_up", 11, 1)),
            *(Happening(42, "ecc_error", 5, 1), Happening(42, "ecc_error", 11, 1)),
            *(Happening(42, "exclusion_refused", 1, 3), Happening(75, "nic_down", 9, 20)),
        ),
        in_memory=True,
        helped=True,
    ),
    "an old answer of Slurm calls a node down whose agent is silent": Schedule(
        3,
        0,
        3,
        (
            Happening(43, "called_down", 19, 1),
            Happening(43, "answers_late", 6, 40),
            Happening(67, "agent_stalls", 19, 10),
        ),
    ),
}
"""Schedules that violated an invariant, each as short as it could be made."""


@pytest.mark.parametrize("schedule", [pytest.param(each, id=name) for name, each in FOUND.items()])
def test_what_was_found_once_is_not_found_again(schedule: Schedule) -> None:
    assert play(schedule).violation is None


def test_ranks_that_regroup_do_so_though_the_run_is_asked_to_stop() -> None:
    happenings = (Happening(33, "node_dies", 11), Happening(38, "time_is_up"))
    played = play(Schedule(6, 1, 9, happenings, in_memory=True))
    kinds = [row["event"] for row in played.run.rows]
    assert (played.violation, played.run.outcome) == (None, "completed")
    assert "recovered_in_memory" in kinds and "step_killed" not in kinds


@pytest.mark.parametrize(
    ("spares", "least", "harm", "actions"),
    [
        (1, None, (Happening(20, "ecc_error", 1),), ["ranks_expelled", "recovered_in_memory"]),
        (1, None, (Happening(20, "nic_down", 1, 100),), ["ranks_expelled", "recovered_in_memory"]),
        (0, 2, (Happening(20, "ecc_error", 1),), ["ranks_expelled", "recovered_in_memory"]),
        (0, None, (Happening(20, "ecc_error", 1),), ["decision"]),
        (2, None, (Happening(20, "ecc_error", 1), Happening(20, "ecc_error", 2)), ["decision"]),
        (
            1,
            None,
            (Happening(20, "ecc_error", 1), Happening(21, "rank_killed", 7)),
            ["ranks_expelled", "recovered_in_memory"],
        ),
    ],
    ids=["spare", "link", "fewer nodes", "no other node", "a node and its buddies' node", "and another rank"],
)
def test_a_fault_of_a_node_that_is_alive_costs_only_its_ranks(
    spares: int, least: int | None, harm: tuple[Happening, ...], actions: list[str]
) -> None:
    run = play(Schedule(4, spares, 6, harm, in_memory=True, least=least)).run
    kinds = ("ranks_expelled", "recovered_in_memory", "decision")
    assert [row["event"] for row in run.rows if row["event"] in kinds][: len(actions)] == actions
    assert all(row["rolled_back"] <= 1 for row in run.rows if row["event"] == "recovered_in_memory")
    assert run.outcome == "completed"


@pytest.mark.parametrize(
    ("partition", "harm", "joined"),
    [
        (5, (Happening(20, "node_dies", 1),), 1),
        (5, (Happening(20, "node_dies", 1), Happening(21, "helper_refused", 0, 40)), 0),
        (5, (Happening(20, "node_dies", 1), Happening(56, "helper_ends")), 2),
        (5, (Happening(20, "node_dies", 1), Happening(40, "helper_ends")), 1),
        (5, (Happening(20, "node_dies", 1), Happening(50, "node_dies", 3)), 2),
        (5, (Happening(20, "node_dies", 1), Happening(43, "warm_killed", 3)), 1),
        (5, (Happening(20, "node_dies", 1), Happening(30, "supervisor_killed", 0)), 1),
        (5, (Happening(20, "node_dies", 1), Happening(47, "supervisor_killed", 1)), 1),
        (3, (Happening(20, "node_dies", 1),), 0),
    ],
    ids=[
        *("a node dies", "the helper is refused", "it is cancelled later", "it is cancelled before it joins"),
        *("its node dies", "a process of it dies while it joins", "the supervisor is killed while it waits"),
        *("the supervisor is killed when it has joined", "it never starts"),
    ],
)
def test_a_helper_job_brings_a_node_and_the_run_is_never_requeued(
    partition: int, harm: tuple[Happening, ...], joined: int
) -> None:
    played = play(Schedule(3, 0, partition, harm, in_memory=True, helped=True))
    kinds = [row["event"] for row in played.run.rows]
    assert (played.violation, played.run.outcome, played.run.starts) == (None, "completed", 1)
    assert kinds.count("ranks_joined") == joined and "decision" not in kinds
    assert all(row["rolled_back"] <= 1 for row in played.run.rows if "rolled_back" in row)


@pytest.mark.parametrize(
    ("heal", "least", "helper_wait_s", "requeue_wait_s", "healed"),
    [
        ("spare", 2, None, None, "the run ends"),
        ("shrink", None, None, None, "fewer nodes"),
        ("helper", None, None, None, "a helper job"),
        ("requeue", 2, None, None, "a requeue"),
        ("auto", None, 5.0, 3600.0, "a requeue"),
        ("auto", 2, None, 3600.0, "fewer nodes"),
        ("auto", 2, 5.0, 3600.0, "a helper job"),
        ("auto", 2, 900.0, 3600.0, "fewer nodes"),
        ("auto", 2, 5.0, 1.0, "a requeue"),
        ("auto", 2, 900.0, 1.0, "a requeue"),
    ],
)
def test_what_replaces_a_node_that_dies_without_a_spare(
    heal: Heal, least: int | None, helper_wait_s: float | None, requeue_wait_s: float | None, healed: str
) -> None:
    harm = (Happening(20, "node_dies", 1),)
    schedule = Schedule(
        3, 0, 5, harm, in_memory=True, least=least, heal=heal, waits=(helper_wait_s, requeue_wait_s)
    )
    played = play(schedule)
    kinds, run = [row["event"] for row in played.run.rows], played.run
    done = {
        "a helper job": "ranks_joined" in kinds,
        "a requeue": run.starts == 2,
        "fewer nodes": run.starts == 1 and "recovered_in_memory" in kinds and "ranks_joined" not in kinds,
        "the run ends": run.outcome == "stopped",
    }
    assert played.violation is None
    assert [how for how, is_done in done.items() if is_done] == [healed]
    assert run.outcome == ("stopped" if heal == "spare" else "completed")


@pytest.mark.parametrize("heal", get_args(Heal))
def test_random_schedules_keep_every_invariant_whatever_replaces_nodes(heal: Heal) -> None:
    for seed in range(40):
        schedule = replace(drawn(seed), in_memory=True, heal=heal, least=1, waits=(float(seed), 30.0 * (seed % 3)))
        assert play(schedule).violation is None, f"seed {seed}"


@pytest.mark.parametrize(("at", "committed"), [(27, -1), (32, 10)])
def test_a_fault_during_a_save_loses_it(at: int, committed: int) -> None:
    rows = play(Schedule(3, 0, 5, (Happening(at, "rank_killed", 3),))).run.rows
    assert [row["committed_step"] for row in rows if row["event"] == "decision"] == [committed]


def test_random_schedules_keep_every_invariant() -> None:
    violations = {seed: name for seed, _, name in play_all(range(SEEDS), 1) if name is not None}
    assert violations == {}, "python -m tests.aegis.simulation --seed N shows it"


@pytest.mark.soak
@pytest.mark.timeout(43_200)
def test_a_million_random_schedules_keep_every_invariant() -> None:
    played = play_all(range(IN_SOAK), os.cpu_count() or 1, fewest_nodes=4, most_nodes=64)
    violations = {seed: name for seed, _, name in played if name is not None}
    assert violations == {}, "python -m tests.aegis.simulation --nodes 64 --fewest-nodes 4 --seed N shows it"


def test_a_seed_is_played_the_same_way_again() -> None:
    schedule = drawn(11)
    assert play(schedule, tell=True).story == play(schedule, tell=True).story


@pytest.mark.parametrize(
    ("happening", "excluded", "outcome"),
    [
        (Happening(20, "rank_killed", 3), [], "completed"),
        (Happening(20, "rank_hangs", 3), [], "completed"),
        (Happening(20, "node_dies", 2), ["node2"], "completed"),
        (Happening(20, "ecc_error", 1), ["node1"], "completed"),
        (Happening(20, "numbers_wrong", 1), ["node1"], "completed"),
        (Happening(20, "nic_down", 1, 5), [], "completed"),
        (Happening(20, "agent_stalls", 1, 60), [], "completed"),
        (Happening(20, "agent_dies", 1), [], "completed"),
        (Happening(20, "slurm_away", 0, 60), [], "completed"),
        (Happening(20, "supervisor_killed"), [], "completed"),
        (Happening(20, "job_suspended", 0, 100), [], "completed"),
        (Happening(20, "clock_jumps", 1, 100), [], "completed"),
        (Happening(20, "user_bug", 12), [], "stopped"),
        (Happening(20, "time_is_up"), [], "completed"),
    ],
    ids=lambda value: value.what if isinstance(value, Happening) else None,
)
def test_each_thing_that_happens_ends_as_on_a_real_slurm(
    happening: Happening, excluded: list[str], outcome: str
) -> None:
    """As the rows of tests/faults/matrix.py: who is excluded, and whether the run comes to its end."""
    played = play(Schedule(3, 1, 5, (happening,)))
    assert played.violation is None
    assert sorted(played.run.excluded_nodes) == excluded
    assert played.run.outcome == outcome, played.run.why


_KILLED_BY: tuple[What, ...] = (
    *("rank_killed", "rank_hangs", "node_dies", "ecc_error"),
    *("numbers_wrong", "user_bug", "move_asked", "time_is_up"),
)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("what", _KILLED_BY)
def test_a_supervisor_that_is_killed_before_or_after_any_action_changes_nothing(
    what: What, in_memory: bool
) -> None:
    """What the run comes to, and which nodes it excludes, is as if the supervisor had lived."""
    harm = Happening(20, what, 2, 0)
    schedule = Schedule(3, 1, 5, (harm,), in_memory)
    alone = play(schedule).run
    moment = 0
    while True:
        killed = (harm, Happening(20, "supervisor_killed", moment))
        played = play(replace(schedule, happenings=killed))
        assert played.violation is None, moment
        assert played.run.outcome == alone.outcome, moment
        assert played.run.excluded_nodes == alone.excluded_nodes, moment
        if played.run.moments <= moment:
            break
        moment += 1


def test_a_violation_is_shown_with_the_shortest_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a schedule of four happenings one is enough."""

    def no_node_dies(run: Run, _: Schedule) -> Iterator[Violation | None]:
        while True:
            dead = [node.name for node in run.world.nodes if node.died is not None]
            yield Violation("no node dies", run.world.now, dead[0]) if dead else None

    monkeypatch.setattr(simulation, "INVARIANTS", (*INVARIANTS, no_node_dies))
    happenings = (
        Happening(10, "agent_dies", 0), Happening(20, "node_dies", 1, 40), Happening(21, "rank_killed", 0),
        Happening(30, "slurm_away", 0, 10),
    )  # fmt: skip
    schedule = Schedule(3, 1, 5, happenings)
    assert violates(schedule, "no node dies")
    short = shortest(schedule, lambda other: violates(other, "no node dies"))
    assert short.happenings == (Happening(20, "node_dies", 1, 1),)
