"""The table of nodes: who is silent, in trouble or asked about, and who is waited for after an attempt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aegis.attempts import NOW, fault, settings
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.core.messages import (
    AgentGivenUp,
    AskAbout,
    Cleared,
    CoreAction,
    CoreEvent,
    FaultsFound,
    NodeAskedAbout,
    NodeUnreachable,
    ReportReceived,
    SlurmAnswered,
    Tick,
)
from zslurm.aegis.core.step import step
from zslurm.aegis.protocol import Answer, ProgressReport, Stamp

NODES = tuple(f"node{number}" for number in range(6))
BEGAN = 1000.0


class Site:
    """An attempt on six nodes, whose agents report until they fall silent."""

    def __init__(self, **aegis: Any) -> None:
        chosen = settings(**{"ask_after_s": 1.5, **aegis})
        detector = Detector(chosen)
        detector.begin(1, NODES, BEGAN)
        self.state = AttemptState(chosen, 1, NODES, list(NODES), detector)
        self.now = BEGAN
        self.asked: list[AskAbout] = []
        self.hear(*NODES)

    def tell(self, event: CoreEvent) -> list[CoreAction]:
        _, actions = step(self.state, event)
        self.asked += [action for action in actions if isinstance(action, AskAbout)]
        return actions

    def hear(self, *nodes: str) -> None:
        for name in nodes:
            self.tell(ReportReceived(ProgressReport(Stamp(name, 1, NOW, self.now), 1), self.now, NOW))

    def run(self, seconds: float, *silent: str) -> None:
        """Time passes, in quarters of a second; some nodes are silent."""
        for _ in range(round(4 * seconds)):
            self.now += 0.25
            self.hear(*(name for name in NODES if name not in silent))
            self.tell(Tick(self.now, NOW))

    def answer(self, name: str) -> None:
        self.tell(NodeAskedAbout(name, WitnessReport(self.now, "answers", {})))

    @property
    def names(self) -> list[str]:
        return [question.node for question in self.asked]

    @property
    def trouble(self) -> dict[str, str]:
        return self.state.nodes_heard.trouble(self.now)


def test_a_silent_node_is_asked_about_with_the_nearest_that_report() -> None:
    site = Site()
    site.run(1.5, "node2")
    assert site.asked == []
    site.run(0.5, "node2")
    assert site.asked == [AskAbout("node2", ("node1", "node3", "node0"))]


def test_a_node_is_asked_about_again_while_it_is_silent_and_its_witnesses_are_forgotten_once_it_reports() -> None:
    site = Site()
    site.run(2, "node2")
    site.answer("node2")
    site.run(0.75, "node2")
    assert site.names == ["node2"]
    site.run(0.5, "node2")
    assert site.names == ["node2", "node2"]
    assert set(site.state.nodes_heard.witness_reports()) == {"node2"}
    site.run(0.25)
    assert site.state.nodes_heard.witness_reports() == {}


def test_an_agent_that_answers_saves_its_node() -> None:
    """It was only slow: what others say of the node from before its answer counts no more."""
    site = Site()
    site.run(2, "node2")
    asked_at = site.now
    answer = Answer(Stamp("node2", 1, NOW, site.now), id=1, ok=True)
    site.now += 0.5
    site.tell(ReportReceived(answer, site.now, NOW))
    nobody = WitnessReport(asked_at, "nothing", {"node1": "nothing", "node3": "nothing"})
    actions = site.tell(NodeAskedAbout("node2", nobody))
    actions += site.tell(Tick(site.now, NOW))
    assert site.state.nodes_heard.witness_reports() == {}
    assert not site.state.dead_nodes and not [a for a in actions if not isinstance(a, AskAbout)]


def test_a_question_without_an_answer_is_asked_again() -> None:
    site = Site()
    site.run(2, "node2")
    site.run(2, "node2")
    assert site.names == ["node2"], "one at a time"
    site.tell(NodeAskedAbout("node2", None))
    site.run(0.5, "node2")
    assert site.names == ["node2", "node2"]


def test_no_node_is_asked_about_if_most_are_silent() -> None:
    """Then the supervisor hears nothing, for a reason on its side."""
    site = Site()
    site.run(10, *NODES[:4])
    assert site.asked == []


@pytest.mark.parametrize("aegis", [{"ask_after_s": 0}, {"sensors": {"progress_s": 2.0}}], ids=["off", "rare"])
def test_nobody_is_asked_if_that_is_off_or_reports_are_rare(aegis: dict[str, Any]) -> None:
    site = Site(**aegis)
    site.run(2.5, "node2")
    assert site.asked == []


def test_a_dead_node_is_asked_about_no_more_in_the_next_attempt() -> None:
    site = Site()
    site.run(1, "node2")
    site.tell(Tick(site.now, NOW, failed_nodes=("node2",)))
    site.state.detector.begin(2, NODES[:2], site.now)
    assert "node2" not in site.state.nodes_heard


def test_what_slurm_reports_of_a_silent_node_counts_until_it_is_heard() -> None:
    site = Site()
    site.run(2, "node2", "node3")
    site.tell(SlurmAnswered({"node2": "Slurm reports down", "node3": ""}, frozenset(["node2"])))
    site.tell(NodeUnreachable("node4", "tasks cannot be started"))
    assert site.trouble == {"node2": "Slurm reports down", "node4": "tasks cannot be started"}
    site.run(0.25)
    assert site.trouble == {}


def test_while_no_agent_reports_only_a_node_that_is_down_is_in_trouble() -> None:
    """A controller that has just come back starts nothing anywhere."""
    site = Site()
    for name in NODES:
        site.tell(AgentGivenUp(name))
    site.tell(NodeUnreachable("node4", "tasks cannot be started"))
    states = {"node2": "Slurm reports down", "node3": "Slurm reports idle not responding"}
    site.tell(SlurmAnswered(states, frozenset(["node2"])))
    assert site.trouble == {"node2": "Slurm reports down"}


def test_after_the_end_each_silent_node_is_waited_for_until_it_reports_or_is_found_dead() -> None:
    site = Site(heartbeat_timeout_s=8)
    site.run(4, "node1", "node2")
    assert not site.state.awaits_nodes(site.now), "while it runs"
    site.tell(Cleared(site.now))
    assert site.state.awaits_nodes(site.now)
    site.hear("node1")
    assert site.state.awaits_nodes(site.now)
    site.tell(FaultsFound((fault("node_dead", "node2"),)))
    assert not site.state.awaits_nodes(site.now)


def test_a_node_that_stays_silent_is_waited_for_as_long_as_heartbeats_may_be_missed() -> None:
    site = Site(heartbeat_timeout_s=8)
    site.run(4, "node1")
    site.tell(Cleared(site.now))
    assert site.state.awaits_nodes(site.now + 7)
    site.hear("node0")
    assert not site.state.awaits_nodes(site.now + 8)
