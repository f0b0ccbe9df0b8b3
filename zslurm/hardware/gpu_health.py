"""The health of a node's GPUs: errors, bad pages, memory in use, processes. None is what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zslurm.hardware.command import CommandHung, CommandResult

Run = Callable[..., CommandResult | None]
"""As `Sources.run`: a program and its arguments, and `timeout_s`; None if there is no such program."""

USED_BYTES = 2 << 30
"""Memory of an idle GPU that is too much to be in use."""
_REAL_QUESTIONS = 3
"""The questions may take this many times as long as the canary."""


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
        blocks: uncorrectable errors by hardware block, if there are any.
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
        """Return this one, with what it leaves open taken from another reading of the same GPU."""
        names = ("pci", "uncorrectable", "correctable", "deferred", "bad_pages", "vram_used", "processes")
        missing = {name: getattr(other, name) for name in names if getattr(self, name) is None}
        return replace(self, blocks={**other.blocks, **self.blocks}, **missing)


@dataclass(frozen=True)
class GpuReadings:
    """All GPUs of a node.

    Attributes:
        source: its origin, for people.
        hung: the question that the tool did not answer in time: the driver is wedged.
        why: why the tool gave no answer, if it did not.
    """

    health: tuple[GpuHealth, ...] = ()
    source: str = ""
    hung: str | None = None
    why: str = ""


def ask_tool(
    run: Run,
    tool: str,
    canary: Sequence[str],
    questions: Iterable[Sequence[str]],
    parse: Callable[[Sequence[CommandResult]], tuple[GpuHealth, ...]],
    *,
    canary_s: float,
) -> GpuReadings:
    """Ask a GPU tool one question at a time, and none more once it has not answered in time.

    Args:
        run: runs the tool.
        tool: the program.
        canary: arguments of a question that costs nothing: if the driver is wedged, it is the one that hangs.
        questions: arguments of each question.
        parse: reads the answers to all of them.
        canary_s: time limit of the canary.
    """
    try:
        first = run(tool, *canary, timeout_s=canary_s)
        if first is None:
            return GpuReadings(why=f"{tool} is neither on PATH nor in /opt/rocm/bin")
        answers = [run(tool, *asked, timeout_s=_REAL_QUESTIONS * canary_s) or first for asked in questions]
    except CommandHung as error:
        return GpuReadings(hung=str(error), why=str(error))
    if health := parse(answers):
        return GpuReadings(health, source=tool)
    message = answers[0].message or first.err.strip().rpartition("\n")[2]
    return GpuReadings(why=f"{tool} names no GPU: {message}" if message else f"{tool} printed nothing")
