"""Asks at once about a node whose agent misses a heartbeat: its slurmd's port, its neighbours, its agent.

What the answers mean is decided in witnesses.py of the core. Asking costs the node a connection that is closed at
once, so it is done early, after aegis.ask_after_s, and again while the node stays silent. Nothing here waits in
the thread of the caller: each node has a thread for its questions, and what came of the last is kept.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from zslurm.aegis.core.detection.witnesses import WitnessReport
from zslurm.aegis.protocol import Answer, Command
from zslurm.aegis.supervisor.agents.liveness import Liveness
from zslurm.config.aegis import AegisSection
from zslurm.core.errors import ZslurmError
from zslurm.core.reach import CONNECT_S, Reach, reach, reach_of
from zslurm.slurm.client import SlurmClient

Address = tuple[str, int]
Ask = Callable[[Command, Sequence[str], float], Mapping[str, Answer]]
"""`ask(command, nodes, timeout_s)` gives agents a command and returns the answers that came in time."""

_LOOK_S = 0.25
_ANSWER_S = 0.75
"""Seconds that a neighbour's answer gets besides the connection that it tries."""
_NEIGHBOURS = 3
_AT_ONCE = 8
"""Most nodes that are asked about at a time: more that fall silent together are a matter of the network."""
_AGAIN_S, _AGAIN_LATER_S = 1.0, 5.0
_LATER_S = 15.0
"""Seconds without a heartbeat after which a node is asked about more rarely."""
_ADDRESSES_AGAIN_S = 10.0
_REPORTS_MISSED = 1.5
"""An agent that reports more rarely than usual is asked about after so many of its reports."""


class Inquiry:
    """What was learned of silent nodes by asking."""

    def __init__(
        self,
        settings: AegisSection,
        liveness: Liveness,
        client: Callable[[], SlurmClient],
        ask: Ask,
        over: threading.Event,
    ) -> None:
        """Prepare; `run` does the work.

        Args:
            settings: of the run.
            liveness: which agents were heard, and when.
            client: makes a client of Slurm that gives up soon.
            ask: asks agents.
            over: set when the supervisor ends its agents.
        """
        self._after_s = max(settings.ask_after_s, _REPORTS_MISSED * settings.sensors.progress_s)
        self._wanted = settings.ask_after_s > 0
        self._liveness, self._client, self._ask, self._over = liveness, client, ask, over
        self._addresses: dict[str, Address] = {}
        self._asking: set[str] = set()
        self._kept: dict[str, WitnessReport] = {}

    def witness_reports(self) -> dict[str, WitnessReport]:
        """Return what was answered last about each node that has not been heard since it was asked about."""
        with self._liveness.lock:
            for name in [name for name, kept in self._kept.items() if self._heard_since(name, kept.asked_at)]:
                del self._kept[name]
            return dict(self._kept)

    def _heard_since(self, name: str, when: float) -> bool:
        node = self._liveness.nodes.get(name)
        return node is None or node.last_heard is None or node.last_heard > when

    def run(self) -> None:
        """Ask about silent nodes until the supervisor ends its agents."""
        if not self._wanted:
            return
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            with self._liveness.lock:
                silent = self._liveness.missed(self._after_s, now)
                # Where most are silent, it is this side that hears nothing.
                if len(silent) * 2 > len(self._liveness.nodes):
                    continue
                due = [name for name, seconds in silent.items() if self._is_due(name, seconds, now)]
                due = due[: _AT_ONCE - len(self._asking)]
                self._asking.update(due)
            for name in due:
                threading.Thread(target=self._inquire, args=(name,), daemon=True, name=f"inquire-{name}").start()

    def find_addresses(self) -> None:
        """Learn the address of each node's slurmd, while Slurm and the name service are well."""
        while self._wanted and not self._over.is_set():
            try:
                with self._liveness.lock:
                    names = list(self._liveness.nodes)
                found = self._client().slurmd_addresses(names)
                self._addresses = {name: _resolved(address) for name, address in found.items()}
                return
            except (ZslurmError, OSError):
                self._over.wait(_ADDRESSES_AGAIN_S)

    def _is_due(self, name: str, silent_s: float, now: float) -> bool:
        if name in self._asking:
            return False
        kept = self._kept.get(name)
        again_s = _AGAIN_S if silent_s < _LATER_S else _AGAIN_LATER_S
        return kept is None or now - kept.asked_at >= again_s

    def _inquire(self, name: str) -> None:
        try:
            asked_at = time.monotonic()
            neighbours = self._neighbours(name)
            address = self._addresses.get(name)
            # Where nothing comes back from a node that reports either, slurmd's ports are closed off: no evidence.
            control = self._addresses.get(neighbours[0]) if neighbours else None
            found: dict[str, Reach] = {}
            probes = [
                threading.Thread(target=self._probe, args=(found, *probe), daemon=True)
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
            own = found.get("own", "unknown")
            if found.get("control") == "nothing":
                own = "unknown" if own == "nothing" else own
                seen = {node: "unknown" if port == "nothing" else port for node, port in seen.items()}
            with self._liveness.lock:
                self._kept[name] = WitnessReport(asked_at, own, seen)
        finally:
            with self._liveness.lock:
                self._asking.discard(name)

    @staticmethod
    def _probe(found: dict[str, Reach], which: str, address: Address | None) -> None:
        found[which] = _reached(address)

    def _neighbours(self, name: str) -> list[str]:
        """Return the nearest nodes, in the order of ranks, whose agents report."""
        with self._liveness.lock:
            names = list(self._liveness.nodes)
            silent = self._liveness.not_heard_for(self._after_s)
        if name not in names:
            return []
        place = names.index(name)
        near = sorted((other for other in names if other not in silent), key=lambda o: abs(names.index(o) - place))
        return near[:_NEIGHBOURS]


def _reached(address: Address | None) -> Reach:
    return "unknown" if address is None else reach(*address, CONNECT_S)


def _resolved(address: Address) -> Address:
    """Return the address with the host's IP address: later the name service may be away as well."""
    host, port = address
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
