"""Asks about a silent node: its slurmd's port, its neighbours, its agent.

The core decides who is asked about, and what the answers mean (core/detection/nodes.py,
core/detection/witnesses.py). Asking costs the node a connection that is closed at once. Each question has a
thread: nothing waits for the answers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.core.messages import AskAbout, CoreEvent, NodeAskedAbout
from zslurm.aegis.protocol import Answer, Command
from zslurm.core.errors import ZslurmError
from zslurm.core.reach import CONNECT_S, Reach, reach, reach_of
from zslurm.slurm.client import SlurmClient

Address = tuple[str, int]
Ask = Callable[[Command, Sequence[str], float], Mapping[str, Answer]]
"""`ask(command, nodes, timeout_s)` gives agents a command and returns the answers that came in time."""

_ANSWER_S = 0.75
"""Seconds that a neighbour's answer gets besides the connection that it tries."""
_ADDRESSES_AGAIN_S = 10.0


class Inquiry:
    """Asks about silent nodes, with the addresses that it learned while Slurm was well."""

    def __init__(
        self,
        nodes: Sequence[str],
        client: Callable[[], SlurmClient],
        ask: Ask,
        tell: Callable[[CoreEvent], None],
        over: threading.Event,
    ) -> None:
        """Prepare; `find_addresses` comes first.

        Args:
            nodes: the nodes of the job.
            client: makes a client of Slurm that gives up soon.
            ask: asks agents.
            tell: takes what was answered.
            over: set when the supervisor ends its agents.
        """
        self._nodes, self._client, self._ask, self._tell, self._over = nodes, client, ask, tell, over
        self._addresses: dict[str, Address] = {}

    def add(self, nodes: Sequence[str]) -> None:
        """Ask about these nodes as well; their addresses are found in a thread."""
        self._nodes = [*self._nodes, *nodes]
        threading.Thread(target=self.find_addresses, daemon=True, name="addresses").start()

    def begin(self, question: AskAbout) -> None:
        """Ask about a node, in a thread."""
        name = f"inquire-{question.node}"
        threading.Thread(target=self._inquire, args=(question,), daemon=True, name=name).start()

    def find_addresses(self) -> None:
        """Learn the address of each node's slurmd, while Slurm and the name service are well."""
        while not self._over.is_set():
            try:
                addresses = self._client().slurmd_addresses(self._nodes)
                self._addresses = {name: _resolved(address) for name, address in addresses.items()}
                return
            except (ZslurmError, OSError):
                self._over.wait(_ADDRESSES_AGAIN_S)

    def _inquire(self, question: AskAbout) -> None:
        report: WitnessReport | None = None
        try:
            report = self._answers(question)
        finally:
            self._tell(NodeAskedAbout(question.node, report))

    def _answers(self, question: AskAbout) -> WitnessReport:
        name, neighbours, asked_at = question.node, question.neighbours, time.monotonic()
        address = self._addresses.get(name)
        # Where nothing comes back from a node that reports either, slurmd's ports are closed off: no evidence.
        control = self._addresses.get(neighbours[0]) if neighbours else None
        reaches: dict[str, Reach] = {}
        probes = [
            threading.Thread(target=self._probe, args=(reaches, *probe), daemon=True)
            for probe in (("own", address), ("control", control))
        ]
        for probe in probes:
            probe.start()
        # The silent agent is asked too: an answer of it is a report like any other.
        command = Command("reach", nodes=(*neighbours, name), address=address)
        answers = self._ask(command, neighbours, CONNECT_S + _ANSWER_S)
        for probe in probes:
            probe.join(CONNECT_S)
        seen = {node: reach_of(answer.values.get("port")) for node, answer in answers.items()}
        own_reach = reaches.get("own", "unknown")
        if reaches.get("control") == "nothing":
            own_reach = "unknown" if own_reach == "nothing" else own_reach
            seen = {node: "unknown" if port == "nothing" else port for node, port in seen.items()}
        return WitnessReport(asked_at, own_reach, seen)

    @staticmethod
    def _probe(found: dict[str, Reach], which: str, address: Address | None) -> None:
        found[which] = _reached(address)


def _reached(address: Address | None) -> Reach:
    return "unknown" if address is None else reach(*address, CONNECT_S)


def _resolved(address: Address) -> Address:
    """Return the address with the host's IP address: later the name service may be away as well."""
    host, port = address
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
