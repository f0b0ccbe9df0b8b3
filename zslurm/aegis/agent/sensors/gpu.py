"""The GPUs: memory errors, bad pages, GPUs that disappear or throttle.

Errors are counted by the driver since it was loaded (sysfs, else the GPUs' own tool): what grew since the attempt
began happened to it, whichever agent looks. An uncorrectable error is a root whatever the driver says of its
recovery (on MI300X a reset after one may not complete: ROCm/legacy-rocm-build#3766); a correctable one is an
advisory, reported again each time that ten times as many came. XGMI's errors are in its block XGMI_WAFL, for
`xgmi_err` is always `N/A` on MI300X (ROCm/rocm-systems#11468).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from zslurm.aegis.agent.gpu_tool import GpuTool, ToolAnswer, ToolSources, is_there, tool_exists
from zslurm.aegis.agent.sensor import Change, NodeContext, Reading, Sensor
from zslurm.aegis.fault_kinds import (
    GPU_BAD_PAGES,
    GPU_HANG_RESET,
    GPU_INIT_FAIL,
    GPU_RAS_CORRECTABLE,
    GPU_RAS_UNCORRECTABLE,
    GPU_THROTTLED,
    XGMI_ERROR,
)
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted
from zslurm.hardware import ras
from zslurm.hardware.gpu_health import GpuHealth
from zslurm.hardware.gpus import Gpu

XGMI = "XGMI_WAFL"
BAD_PAGES_LIMIT = 128
"""Bad pages after which the driver gives a GPU up (`Saved bad pages N reaches threshold value 128`)."""


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment; None is what is unknown.

    Attributes:
        uncorrectable: errors, XGMI's among them.
        blocks: uncorrectable errors by hardware block, if there are any.
        bad_pages: retired, pending and unreservable.
        throttled: what slows it down.
        gone: the PCI device does not answer any more.
    """

    uncorrectable: int | None = None
    correctable: int | None = None
    deferred: int | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    bad_pages: int | None = None
    throttled: tuple[str, ...] | None = None
    gone: bool = False

    @classmethod
    def of(cls, health: GpuHealth) -> GpuState:
        """Return the state of a GPU as the doctor reads it."""
        pages = None if health.bad_pages is None else sum(health.bad_pages.values())
        return cls(health.uncorrectable, health.correctable, health.deferred, dict(health.blocks), pages)

    def filled_from(self, other: GpuState) -> GpuState:
        """Return this one, with what it leaves open taken from another source."""
        names = ("uncorrectable", "correctable", "deferred", "bad_pages", "throttled")
        missing = {name: getattr(other, name) for name in names if getattr(self, name) is None}
        return replace(self, blocks=self.blocks or other.blocks, **missing)


@dataclass(frozen=True)
class GpuMemory:
    """What the next agent's sensor must know.

    Attributes:
        began: the GPUs when the attempt began, by index.
        seen: indices of those that were on the bus.
    """

    began: Mapping[int, GpuState]
    seen: list[int]


_MEMORY = TypeAdapter(GpuMemory)


def changes(before: GpuState, now: GpuState) -> list[Change]:
    """Return what happened to a GPU between two looks. A counter that was not known before shows nothing."""
    if now.gone:
        return [] if before.gone else [Change(GPU_INIT_FAIL, "has disappeared from the bus")]
    noticed = _uncorrectable(before, now)
    if went_back := [name for name in ("uncorrectable", "correctable") if _grown(before, now, name) < 0]:
        message = f"counts {' and '.join(went_back)} errors again: it was reset"
        noticed.append(Change(GPU_HANG_RESET, message, "advisory"))
    # New bad pages are an advisory, until the driver gives the GPU up.
    if (pages := _grown(before, now, "bad_pages")) > 0 and now.bad_pages is not None:
        given_up = now.bad_pages - pages < BAD_PAGES_LIMIT <= now.bad_pages
        message = f"has {counted(pages, 'new bad page')}, {now.bad_pages} in all"
        noticed.append(Change(GPU_BAD_PAGES, message, "root" if given_up else "advisory"))
    if now.throttled and not before.throttled:
        noticed.append(Change(GPU_THROTTLED, f"is slowed down: {', '.join(now.throttled)}"))
    elif before.throttled and now.throttled == ():
        noticed.append(Change(GPU_THROTTLED, "is no longer slowed down", cleared=True))
    return noticed


def _grown(before: GpuState, now: GpuState, name: str) -> int:
    """Return by how much a count grew; 0 if one of both is not known."""
    was, has = getattr(before, name), getattr(now, name)
    return 0 if was is None or has is None else int(has - was)


def _uncorrectable(before: GpuState, now: GpuState) -> list[Change]:
    """Return new uncorrectable errors, XGMI's separately."""
    new = _grown(before, now, "uncorrectable")
    if new <= 0:
        return []
    by_block = {
        name: grown for name, count in now.blocks.items() if (grown := count - before.blocks.get(name, 0)) > 0
    }
    of_xgmi = min(new, by_block.pop(XGMI, 0))
    noticed = []
    if of_xgmi:
        noticed.append(Change(XGMI_ERROR, f"counts {counted(of_xgmi, 'new uncorrectable error')} ({XGMI})"))
    if new > of_xgmi:
        where = f" ({', '.join(sorted(by_block))})" if by_block else ""
        message = f"counts {counted(new - of_xgmi, 'new uncorrectable error')}{where}"
        noticed.append(Change(GPU_RAS_UNCORRECTABLE, message))
    return noticed


def worth_reporting(reported: int, count: int) -> bool:
    """Return whether `count` errors deserve another report after one of `reported`: at 1, 10, 100, ..."""
    return count >= max(1, 10 * reported)


