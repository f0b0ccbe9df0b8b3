"""What a sensor is, what it reports, and how sensors are found: one file for each in `sensors/`.

A sensor is made and read in a separate thread, so it may take its time, and may hang: only its readings are then
missing. It remembers what it saw when the attempt began and reports changes, whichever agent sees them
(attempt_baselines.py); what was wrong before the run is the preflight's and the doctor's business.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zslurm.aegis.fault_kinds import FaultKind, rule_of
from zslurm.aegis.types import Fault, Role
from zslurm.config.aegis import AegisSection, SensorSettings
from zslurm.config.spec import ClusterSection
from zslurm.run.run_dir import RunDir


@dataclass(frozen=True)
class Reading:
    """What a sensor read once.

    Attributes:
        ok: false if nothing could be read: then nothing is known, good or bad.
        why: why not.
        faults: new since the last reading.
        values: what was measured, for people.
        pending: it waits for its first answer, which is not worth a report.
        first: nothing was read before by this agent: whatever is wrong now is among the faults.
    """

    ok: bool = True
    why: str = ""
    faults: tuple[Fault, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    pending: bool = False
    first: bool = False


@dataclass(frozen=True)
class NodeContext:
    """The surroundings of an agent: its node, and the run that it watches.

    Attributes:
        root: the directory of /sys and /proc of the node; see `sysfs.sysroot`.
        environ: of the agent.
        now: the time, UNIX seconds.
    """

    node: str
    run: RunDir
    aegis: AegisSection = field(default_factory=AegisSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)
    now: Callable[[], float] = time.time

    @property
    def settings(self) -> SensorSettings:
        """What the run's settings ask of the sensors."""
        return self.aegis.sensors

    def fault(self, kind: FaultKind, source: str, line: str, **more: Any) -> Fault:
        """Return a fault of this node, noticed now; `more` are further fields, if its kind's are not right."""
        return Fault.of_kind(kind, self.now(), source, line, **({"node": self.node} | more))


@dataclass(frozen=True)
class Change:
    """What happened to a device between two looks, for a fault.

    Attributes:
        message: what, without the name of the device.
        role: of the fault; None: the role of its kind.
    """

    kind: FaultKind
    message: str
    role: Role | None = None
    cleared: bool = False

    def fault(self, context: NodeContext, source: str, device: str, **more: Any) -> Fault:
        """Return the fault; `more` names the device in a field."""
        role, line = self.role or rule_of(self.kind).role, f"{device} {self.message}"
        return context.fault(self.kind, source, line, role=role, cleared=self.cleared, **more)


class Sensor:
    """Looks at one thing, again and again, every `period_s` seconds."""

    def __init__(self, context: NodeContext) -> None:
        """Know the node; `aegis.sensors.period_s` is the default period."""
        self.context = context
        self.period_s: float = context.settings.period_s
        self._lasting: set[FaultKind] = set()

    def read(self) -> Reading:
        """Look. It does not raise for what may happen to a machine; it may block."""
        raise NotImplementedError

    def state_fault(self, kind: FaultKind, source: str, is_wrong: bool, line: str, **more: Any) -> list[Fault]:
        """Return a fault if a state that lasts begins, one that clears it if it ends, and else nothing."""
        if is_wrong == (kind in self._lasting):
            return []
        self._lasting ^= {kind}
        return [self.context.fault(kind, source, line, cleared=not is_wrong, **more)]

    def begin_attempt(self) -> None:
        """Take what was seen last as what a new attempt begins with."""

    def memory(self) -> Any:
        """Return what the sensor of the attempt's next agent must know, as JSON has it; None for nothing."""
        return None

    def recall(self, memory: Any) -> None:
        """Continue from what another agent's sensor saw when the attempt began, in place of the first look.

        Args:
            memory: what `memory` of that sensor gave; the file may have changed since.

        Raises:
            ValueError: it cannot be such a memory; nothing has changed, and the sensor begins again.
        """

    def close(self) -> None:
        """End what the sensor started."""


Make = Callable[[NodeContext], Sensor | None]
"""Makes a sensor, also by looking at the node; None if there is nothing that it could look at."""


def all_sensors() -> dict[str, Make]:
    """Return every sensor by name: each module of `sensors/` with a function `make`; its name is the sensor's."""
    from zslurm.aegis.agent import sensors

    modules = {
        module.name: importlib.import_module(f"{sensors.__name__}.{module.name}")
        for module in pkgutil.iter_modules(sensors.__path__)
    }
    return {name: module.make for name, module in sorted(modules.items()) if hasattr(module, "make")}
