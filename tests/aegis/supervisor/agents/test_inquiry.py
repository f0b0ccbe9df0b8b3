"""Who is asked about a silent node, when, and what is kept of the answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import pytest

from tests.waiting import wait_for
from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.protocol import Answer, Command, Stamp
from zslurm.aegis.supervisor.agents.inquiry import Inquiry
from zslurm.aegis.supervisor.agents.liveness import Liveness
from zslurm.config.aegis import AegisSection
from zslurm.core.errors import SlurmUnavailable
from zslurm.slurm.client import SlurmClient

NODES = [f"node{number}" for number in range(6)]


class Site:
    """Six nodes whose agents answer, and an inquiry at work."""

    def __init__(self, **settings: Any) -> None:
        self.liveness, self.over = Liveness(8.0), threading.Event()
        self.liveness.begin(NODES)
        self.port_of: dict[str, int] = {}
        self.slurm_refuses = 0
        self.asked: list[tuple[Command, list[str]]] = []
        self.wakes_up: str | None = None
        self.hear(*NODES)
        every = {"ask_after_s": 0.5, "sensors": {"progress_s": 0.2}} | settings
        client = cast(SlurmClient, self)
        aegis = AegisSection.model_validate(every)
        self.inquiry = Inquiry(aegis, self.liveness, lambda: client, self._ask, self.over)

    def start(self) -> None:
        self.inquiry.find_addresses()
        threading.Thread(target=self.inquiry.run, daemon=True).start()

    def hear(self, *nodes: str, ago_s: float = 0.0) -> None:
        with self.liveness.lock:
            for name in nodes:
                self.liveness.nodes[name].take_report(time.monotonic() - ago_s)

    def silence(self, *nodes: str) -> None:
        """These fall silent; the others stay heard."""
        self.hear(*NODES, ago_s=-100.0)
        self.hear(*nodes, ago_s=1.0)

    def slurmd_addresses(self, nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
        if self.slurm_refuses:
            self.slurm_refuses -= 1
            raise SlurmUnavailable("not now")
        return {name: ("localhost", port) for name, port in self.port_of.items() if name in nodes}

    def _ask(self, command: Command, nodes: Sequence[str], _timeout_s: float) -> Mapping[str, Answer]:
        self.asked.append((command, list(nodes)))
        if self.wakes_up is not None:
            self.hear(self.wakes_up)
        return {name: Answer(Stamp(name, 1, 0.0, 0.0), 1, True, "", {"port": "nothing"}) for name in nodes[:2]}

    def report(self, name: str) -> WitnessReport:
        return wait_for(lambda: self.inquiry.witness_reports().get(name), f"what is known of {name}")


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
    site.start()
    site.silence("node2")
    report = site.report("node2")
    assert (report.slurmd, report.neighbours) == ("refuses", {"node1": "nothing", "node3": "nothing"})
    command, asked = site.asked[0]
    assert command.do == "reach"
    assert command.address == ("127.0.0.1", free_port), "a name service may be away by then"
    assert asked == ["node1", "node3", "node0"], "the nearest"
    assert set(command.nodes) == {*asked, "node2"}, "its agent gets the chance to answer"
    assert list(site.inquiry.witness_reports()) == ["node2"], "no other node"


def test_ports_that_a_firewall_closes_off_are_no_evidence(
    site: Site, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes back from a node whose agent reports either."""
    monkeypatch.setattr("zslurm.aegis.supervisor.agents.inquiry.reach", lambda *_: "nothing")
    site.port_of = {"node1": free_port, "node2": free_port}
    site.start()
    site.silence("node2")
    report = site.report("node2")
    assert {report.slurmd, *report.neighbours.values()} == {"unknown"}


def test_it_is_asked_about_again_while_it_is_silent_and_forgotten_once_it_is_heard(site: Site) -> None:
    site.start()
    site.silence("node2")
    first = site.report("node2").asked_at
    wait_for(lambda: site.report("node2").asked_at > first, "the next question")
    site.hear("node2")
    assert site.inquiry.witness_reports() == {}


def test_an_agent_that_answers_saves_its_node(site: Site) -> None:
    site.wakes_up = "node2"
    site.start()
    site.silence("node2")
    wait_for(lambda: site.asked, "the question")
    site.over.set()
    assert site.inquiry.witness_reports() == {}


def test_without_an_address_the_neighbours_are_asked_all_the_same(site: Site) -> None:
    site.start()
    site.silence("node5")
    assert site.report("node5").slurmd == "unknown"


def test_no_node_is_asked_about_where_most_are_silent(site: Site) -> None:
    """Then the supervisor hears nothing, for a reason on its side."""
    site.silence(*NODES[:4])
    site.start()
    assert not site.over.wait(1.0)
    assert site.asked == []


def test_no_node_is_asked_about_where_that_is_off() -> None:
    site = Site(ask_after_s=0)
    site.silence("node2")
    site.inquiry.run()  # returns at once
    assert site.asked == []


def test_rare_reports_make_no_silence() -> None:
    site = Site(sensors={"progress_s": 2.0})
    site.start()
    site.silence("node2")
    assert not site.over.wait(0.6)
    site.over.set()
    assert site.asked == []


def test_addresses_are_asked_for_again_while_slurm_is_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zslurm.aegis.supervisor.agents.inquiry._ADDRESSES_AGAIN_S", 0.01)
    site.slurm_refuses = 2
    site.port_of = {"node2": 1}
    site.start()
    site.silence("node2")
    assert site.report("node2").slurmd == "refuses"
