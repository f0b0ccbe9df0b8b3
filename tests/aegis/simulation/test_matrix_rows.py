"""Faults of the matrix in the simulated world: what Aegis does there is what it did on a real Slurm.

The recorded rows are of real runs (`make faults`); a row of the simulation has the same nodes and spares. Left out
is what the simulated world does not have: storage, NaN, memory, a person's `scontrol requeue`, errors at import.
Of the others two differ: `BY_DEPUTY`, and without recovery in memory row 17 (slurmctld down for 30 s). There a
step that was begun while the controller was away failed on a real Slurm, which took a second restart; in the
simulated world no start fails.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.simulation.schedules import Schedule
from tests.aegis.simulation.simulation import play
from tests.checkout import ROOT
from zslurm.aegis.simulation.run import Run
from zslurm.aegis.simulation.world import Happening, What

RESULTS = ROOT / "benchmarks" / "results"
VICTIM, AT = 3, 20
"""A rank of the second node, and the second in which a fault strikes."""


def schedule(*faults: tuple[What, int, int], spares: int = 0) -> Schedule:
    """Three nodes, spares, and two more in the partition; faults strike at `AT`, each so many seconds later."""
    happenings = tuple(
        Happening(AT + later, what, where, 100 if what == "nic_down" else 30) for what, where, later in faults
    )
    return Schedule(3, spares, 5 + spares, happenings)


KILLED: tuple[What, int, int] = ("rank_killed", VICTIM, 0)
HANGS: tuple[What, int, int] = ("rank_hangs", VICTIM, 0)
DIES: tuple[What, int, int] = ("node_dies", 1, 0)
ECC: tuple[What, int, int] = ("ecc_error", 1, 0)
LINK: tuple[What, int, int] = ("nic_down", 1, 0)
AGENT: tuple[What, int, int] = ("agent_dies", 1, 0)
SUPERVISOR: tuple[What, int, int] = ("supervisor_killed", 0, 0)
AWAY: tuple[What, int, int] = ("slurm_away", 0, 0)
BATCH_HOST: tuple[What, int, int] = ("node_dies", 0, 0)
TIME: tuple[What, int, int] = ("time_is_up", 0, 0)
PREEMPTED: tuple[What, int, int] = ("preempted", 0, 0)
BUG: tuple[What, int, int] = ("user_bug", 15, 0)
GLITCH = Schedule(3, 0, 5, (Happening(AT, "nic_down", 1, 6),))
FULL = Schedule(3, 0, 3, (Happening(AT, "ecc_error", 1), Happening(AT + 30, "time_is_up")), least=2)
"""A partition without other nodes."""


def later(fault: tuple[What, int, int], seconds: int) -> tuple[What, int, int]:
    return fault[0], fault[1], seconds


ROWS: dict[int, Schedule] = {
    1: schedule(KILLED),
    3: schedule(HANGS),
    4: schedule(DIES, spares=1),
    5: schedule(DIES, ("node_dies", 2, 0), spares=2),
    7: schedule(ECC, spares=1),
    8: schedule(LINK, spares=1),
    9: GLITCH,
    15: schedule(TIME),
    18: schedule(BATCH_HOST, spares=1),
    19: schedule(BUG),
    21: Schedule(3, 1, 4, (Happening(AT, "node_dies", 1), Happening(AT + 25, "node_dies", 2)), least=2),
    22: schedule(AGENT),
    23: schedule(SUPERVISOR),
    24: FULL,
}
"""Rows of the matrix, by number."""

PAIRS: dict[str, Schedule] = {
    "17+04-struck-at-once": schedule(AWAY, DIES, spares=1),
    "17+22-struck-at-once": schedule(AWAY, AGENT),
    "17+23-struck-at-once": schedule(AWAY, SUPERVISOR),
    "17+18-struck-at-once": schedule(AWAY, BATCH_HOST, spares=1),
    "01+17-ending-what-is-left": schedule(KILLED, later(AWAY, 2)),
    "01+23-ending-what-is-left": schedule(KILLED, later(SUPERVISOR, 2)),
    "01+23-importing-before-its-first-step": schedule(KILLED, later(SUPERVISOR, 8)),
    "03+23-struck-at-once": schedule(HANGS, SUPERVISOR),
    "04+23-noticed": schedule(DIES, later(SUPERVISOR, 9), spares=1),
    "07+23-without-the-node": schedule(ECC, later(SUPERVISOR, 6), spares=1),
    "08+23-noticed": schedule(LINK, later(SUPERVISOR, 2), spares=1),
    "23+04-struck-at-once": schedule(SUPERVISOR, DIES, spares=1),
    "23+07-struck-at-once": schedule(SUPERVISOR, ECC, spares=1),
    "22+08-struck-at-once": schedule(AGENT, LINK, spares=1),
    "22+03-struck-at-once": schedule(AGENT, HANGS),
    "22+04-struck-at-once": schedule(AGENT, DIES, spares=1),
    "22+23-struck-at-once": schedule(AGENT, SUPERVISOR),
    "01+22-ending-what-is-left": schedule(KILLED, later(AGENT, 2)),
    "04+22-noticed": schedule(DIES, ("agent_dies", 2, 9), spares=1),
    "07+07-struck-at-once": schedule(ECC, ("ecc_error", 2, 0), spares=2),
    "07+04-importing-before-its-first-step": schedule(ECC, ("node_dies", 2, 8), spares=2),
    "04+18-noticed": schedule(DIES, later(BATCH_HOST, 3), spares=2),
    "09+01-noticed": replace(GLITCH, happenings=(*GLITCH.happenings, Happening(AT + 1, "rank_killed", 4))),
    "15+04-asked-to-save-and-stop": schedule(TIME, DIES),
    "15+17-asked-to-save-and-stop": schedule(TIME, later(AWAY, 1)),
    "15+23-asked-to-save-and-stop": schedule(TIME, later(SUPERVISOR, 1)),
    "24+23-decided-upon": replace(  # it reaches its time limit twice
        FULL, happenings=(*FULL.happenings, Happening(51, "supervisor_killed", 1), Happening(70, "time_is_up"))
    ),
    "26+04-saving-in-its-grace-time": schedule(PREEMPTED, DIES),
    "26+17-saving-in-its-grace-time": replace(
        GLITCH, happenings=(Happening(AT, "preempted", 0, 30), Happening(AT + 1, "slurm_away", 0, 20))
    ),
    "26+23-saving-in-its-grace-time": schedule(PREEMPTED, SUPERVISOR),
    "01+26-importing-before-its-first-step": schedule(KILLED, later(PREEMPTED, 8)),
}
"""Pairs of faults, by the names of their rows."""

IN_MEMORY: dict[int, Schedule] = {
    **ROWS,
    17: schedule(AWAY, later(KILLED, 3)),
    21: schedule(DIES, ("node_dies", 2, 15), spares=2),
    41: schedule(KILLED),
    44: schedule(KILLED, ("rank_killed", 4, 2)),
    46: Schedule(3, 0, 5, (Happening(3, "rank_killed", VICTIM),)),
    47: schedule(("rank_killed", 2, 0), KILLED),
    48: schedule(("rank_killed", 1, 0), KILLED),
    49: schedule(("rank_killed", 0, 0)),
    50: schedule(SUPERVISOR, KILLED),
    52: Schedule(4, 2, 6, (Happening(AT, "node_dies", 1), Happening(AT, "node_dies", 3))),
    53: schedule(KILLED, later(SUPERVISOR, 2)),
}
"""Rows with recovery in memory."""

BY_DEPUTY = {"04+18-noticed"}
"""On a real Slurm an agent excludes the dead node before it requeues the job. The simulated world has no deputy:
Slurm requeues the job when it knows that the batch host died."""


def recorded(name: str, key: str) -> dict[Any, dict[str, Any]]:
    """Rows of a file of results."""
    return {row[key]: row for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]}


def recorded_in_memory() -> dict[int, dict[str, Any]]:
    rows = json.loads((RESULTS / "faults.json").read_text(encoding="utf-8"))["in_memory"]
    return {row["number"]: row for row in rows}


def actions(run: Run) -> list[str]:
    """What was decided, in order; `memory` is a recovery in memory."""
    steps = {"decision": lambda row: str(row["action"]), "recovered_in_memory": lambda _: "memory"}
    return [steps[row["event"]](row) for row in run.rows if row["event"] in steps]


@pytest.mark.parametrize("number", ROWS)
def test_a_row_of_the_matrix_is_as_on_a_real_slurm(number: int) -> None:
    real, run = recorded("faults.json", "number")[number], play(ROWS[number]).run
    assert (actions(run), run.outcome) == (real["actions"], real["ended"]), run.why
    assert len(run.excluded_nodes) == real["excluded_nodes"]


@pytest.mark.parametrize("number", IN_MEMORY)
def test_a_row_with_recovery_in_memory_is_as_on_a_real_slurm(number: int) -> None:
    real, run = recorded_in_memory()[number], play(replace(IN_MEMORY[number], in_memory=True)).run
    assert (actions(run), run.outcome) == (real["rungs"], real["ended"]), run.why


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_faults_is_as_on_a_real_slurm(name: str) -> None:
    real, run = recorded("fault_pairs.json", "id")[name], play(PAIRS[name]).run
    assert (actions(run), run.outcome) == (real["actions"], real["ended"]), run.why
    if name not in BY_DEPUTY:
        assert len(run.excluded_nodes) == real["excluded"]
