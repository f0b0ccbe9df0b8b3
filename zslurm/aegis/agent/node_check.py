"""Is this node fit to take part? Asked of a spare before it takes the place of a node.

The doctor's own checks say so of GPUs and NICs, two sensors of memory and of the checkpoint directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.agent.gpu_tool import ToolSources
from zslurm.aegis.agent.sensor import Place, Sensor
from zslurm.aegis.agent.sensors.disk import Disk
from zslurm.aegis.agent.sensors.host import Host
from zslurm.aegis.fault_kinds import DISK_LOW, STORAGE_FAULT
from zslurm.doctor.check import Check, Outcome, Status, failed, passed, unavailable, warned
from zslurm.doctor.node import node_checks, run_checks
from zslurm.hardware.node_sources import Sources, Task

_OF_STORAGE = frozenset({DISK_LOW, STORAGE_FAULT})
DOCTOR_CHECKS = ("gpu-count", "gpu-idle", "gpu-ecc", "gpu-pages", "nics", "rails", "disk")


@dataclass(frozen=True)
class Health:
    """What was found.

    Attributes:
        problems: why the node must not be used; empty where it may.
        notes: what is less than good, or could not be found out.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_node(place: Place) -> Health:
    """Examine this node. Each check has the doctor's limit of time, cluster.doctor.check_s."""
    sources = ToolSources.of(place, task=Task(cluster=place.cluster, directory=str(place.run.path)))
    checkpoints = place.run.checkpoints
    storage = _mounted(checkpoints, _examine(Disk(place, checkpoints)))
    own = [_check("memory", _examine(Host(place))), _check("checkpoints", storage)]
    outcomes = run_checks([*node_checks(DOCTOR_CHECKS), *own], sources)
    said = [(name, outcome) for name, outcome in outcomes.items() if outcome is not None]
    return Health(
        problems=tuple(f"{name}: {outcome.reason}" for name, outcome in said if outcome.status is Status.FAIL),
        notes=tuple(
            f"{name}: {outcome.reason}"
            for name, outcome in said
            if outcome.status in (Status.WARN, Status.UNAVAILABLE)
        ),
    )


def _check(name: str, examine: Callable[[Sources], Outcome]) -> Check:
    return Check(name, "system", f"what the sensor of {name} says", "node", examine)


def _examine(sensor: Sensor) -> Callable[[Sources], Outcome]:
    """A sensor's first look. A shared file system that is full or fails is no fault of the node."""

    def examine(_sources: Sources) -> Outcome:
        reading = sensor.read()
        if reading.faults:
            words = "; ".join(fault.line for fault in reading.faults)
            shared = all(fault.kind in _OF_STORAGE for fault in reading.faults)
            return warned(words, "") if shared else failed(words, "")
        return passed("") if reading.ok else unavailable(reading.why)

    return examine


def _mounted(directory: Path, examine: Callable[[Sources], Outcome]) -> Callable[[Sources], Outcome]:
    """Return the same, once the directory is there: without it this node lacks a mount that the others have."""

    def found(sources: Sources) -> Outcome:
        try:
            directory.stat()
        except FileNotFoundError as error:
            return failed(f"{directory}: {error.strerror}", "")
        except OSError:
            pass
        return examine(sources)

    return found
