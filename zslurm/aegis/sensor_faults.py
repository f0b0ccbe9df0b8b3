"""What sensors report, told once: a fault stands until its sensor says that it is over.

Faults of one kind from one node are let through at most ten times a minute. A node's clock may be minutes off: its
faults are told in the time of the supervisor, by whose clock the policy judges them. Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from zslurm.aegis.evidence import Fault
from zslurm.aegis.protocol import SensorReport

_MOST_PER_MINUTE = 10
_HAVE_AN_END = frozenset(
    "nic_link_down nic_fault nic_errors gpu_throttled memory_low disk_low zombies storage_fault".split()
)


class SensorFaults:
    """The faults that the sensors of all nodes have reported, and the sensors that cannot read."""

    def __init__(self) -> None:
        self._new: list[Fault] = []
        self._standing: dict[tuple[object, ...], Fault] = {}
        self._passed: dict[tuple[str, str | None], deque[float]] = {}
        self._unavailable: dict[tuple[str, str], str] = {}

    def begin_attempt(self) -> None:
        """A new attempt starts: it is told of what is broken still, such as a link that is down.

        What has no end of its own, such as an ECC error, counts again when it is seen again.
        """
        self._standing = {key: fault for key, fault in self._standing.items() if _has_an_end(fault)}
        self._new += [
            fault for fault in self._standing.values() if fault.role == "root" and fault not in self._new
        ]

    def feed(self, report: SensorReport, now: float, wall: float | None = None) -> None:
        """Take a report.

        Args:
            report: of a sensor.
            now: when it came, monotonic seconds.
            wall: the same in UNIX seconds; None: the clock of its node is right.
        """
        behind = 0.0 if wall is None else wall - report.stamp.t
        self._feed_availability(report, report.stamp.t + behind)
        for fault in report.faults:
            fault = replace(fault, node=fault.node or report.stamp.node, time=fault.time + behind)
            key = (fault.kind, fault.node, fault.gpu, fault.nic, fault.rank)
            if fault.cleared:
                if self._standing.pop(key, None) is not None:
                    self._new.append(fault)
                continue
            if key in self._standing or not self._may_pass(fault, now):
                continue
            self._standing[key] = fault
            self._new.append(fault)

    def take(self) -> list[Fault]:
        """What is new since the last call."""
        new, self._new = self._new, []
        return new

    def _feed_availability(self, report: SensorReport, time: float) -> None:
        node, key = report.stamp.node, (report.stamp.node, report.sensor)
        known = self._unavailable.get(key)
        if report.ok:
            if self._unavailable.pop(key, None) is not None:
                line = f"{report.sensor}: can be read again"
                self._new.append(_unavailable(node, report.sensor, line, time, cleared=True))
        elif known is None or (report.why and report.why != known):
            self._unavailable[key] = report.why
            line = f"{report.sensor}: {report.why or 'cannot be read'}"
            self._new.append(_unavailable(node, report.sensor, line, time))

    def _may_pass(self, fault: Fault, now: float) -> bool:
        times = self._passed.setdefault((fault.kind, fault.node), deque(maxlen=_MOST_PER_MINUTE))
        if len(times) == _MOST_PER_MINUTE and now - times[0] < 60.0:
            return False
        times.append(now)
        return True


def _has_an_end(fault: Fault) -> bool:
    """Whether the sensor also tells when it is over; a line of a log never does."""
    return fault.kind in _HAVE_AN_END and fault.source not in ("kernel_log", "log")


def _unavailable(node: str, sensor: str, line: str, time: float, *, cleared: bool = False) -> Fault:
    return Fault("sensor_unavailable", "advisory", "node", time, sensor, line, node=node, cleared=cleared)
