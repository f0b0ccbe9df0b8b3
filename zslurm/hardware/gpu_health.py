"""The health of a node's GPUs: errors, bad pages, memory in use, processes. None is what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds a GPU; None is what its reader may not see."""

    pid: int
    name: str | None = None
    vram: int | None = None


@dataclass(frozen=True)
class GpuHealth:
    """One GPU.

    Attributes:
        index: as the tool counts.
        uncorrectable: errors since the driver was loaded; so correctable and deferred.
        blocks: uncorrectable errors by hardware block, where there are any.
        bad_pages: by kind: retired, pending, unreservable.
        vram_used: in bytes.
    """

    index: int
    pci: str | None = None
    uncorrectable: int | None = None
    correctable: int | None = None
    deferred: int | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    bad_pages: Mapping[str, int] | None = None
    vram_used: int | None = None
    processes: tuple[GpuProcess, ...] | None = None

    def filled_from(self, other: GpuHealth) -> GpuHealth:
        """This one, with what it leaves open taken from another reading of the same GPU."""
        names = ("pci", "uncorrectable", "correctable", "deferred", "bad_pages", "vram_used", "processes")
        missing = {name: getattr(other, name) for name in names if getattr(self, name) is None}
        return replace(self, blocks={**other.blocks, **self.blocks}, **missing)


@dataclass(frozen=True)
class Gpus:
    """All GPUs of a node.

    Attributes:
        source: where it comes from, for people.
        hung: what the tool was asked when it fell silent: a wedged driver.
        why: why the tool gave no answer, where it did not.
    """

    health: tuple[GpuHealth, ...] = ()
    source: str = ""
    hung: str | None = None
    why: str = ""
