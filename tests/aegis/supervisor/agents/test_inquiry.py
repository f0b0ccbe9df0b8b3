"""What is asked about a silent node, and what is answered."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import pytest

from tests.waiting import wait_for
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.core.messages import AskAbout, CoreEvent, NodeAskedAbout
from zslurm.aegis.protocol import Answer, Command, Stamp
from zslurm.aegis.supervisor.agents.inquiry import Inquiry
from zslurm.core.errors import SlurmUnavailable
from zslurm.slurm.client import SlurmClient

NODES = [f"node{number}" for number in range(6)]


class Site:
    """Six nodes whose agents answer, and an inquiry about one of them."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.port_of: dict[str, int] = {}
        self.slurm_refuses = 0
        self.asked: list[tuple[Command, list[str]]] = []
        self.told: list[CoreEvent] = []
        client = cast(SlurmClient, self)
        self.inquiry = Inquiry(NODES, lambda: client, self._ask, self.told.append, self.over)

    def slurmd_addresses(self, nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
        if self.slurm_refuses:
            self.slurm_refuses -= 1
            raise SlurmUnavailable("not now")
        return {name: ("localhost", port) for name, port in self.port_of.items() if name in nodes}

    def _ask(self, command: Command, nodes: Sequence[str], _timeout_s: float) -> Mapping[str, Answer]:
        self.asked.append((command, list(nodes)))
        return {name: Answer(Stamp(name, 1, 0.0, 0.0), 1, True, "", {"port": "nothing"}) for name in nodes[:2]}

    def report(self, name: str, *neighbours: str) -> WitnessReport:
        self.inquiry.find_addresses()
        self.inquiry.begin(AskAbout(name, neighbours or ("node1", "node3", "node0")))
        (told,) = wait_for(lambda: self.told, f"what is answered about {name}")
        assert isinstance(told, NodeAskedAbout) and told.report is not None
        assert told.node == name
        return told.report


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.over.set()


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port at which nothing listens, and that no other program gets meanwhile: it is bound."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def test_a_silent_node_is_asked_about(site: Site, free_port: int) -> None:
    site.port_of = {"node2": free_port}
    report = site.report("node2")
    assert (report.slurmd, report.neighbours) == ("refuses", {"node1": "nothing", "node3": "nothing"})
    command, asked = site.asked[0]
    assert command.do == "reach"
    assert command.address == ("127.0.0.1", free_port), "a name service may be away by then"
    assert asked == ["node1", "node3", "node0"]
    assert set(command.nodes) == {*asked, "node2"}, "its agent gets the chance to answer"


def test_ports_that_a_firewall_closes_off_are_no_evidence(
    site: Site, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes back from a node whose agent reports either."""
    monkeypatch.setattr("zslurm.aegis.supervisor.agents.inquiry.reach", lambda *_: "nothing")
    site.port_of = {"node1": free_port, "node2": free_port}
    report = site.report("node2")
    assert {report.slurmd, *report.neighbours.values()} == {"unknown"}


def test_without_an_address_the_neighbours_are_asked_all_the_same(site: Site) -> None:
    assert site.report("node5").slurmd == "unknown"


def test_a_question_that_fails_is_answered_as_well(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the node would never be asked about again."""

    def fail(*_: object) -> None:
        raise OSError("no more threads")

    monkeypatch.setattr(site.inquiry, "_ask", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    site.inquiry.begin(AskAbout("node2", ("node1",)))
    assert wait_for(lambda: site.told, "the answer") == [NodeAskedAbout("node2", None)]


def test_addresses_are_asked_for_again_while_slurm_is_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zslurm.aegis.supervisor.agents.inquiry._ADDRESSES_AGAIN_S", 0.01)
    site.slurm_refuses = 2
    site.port_of = {"node2": 1}
    assert site.report("node2").slurmd == "refuses"
