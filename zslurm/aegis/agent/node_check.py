"""Is this node fit to take part? A spare is checked before it replaces a node.

The doctor's own checks look at GPUs and NICs, two sensors at memory and at the checkpoint directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zslurm.aegis.agent.gpu_tool import ToolSources
from zslurm.aegis.agent.sensor import NodeContext, Sensor
from zslurm.aegis.agent.sensors.disk import Disk
from zslurm.aegis.agent.sensors.host import Host
from zslurm.aegis.fault_kinds import DISK_LOW, STORAGE_FAULT, ZOMBIES
from zslurm.doctor.check import Check, CheckOutcome, Status, failed, passed, unavailable, warned
from zslurm.doctor.node import node_checks, run_checks
from zslurm.hardware.node_sources import NodeTask, Sources

_NO_REASON = frozenset({DISK_LOW, STORAGE_FAULT, ZOMBIES})
"""Faults for which no node is refused: all nodes share a file system, and zombies hold nothing."""
DOCTOR_CHECKS = ("gpu-count", "gpu-idle", "gpu-ecc", "gpu-pages", "nics", "rails", "disk")


@dataclass(frozen=True)
class Health:
    """What was found.

    Attributes:
        problems: why the node must not be used; empty if it may.
        notes: what is less than good, or could not be found out.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_node(context: NodeContext) -> Health:
    """Examine this node. Each check has the doctor's limit of time, cluster.doctor.check_s."""
    sources = ToolSources.of(context, task=NodeTask(cluster=context.cluster, directory=str(context.run.path)))
    own_checks = [_check("memory", Host(context)), _check("checkpoints", Disk(context), context.run.checkpoints)]
    outcomes = run_checks([*node_checks(DOCTOR_CHECKS), *own_checks], sources)

    def reasons(*statuses: Status) -> tuple[str, ...]:
        reported = [(name, outcome) for name, outcome in outcomes.items() if outcome is not None]
        return tuple(f"{name}: {outcome.reason}" for name, outcome in reported if outcome.status in statuses)

    return Health(problems=reasons(Status.FAIL), notes=reasons(Status.WARN, Status.UNAVAILABLE))


def gpus_idle(context: NodeContext) -> str:
    """Return why GPU memory of this node is not free: a process of a former job holds it; empty if it is."""
    sources = ToolSources.of(context, task=NodeTask(cluster=context.cluster, directory=str(context.run.path)))
    outcome = run_checks(node_checks(("gpu-idle",)), sources).get("gpu-idle")
    return outcome.reason if outcome is not None and outcome.status is Status.FAIL else ""


def _check(name: str, sensor: Sensor, mounted: Path | None = None) -> Check:
    """Return the first look of a sensor as a check.

    Args:
        name: of the check.
        sensor: what looks.
        mounted: a directory without which this node lacks a mount that the others have.
    """

    def examine(_sources: Sources) -> CheckOutcome:
        try:
            if mounted is not None:
                mounted.stat()
        except FileNotFoundError as error:
            return failed(f"{mounted}: {error.strerror}", "")
        except OSError:
            pass
        reading = sensor.read()
        if reading.faults:
            reason = "; ".join(fault.line for fault in reading.faults)
            usable = all(fault.kind in _NO_REASON for fault in reading.faults)
            return warned(reason, "") if usable else failed(reason, "")
        return passed("") if reading.ok else unavailable(reading.why)

    return Check(name, "system", f"what the sensor of {name} reads", "node", examine)
