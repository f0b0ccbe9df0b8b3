"""The keeper of the agents, with commands of agents that a test makes up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from zslurm.aegis.core.messages import AgentGivenUp, CoreEvent
from zslurm.aegis.supervisor.agents.keeper import AgentKeeper
from zslurm.aegis.supervisor.agents.link import AgentLink
from zslurm.aegis.supervisor.agents.liveness import Liveness
from zslurm.aegis.supervisor.agents.step import AgentLauncher
from zslurm.config.aegis import AegisSection
from zslurm.core.pauses import Pauses


class Link(AgentLink):
    """A command whose agents have not reported yet, and that has not taken the last line yet."""

    def __init__(self, now: float) -> None:
        self.nodes, self.started, self._taken = ("node0", "node1"), now, now

    @property
    def over(self) -> bool:
        return False

    def error_output(self) -> str:
        return ""

    def ended(self) -> dict[str, str]:
        return {}

    def stuck_for(self, now: float) -> float:
        return now - self._taken

    def write(self, line: str, wait_s: float = 0.0) -> bool:
        return True


class Over(threading.Event):
    """The end of a supervisor that looks at its agents once, much later than they were started."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock, self.looks = clock, 0

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        self.clock[0] += 1000.0
        return self.looks > 1


@pytest.mark.parametrize(
    ("was_stopped", "given_up"), [(True, []), (False, [AgentGivenUp("node0"), AgentGivenUp("node1")])]
)
def test_only_a_supervisor_that_was_not_stopped_gives_silent_agents_up(
    monkeypatch: pytest.MonkeyPatch, was_stopped: bool, given_up: list[AgentGivenUp]
) -> None:
    clock = [5000.0]
    keeper_time = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("zslurm.aegis.supervisor.agents.keeper.time", keeper_time)
    told, liveness, over = list[CoreEvent](), Liveness(8.0), Over(clock)
    launcher = SimpleNamespace(
        over=over, on_slurm=False, generation="g", helper_of={}, start=lambda *_: Link(clock[0])
    )
    keeper = AgentKeeper(
        AegisSection(),
        liveness,
        cast(AgentLauncher, launcher),
        pauses=Pauses(clock=lambda: clock[0] if was_stopped else 0.0),
        present_attempt=lambda: 1,
        on_line=lambda *_: None,
        record=lambda _: None,
        tell=told.append,
        in_thread=lambda *_: None,
    )
    liveness.begin(["node0", "node1"])
    keeper.run()
    assert told == given_up
