"""Events before the ranks start: what was checked and staged."""

from __future__ import annotations

from typing import Any

from zslurm.run.events.event import Event


class RailsUnknown(Event, name="rails_unknown"):
    """Rails of some nodes could not be checked."""

    TEXT = "rails could not be checked{event.on_nodes}{event.because}"


class RailsDiffer(Event, name="rails_differ"):
    """Rails of some nodes differ from the others' rails."""

    TEXT = "rails differ from those of other nodes{event.on_nodes}{event.because}"


class RailsDoubtful(Event, name="rails_doubtful"):
    """Rails of some nodes may be wrong."""

    TEXT = "rails look doubtful{event.on_nodes}{event.because}"


class RailsIncomplete(Event, name="rails_incomplete"):
    """Some nodes lack rails."""

    policy: str | None = None
    action: str | None = None

    def _sentence(self) -> str:
        done = {"start": "the ranks start all the same", "refuse": "the run stops", "exclude": "excluding"}
        action = done.get(str(self.action), str(self.action))
        return f"rails are incomplete{self.on_nodes}{self.because} ({action})"


class ContainerChecked(Event, name="container_checked"):
    """The container runs on the nodes."""

    rdma_abi: dict[str, Any] | None = None

    def _sentence(self) -> str:
        abi = "; ".join(f"RDMA {what} (on {nodes})" for what, nodes in (self.rdma_abi or {}).items())
        return f"the container works{self.on_nodes}{': ' + abi if abi else ''}"


class EnvironmentStaged(Event, name="environment_staged"):
    """The Python environment was copied to the nodes."""

    TEXT = "the Python environment is in {event.path} on each node"
    path: str


class KernelsPrepared(Event, name="kernels_prepared"):
    """Kernels were put on each node, built once for each kind; `problems`: why ranks build some themselves."""

    path: str
    built: list[str] | None = None
    problems: dict[str, Any] | None = None

    def _sentence(self) -> str:
        built = f", built for {', '.join(self.built)}" if self.built else ""
        reasons = "; ".join(f"{why} (on {nodes})" for why, nodes in (self.problems or {}).items())
        return f"kernels are in {self.path} on each node{built}{reasons and f'; ranks build others: {reasons}'}"


class SpareChecked(Event, name="spare_checked"):
    """A spare node was checked before it is used."""

    node: str
    ok: bool

    def _sentence(self) -> str:
        return f"spare node {self.node} {'is in order' if self.ok else 'is not usable'}{self.because}"


class GpuTested(Event, name="gpu_tested"):
    """A GPU from which NaN came again and again was tested."""

    node: str
    ok: bool | None
    gpu: str | None = None
    device: str | None = ""

    def _sentence(self) -> str:
        results = {True: "computes correctly", False: "computes wrongly", None: "could not be tested"}
        result = results[self.ok]
        if self.device == "CPU":
            return f"the CPU of {self.node}, on which the run computes, {result}{self.because}"
        if self.ok is False and self.device is None:  # nothing ran
            result = "fails its test"
        what = self.device or f"GPU {self.gpu}"
        return f"{what} of {self.node} {result}{self.because}"


class ConfigRestored(Event, name="config_restored"):
    """The program overwrote config.json of its run; the supervisor wrote it again."""

    TEXT = "wrote config.json again, which the program had changed: it may write to {event.output}"
    output: str


class LockTakenOver(Event, name="lock_taken_over"):
    """A dead job held the lock on the checkpoints."""

    TEXT = "took the checkpoints' lock over from {event.holder}, which is gone"
    holder: str