class Gpus(Sensor):
    """Watches every GPU of the node."""

    def __init__(self, context: NodeContext, sources: ToolSources, tool: GpuTool | None) -> None:
        super().__init__(context)
        self._sources, self._tool = sources, tool
        self._gpus = {gpu.index: gpu for gpu in sources.facts.gpus}
        self._seen: set[int] = set()
        self._last: dict[int, GpuState] = {}
        self._began: dict[int, GpuState] = {}
        self._by_tool: dict[int, GpuState] = {}
        self._corrected: dict[tuple[int, str], int] = {}
        self._reported: dict[tuple[int, str], int] = {}
        self._why = "there is no tool for them"
        self._waits = tool is not None

    def begin_attempt(self) -> None:
        """Take the GPUs as they were seen last."""
        self._began = dict(self._last)

    def memory(self) -> Any:
        """Return each GPU as it was when the attempt began, and which of them were on the bus."""
        return _MEMORY.dump_python(GpuMemory(self._began, sorted(self._seen)), mode="json")

    def recall(self, memory: Any) -> None:
        """See Sensor."""
        remembered = _MEMORY.validate_python(memory)
        self._began, self._seen = dict(remembered.began), set(remembered.seen) & set(self._gpus)
        # What slows a GPU down is a state that another agent has reported to the supervisor, if any has.
        self._last = {index: replace(state, throttled=None) for index, state in self._began.items()}

    def read(self) -> Reading:
        """Return faults for what grew since the last look; not ok if no GPU shows its errors."""
        states = self._by_sysfs()
        self._ask_tool(needed=not states or any(state.uncorrectable is None for state in states.values()))
        for index, state in self._by_tool.items():
            states[index] = states[index].filled_from(state) if index in states else state
        faults: list[Fault] = []
        for index, now in states.items():
            # Steps over looks at which a count was not known: what grew meanwhile is reported then.
            before = self._last.get(index)
            faults += [] if before is None else self._faults(index, before, now)
            self._last[index] = now if before is None or now.gone else now.filled_from(before)
            # A count that was not known when the attempt began counts from where it is known first.
            self._began[index] = self._began[index].filled_from(now) if index in self._began else now
        counted = [state for state in states.values() if state.uncorrectable is not None]
        values: dict[str, Any] = {
            "gpus": len(states),
            "unknown": [index for index, state in states.items() if state.uncorrectable is None],
            "uncorrectable": sum(state.uncorrectable or 0 for state in counted),
            "correctable": sum(state.correctable or 0 for state in counted),
        }
        if not counted:
            why = "the GPUs' tool has not answered yet" if self._waits else self._why
            return Reading(False, f"no GPU shows its errors: {why}", tuple(faults), pending=self._waits)
        return Reading(faults=tuple(faults), values=values)

    def _by_sysfs(self) -> dict[int, GpuState]:
        root = self.context.root / "sys/bus/pci/devices"
        states = {
            health.index: GpuState.of(health) for health in ras.read(self._sources.root, self._sources.facts.gpus)
        }
        states |= {index: states.get(index, GpuState()) for index in self._gpus}
        present = {index for index, gpu in self._gpus.items() if gpu.pci and is_there(root / gpu.pci)}
        self._seen |= present  # a container may show the GPUs, and not the PCI bus
        gone = self._seen - present
        return {index: replace(state, gone=index in gone) for index, state in states.items()}

    def _ask_tool(self, *, needed: bool) -> None:
        """Take the tool's last answer. After one that failed, the one before shows nothing of the present."""
        news = None if self._tool is None else self._tool.news(needed=needed)
        if news is None:
            return
        self._waits = False
        self._why = news.why or self._why
        self._by_tool = _states_of(news, self._gpus)

    def _faults(self, index: int, before: GpuState, now: GpuState) -> list[Fault]:
        noticed = changes(before, now)
        for name in ("correctable", "deferred"):
            if (new := _grown(before, now, name)) > 0:
                count = self._corrected[index, name] = self._corrected.get((index, name), 0) + new
                if worth_reporting(self._reported.get((index, name), 0), count):
                    self._reported[index, name] = count
                    message = f"counts {counted(count, f'{name} error')} since the attempt began"
                    noticed.append(Change(GPU_RAS_CORRECTABLE, message))
        return [self._fault(index, change) for change in noticed]

    def _fault(self, index: int, change: Change) -> Fault:
        pci = self._gpus[index].pci if index in self._gpus else None
        device = f"GPU {index} ({pci})" if pci else f"GPU {index}"
        return change.fault(self.context, "gpu", device, gpu=pci or str(index))


def _states_of(answer: ToolAnswer, gpus: Mapping[int, Gpu]) -> dict[int, GpuState]:
    """Return the tool's states by the index that sysfs gives each GPU, if their PCI addresses are known."""
    by_pci = {gpu.pci: index for index, gpu in gpus.items() if gpu.pci}
    by_index = {}
    for health in answer.health:
        index = by_pci.get((health.pci or "").lower(), health.index)
        by_index[index] = replace(GpuState.of(health), throttled=answer.throttled.get(health.index))
    return by_index


def make(context: NodeContext) -> Gpus | None:
    """Return the sensor of the node's GPUs; None if none are there or expected, and no tool knows of any."""
    sources = ToolSources.of(context)
    gpus = sources.facts.gpus
    has_tool = tool_exists(context, sources)
    if not gpus and not has_tool and not context.cluster.gpus_per_node:
        return None
    nvidia = any(gpu.kind == "nvidia" for gpu in gpus) or (
        not gpus and sources.find("amd-smi") is None and sources.find("nvidia-smi") is not None
    )
    uses_tool = nvidia or context.settings.amd_smi != "off"
    return Gpus(context, sources, GpuTool(context, sources, nvidia=nvidia) if uses_tool else None)
