"""Spares are checked when the job starts, by the check that decides on them when they are used."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.submit.specs import run_spec
from tests.waiting import wait_for
from zslurm.aegis.protocol import Answer, Stamp
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.agents.liveness import Liveness
from zslurm.aegis.supervisor.job import Job
from zslurm.aegis.supervisor.recovery import Recovery
from zslurm.aegis.supervisor.spare_checks import unfit_spares
from zslurm.run.run_dir import RunDir


class _Agents:
    """node4's agent finds something; that of node5 never answers."""

    over = False

    def __init__(self) -> None:
        self.looks = 3
        self.liveness = self

    def any_responding(self) -> bool:
        return True

    def never_heard(self, nodes: Sequence[str]) -> list[str]:
        self.looks -= 1
        return [] if self.looks <= 0 else ["node4"]

    def ask(self, do: str, nodes: Sequence[str], *, timeout_s: float) -> dict[str, Answer]:
        assert (do, self.looks) == ("check", 0), "agents that only start are waited for"
        stamp = Stamp("node4", 1, 1.0, 1.0)
        answers = {"node3": Answer(stamp, 1, True, "", {}), "node4": Answer(stamp, 1, False, "nics: ionic_2", {})}
        return {node: answers[node] for node in nodes if node in answers}


def test_an_unusable_spare_is_reported_when_the_job_starts(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    spec = run_spec(tmp_path, slurm={"nodes": 2, "spares": 3}, cluster={"name": "lab", "launcher": "slurm"})
    run = RunDir(tmp_path / "runs" / "tiny")
    job = Job(run, spec, {}, "7", 0, lambda event: told.append(event.row))
    recovery = Recovery(job, cast(Any, None), cast(Agents, _Agents()), cast(Any, None))
    recovery.check_spares(["node3", "node4", "node5"])
    wait_for(lambda: len(told) == 3, "three spares to be checked")
    assert [(row["node"], row["ok"], row["reason"]) for row in told] == [
        ("node3", True, None),
        ("node4", False, "nics: ionic_2"),
        ("node5", False, "its agent does not answer"),
    ]
    assert {row["event"] for row in told} == {"spare_checked"}, "it may be well when it is needed"


def test_a_spare_that_does_not_answer_is_not_unfit_if_this_node_is_cut_off(tmp_path: Path) -> None:
    spec = run_spec(tmp_path, slurm={"nodes": 2, "spares": 2}, cluster={"name": "lab", "launcher": "slurm"})
    job = Job(RunDir(tmp_path), spec, {"SLURMD_NODENAME": "node0"}, "7", 0, lambda _: None)
    liveness = Liveness(1000.0)
    liveness.begin(("node0", "node1", "node5"))
    agents = SimpleNamespace(liveness=liveness, ask=lambda *_, **__: {}, over=False)
    for heard, unfit in (("node0", {}), ("node1", {"node5": "its agent does not answer"})):
        liveness.nodes[heard].take_report(time.monotonic())
        assert unfit_spares(job, cast(Agents, agents), ["node5"]) == unfit


@pytest.mark.parametrize(
    ("held", "spares", "flags", "skipped"),
    [
        ({"node1": "1 process holds GPU memory: 4242"}, 1, {"exclusive": True}, ["node1"]),
        ({"node1": "1 process holds GPU memory: 4242"}, 0, {"exclusive": True}, []),
        ({"node1": "1 process holds GPU memory: 4242"}, 1, {}, []),  # another job may use the node
        ({}, 1, {"exclusive": True}, []),
        (dict.fromkeys(("node0", "node1"), "1 process holds GPU memory: 12 exporter"), 2, {"exclusive": True}, []),
    ],
)
def test_the_first_ranks_start_on_no_node_whose_gpu_memory_is_held(
    tmp_path: Path, held: dict[str, str], spares: int, flags: dict[str, bool], skipped: list[str]
) -> None:
    """Memory that is held on half of the nodes is held by what the site runs on each."""
    cluster = {"name": "lab", "launcher": "slurm", "gpus_per_node": 8}
    spec = run_spec(tmp_path, slurm={"nodes": 2, "spares": spares, "flags": flags}, cluster=cluster)
    run = RunDir(tmp_path / "runs" / "tiny")
    run.create(group_readable=False)
    told: list[dict[str, Any]] = []
    job = Job(run, spec, {}, "7", 0, lambda event: told.append(event.row))
    names = [f"node{number}" for number in range(2 + spares)]
    stamp = Stamp("node0", 1, 1.0, 1.0)
    answers = {name: Answer(stamp, 1, name not in held, held.get(name, ""), {}) for name in names}
    liveness = SimpleNamespace(never_heard=lambda _: [])
    agents = SimpleNamespace(over=False, liveness=liveness, ask=lambda *_, **__: answers)
    every = SimpleNamespace(every=tuple(names), needed=2)
    recovery = Recovery(job, cast(Any, every), cast(Agents, agents), cast(Any, None))
    assert recovery.skip_unfit(names) is bool(skipped)
    assert [row["nodes"] for row in told] == skipped
    assert all(row["expires"] < time.time() + 3601 for row in told), "the process will end some day"


@pytest.mark.parametrize(
    ("expired", "fit", "excluded"), [(True, True, []), (True, False, ["node1"]), (False, False, [])]
)
def test_a_node_whose_exclusion_has_expired_is_tested_before_it_is_used(
    tmp_path: Path, expired: bool, fit: bool, excluded: list[str]
) -> None:
    spec = run_spec(tmp_path, slurm={"nodes": 2}, cluster={"name": "lab", "launcher": "slurm"})
    run = RunDir(tmp_path / "runs" / "tiny")
    run.create(group_readable=False)
    expires = time.time() + (-60 if expired else 60)
    row = {"event": "nodes_excluded", "nodes": "node1", "reason": "it died", "expires": expires, "time": 1.0}
    run.events.write_text(json.dumps(row) + "\n")
    told: list[dict[str, Any]] = []
    job = Job(run, spec, {}, "7", 0, lambda event: told.append(event.row))
    stamp = Stamp("node1", 1, 1.0, 1.0)
    answer = {"node1": Answer(stamp, 1, fit, "" if fit else "gpu-count: 7 of 8 GPUs are there", {})}
    liveness = SimpleNamespace(never_heard=lambda _: [], any_responding=lambda: True, hears_only=lambda _: False)
    agents = SimpleNamespace(over=False, liveness=liveness, ask=lambda *_, **__: answer)
    every = SimpleNamespace(every=("node0", "node1"), needed=2)
    recovery = Recovery(job, cast(Any, every), cast(Agents, agents), cast(Any, None))
    assert recovery.skip_unfit(["node0", "node1"]) is bool(excluded)
    assert [row["nodes"] for row in told if row["event"] == "nodes_excluded"] == excluded
    assert [row["ok"] for row in told if row["event"] == "spare_checked"] == ([fit] if expired else [])
