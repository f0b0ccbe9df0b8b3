"""How agents of earlier supervisors are ended; a Slurm that a test makes up has their steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import pytest

from zslurm.aegis.supervisor.agents.step import AgentLauncher
from zslurm.config.spec import RunSpec
from zslurm.core.errors import SlurmUnavailable
from zslurm.run.run_dir import RunDir


class Slurm:
    """The steps of two jobs; it does not answer at first."""

    def __init__(self) -> None:
        self.away = 1
        self.by_job = {"12": {"12.1": "agents-old", "12.2": "agents-new"}, "40": {"40.0": "agents-old-3"}}
        self.killed = list[tuple[str, str]]()

    def steps(self, job_id: str) -> dict[str, str]:
        if self.away:
            self.away -= 1
            raise SlurmUnavailable("scontrol: no answer")
        return self.by_job[job_id]

    def kill_step(self, job_id: str, name: str) -> None:
        self.killed.append((job_id, name))


@pytest.mark.parametrize(("job_id", "ended"), [("12", "agents-old"), ("40", "agents-old-3")])
def test_agents_of_an_earlier_supervisor_are_ended_in_a_helper_job_too(
    monkeypatch: pytest.MonkeyPatch, job_id: str, ended: str
) -> None:
    slurm = Slurm()
    monkeypatch.setattr(AgentLauncher, "client", lambda _: slurm)
    monkeypatch.setattr("zslurm.aegis.supervisor.agents.step._AGAIN_S", 0.01)
    spec, run = cast(RunSpec, None), RunDir(Path("/runs/first"))
    AgentLauncher(spec, run, "12", {}, "new", (), threading.Event()).end_older(job_id)
    assert slurm.killed == [(job_id, ended)]
