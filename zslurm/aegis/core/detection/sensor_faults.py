"""What sensors report, recorded once: a fault lasts until its sensor reports that it is over.

The first report of an agent names whatever is wrong then, and what happened since the attempt began, for it may
have replaced another agent. So a state of its sensor that it does not name is over, and what was recorded before
is not recorded again. A supervisor that takes over an attempt knows what its predecessor recorded (`restore`).

Faults of one kind from one node are let through at most ten times a minute. A node's clock may be minutes off: its
faults have times of the supervisor, the clock by which the policy compares them. Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from zslurm.aegis.fault_kinds import GPU_RAS_CORRECTABLE, SENSOR_UNAVAILABLE
from zslurm.aegis.protocol import SensorReport
from zslurm.aegis.types import OF_STEP, Fault

_MOST_PER_MINUTE = 10
_NOT_SENSORS = OF_STEP | frozenset(("rank", "log", "agent", "progress", "slurm", "gpu_test"))
"""Sources whose faults no sensor reports."""

_Key = tuple[str, str | None, str | None, str | None, int | None]


class SensorFaults:
    """The faults that the sensors of all nodes have reported, and the sensors that cannot read."""

    def __init__(self) -> None:
        self._new: list[Fault] = []
        self._open: dict[_Key, Fault] = {}
        self._recorded: set[tuple[_Key, str]] = set()
        self._passed: dict[tuple[str, str | None], deque[float]] = {}
        self._unavailable: dict[tuple[str, str], str] = {}

    def begin_attempt(self) -> None:
        """Begin a new attempt: what is broken still is reported again, such as a link that is down.

        What has no end, such as an ECC error, counts again when it is seen again.
        """
        self._open = {key: fault for key, fault in self._open.items() if has_an_end(fault)}
        self._recorded.clear()
        self._new += [fault for fault in self._open.values() if fault.role == "root" and fault not in self._new]

    def restore(self, faults: Iterable[Fault]) -> None:
        """Know what was recorded of the present attempt already; it is not recorded again."""
        for fault in faults:
            if fault.source in _NOT_SENSORS or fault.kind == SENSOR_UNAVAILABLE:
                continue
            key = _key(fault)
            self._recorded.add((key, fault.line))
            if fault.cleared:
                self._open.pop(key, None)
            else:
                self._open[key] = fault

    def feed(self, report: SensorReport, now: float, wall: float | None = None) -> None:
        """Take a report; for `now` and `wall` see `Detector.feed`."""
        behind = 0.0 if wall is None else wall - report.stamp.t
        self._feed_availability(report, report.stamp.t + behind)
        node = report.stamp.node
        faults = [replace(fault, node=fault.node or node, time=fault.time + behind) for fault in report.faults]
        if report.first:
            over = self._over(node, report.sensor, faults, report.stamp.t + behind)
            faults = [*over, *self._unknown(faults)]
        for fault in faults:
            self._feed(fault, now)

    def _feed(self, fault: Fault, now: float) -> None:
        key = _key(fault)
        if fault.cleared:
            if self._open.pop(key, None) is not None:
                self._recorded.add((key, fault.line))
                self._new.append(fault)
            return
        if (key in self._open and not _rises(self._open[key], fault)) or not self._may_pass(fault, now):
            return
        self._open[key] = fault
        self._recorded.add((key, fault.line))
        self._new.append(fault)

    def _over(self, node: str, sensor: str, named: list[Fault], time: float) -> list[Fault]:
        """Return the ends of states that an earlier agent reported and that a whole first report does not name."""
        still = {_key(fault) for fault in named}
        return [
            replace(fault, time=time, cleared=True, line=f"{fault.nic or fault.gpu or sensor}: it is over")
            for key, fault in self._open.items()
            if fault.node == node and fault.source == sensor and has_an_end(fault) and key not in still
        ]

    def _unknown(self, named: list[Fault]) -> list[Fault]:
        """Return a first report without what came and went, and was recorded before."""
        last = {_key(fault): fault for fault in named}
        came_and_went = {key for key, fault in last.items() if fault.cleared and key not in self._open}
        recorded = {
            key for key in came_and_went if all((key, f.line) in self._recorded for f in named if _key(f) == key)
        }
        return [fault for fault in named if _key(fault) not in recorded]

    def take(self) -> list[Fault]:
        """Return what is new since the last call."""
        new, self._new = self._new, []
        return new

    def _feed_availability(self, report: SensorReport, time: float) -> None:
        node, key = report.stamp.node, (report.stamp.node, report.sensor)
        reason_before = self._unavailable.get(key)
        if report.ok:
            if self._unavailable.pop(key, None) is not None:
                line = f"{report.sensor}: can be read again"
                self._new.append(_unavailable(node, report.sensor, line, time, cleared=True))
        elif reason_before is None or (report.why and report.why != reason_before):
            self._unavailable[key] = report.why
            line = f"{report.sensor}: {report.why or 'cannot be read'}"
            self._new.append(_unavailable(node, report.sensor, line, time))

    def _may_pass(self, fault: Fault, now: float) -> bool:
        times = self._passed.setdefault((fault.kind, fault.node), deque(maxlen=_MOST_PER_MINUTE))
        if len(times) == _MOST_PER_MINUTE and now - times[0] < 60.0:
            return False
        times.append(now)
        return True


def _key(fault: Fault) -> _Key:
    """Return what is broken, and where."""
    return fault.kind, fault.node, fault.gpu, fault.nic, fault.rank


def _rises(known: Fault, fault: Fault) -> bool:
    """Return whether a counter has grown so much since it was recorded that its sensor reports it again."""
    return fault.kind == GPU_RAS_CORRECTABLE and fault.source == known.source == "gpu" and fault.line != known.line


def has_an_end(fault: Fault) -> bool:
    """Return whether the sensor also reports when it is over; a line of a log never does."""
    return fault.rule.reports_end and fault.source not in ("kernel_log", "log")


def _unavailable(node: str, sensor: str, line: str, time: float, *, cleared: bool = False) -> Fault:
    return Fault.of_kind(SENSOR_UNAVAILABLE, time, sensor, line, node=node, cleared=cleared)
