"""What a check may look at on its machine: facts, files below the movable root, commands, and its task.

Everything that several checks want is read once. Checks run in threads, so a driver that hangs holds up only those
that ask it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from zslurm.config.spec import ClusterSection
from zslurm.hardware import amd_smi, nvidia_smi, ras
from zslurm.hardware.command import CommandResult, run
from zslurm.hardware.facts import NodeFacts, read_facts
from zslurm.hardware.gpu_health import GpuReadings
from zslurm.hardware.sysfs import sysroot
from zslurm.slurm.environment import node_name

T = TypeVar("T")

_ROCM_BIN = "opt/rocm/bin"
"""Where amd-smi is on nodes whose login shell did not load a ROCm module."""


@dataclass(frozen=True)
class Stored:
    """What the storage holds that nodes read, as the login node saw it.

    Attributes:
        bundle_bytes: of the token bundles in the further directories; 0 if there are none.
        checkpoint_bytes: of the newest checkpoint of all runs in the runs directory; 0 if there is none.
        checkpoint: which that is, as RUN/step-NNNNNNNN.
    """

    bundle_bytes: int = 0
    checkpoint_bytes: int = 0
    checkpoint: str = ""


@dataclass(frozen=True)
class NodeTask:
    """What a machine is to look at.

    Attributes:
        cluster: the profile, without what may be secret (env, setup).
        checks: names of the checks to run.
        directory: where the runs are; shared by all nodes.
        probe: folder in it that the login node made for these checks; empty if it could not.
        token: what the login node wrote there.
        paths: further directories whose mounts are looked at (data).
        peers: nodes whose names must resolve.
        jobs: the user's jobs that are not over; None if that is not known.
        sent: when the login node handed the task out, by its clock.
        ranks_per_node: as the profile's section slurm has it; None is one for each GPU.
        stored: what is compared with the nodes' memory.
    """

    cluster: ClusterSection = field(default_factory=ClusterSection)
    checks: tuple[str, ...] = ()
    directory: str = "."
    probe: str = ""
    token: str = ""
    paths: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    jobs: tuple[str, ...] | None = None
    sent: float = 0.0
    ranks_per_node: int | None = None
    stored: Stored = field(default_factory=Stored)

    def to_json(self) -> dict[str, Any]:
        """Return plain values without anything secret."""
        unset = {name: None for name, value in self.cluster.env.items() if value is None}  # no secret is in these
        public = self.cluster.model_copy(update={"env": unset, "setup": ()})
        return {**self.__dict__, "cluster": public.model_dump(mode="json"), "stored": asdict(self.stored)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeTask:
        """Return the task that `to_json` gave."""
        return TypeAdapter(cls).validate_python(value)


class Once(Generic[T]):
    """A value that is made when it is first asked for, by one thread; the others wait for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: list[T] = []

    def __call__(self) -> T:
        """Return the value; make it first if that has not been done."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


@dataclass
class Sources:
    """One machine, as checks see it.

    Attributes:
        task: what it is to look at.
        root: the directory of /sys, /proc, /dev, /etc and /opt.
        environ: of this process.
        cluster: the profile.
        limits: what is good enough, by the profile.
        node: this machine's name in Slurm, or the host's.
    """

    task: NodeTask = field(default_factory=NodeTask)
    root: Path = field(default_factory=sysroot)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __post_init__(self) -> None:
        self.cluster, self.limits = self.task.cluster, self.task.cluster.doctor
        self.node = node_name(self.environ)
        self._facts = Once(lambda: read_facts(self.root))
        self._gpus = Once(self._read_gpus)

    @property
    def has_gpus(self) -> bool:
        """Whether this machine has GPUs, or should have by the profile."""
        return bool(self.cluster.gpus_per_node or self.facts.gpus)

    @property
    def facts(self) -> NodeFacts:
        """What sysfs has."""
        return self._facts()

    @property
    def gpus(self) -> GpuReadings:
        """The health of the GPUs, by their maker's tool and sysfs."""
        return self._gpus()

    def path(self, place: str) -> Path:
        """Return a place such as `/dev/shm`, below the root."""
        return self.root / place.lstrip("/")

    def find(self, program: str) -> str | None:
        """Return the path of a program, or None."""
        places = self.environ.get("PATH", os.defpath)
        return shutil.which(program, path=f"{places}{os.pathsep}{self.root / _ROCM_BIN}")

    def run(self, program: str, *arguments: str, timeout_s: float) -> CommandResult | None:
        """Run a program; None if there is none.

        Raises:
            CommandHung: it did not end in its time.
        """
        path = self.find(program)
        return None if path is None else run([path, *arguments], self.environ, timeout_s)

    def _read_gpus(self) -> GpuReadings:
        """Ask the tool of the GPUs' maker; a field that it leaves open (`N/A`), and only that, is sysfs's."""
        gpus, canary_s = self.facts.gpus, self.limits.canary_s
        nvidia = any(gpu.kind == "nvidia" for gpu in gpus)
        if nvidia or (not gpus and self.find("nvidia-smi") and not self.find("amd-smi")):
            return nvidia_smi.read(self.run, canary_s)
        readings = amd_smi.read(self.run, canary_s)
        fallback = ras.read(self.root, gpus)
        if not readings.health:
            return replace(readings, health=tuple(fallback), source="sysfs" if fallback else readings.source)
        by_pci = {gpu.pci: gpu for gpu in fallback}
        health = (gpu.filled_from(by_pci[gpu.pci]) if gpu.pci in by_pci else gpu for gpu in readings.health)
        return replace(readings, health=tuple(health))
