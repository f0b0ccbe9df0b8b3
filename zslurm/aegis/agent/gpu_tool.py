"""Asks the GPUs' own tool (amd-smi, nvidia-smi) for what sysfs does not show, while the other sensors continue.

The tool takes a second of CPU time, or forever if the driver is wedged. So it is asked in a separate thread,
rests ten times as long as it worked (a hundred times if sysfs already counts errors), and is asked again only
now and then once it failed.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zslurm.aegis.agent.sensor import NodeContext
from zslurm.hardware import amd_smi, nvidia_smi
from zslurm.hardware.command import CommandHung, CommandResult
from zslurm.hardware.gpu_health import GpuHealth
from zslurm.hardware.node_sources import Sources

# `--throttle` is of ROCm 6.3 and later; the older `--power` has a field throttle_status.
_METRICS = (("--ecc", "--ecc-blocks", "--throttle"), ("--ecc", "--ecc-blocks", "--power"))
_VIOLATIONS = {
    "prochot_violation_status": "processor too hot",
    "socket_thermal_violation_status": "socket too hot",
    "vr_thermal_violation_status": "voltage regulator too hot",
    "hbm_thermal_violation_status": "memory too hot",
}
"""Of `amd-smi metric --throttle`: what is reported. At its power limit (`ppt`) a GPU under load always is."""

_REST, _LONG_REST = 10.0, 100.0
_AFTER_FAILURE, _LONGEST = 60.0, 720.0
"""Periods of the sensor until it is asked again after a first failure, and at most after more of them."""


class ToolSources(Sources):
    """A machine as the doctor sees it, with amd-smi if the settings have it."""

    amd_smi: str = "auto"

    @classmethod
    def of(cls, context: NodeContext, **task: Any) -> ToolSources:
        """Return what shows this node; `task` are the arguments of `Sources`."""
        sources = cls(root=context.root, environ=context.environ, **task)
        sources.amd_smi = context.settings.amd_smi.replace("%n", context.node)
        return sources

    def find(self, program: str) -> str | None:
        """Return the path of a program, or None."""
        if program != "amd-smi" or self.amd_smi == "auto":
            return super().find(program)
        return None if self.amd_smi == "off" else shutil.which(self.amd_smi)


@dataclass(frozen=True)
class ToolAnswer:
    """What the tool printed.

    Attributes:
        health: of the GPUs; None if it gave none.
        why: why it did not.
        throttled: by index of the GPU, what slows it down; without those if that is unknown.
    """

    health: tuple[GpuHealth, ...] = ()
    why: str = ""
    throttled: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def ask_amd_smi(sources: Sources, timeout_s: float) -> ToolAnswer:
    """Ask amd-smi once. It never raises, and never takes longer than five times the limit of each question."""
    answers: list[CommandResult | None] = []

    def ask(*question: str) -> str:
        answers.append(sources.run("amd-smi", *question, "--json", timeout_s=timeout_s))
        return answers[-1].out if answers[-1] else ""

    try:
        metric = next((text for more in _METRICS if amd_smi.gpu_rows(text := ask("metric", *more))), "")
        if not metric:
            return ToolAnswer(why=_why_nothing(answers[-1]))
        health = amd_smi.parse(metric, ask("bad-pages"), "", ask("list"))
        return ToolAnswer(health, throttled=parse_throttling(metric))
    except CommandHung as error:
        return ToolAnswer(why=str(error))
    except OSError as error:
        return ToolAnswer(why=f"amd-smi cannot be run: {error.strerror}")


def _why_nothing(output: CommandResult | None) -> str:
    if output is None:
        return "amd-smi is not there"
    lines = (output.err or output.out).strip().splitlines()
    return f"amd-smi names no GPU: {lines[-1].strip()[:120]}" if lines else "amd-smi prints nothing"


def parse_throttling(metric: str) -> dict[int, tuple[str, ...]]:
    """Return what slows each GPU down, by `amd-smi metric`; without GPUs if that is unknown."""
    by_gpu = {}
    for row in amd_smi.gpu_rows(metric):
        throttle, power = row.get("throttle"), row.get("power")
        states = {name: throttle.get(name) for name in _VIOLATIONS} if isinstance(throttle, dict) else {}
        old = power.get("throttle_status") if isinstance(power, dict) else None
        if any(state in ("ACTIVE", "NOT ACTIVE") for state in states.values()):
            by_gpu[row["gpu"]] = tuple(_VIOLATIONS[name] for name, state in states.items() if state == "ACTIVE")
        elif old in ("THROTTLED", "UNTHROTTLED"):
            by_gpu[row["gpu"]] = ("throttled",) if old == "THROTTLED" else ()
    return by_gpu


class GpuTool:
    """Keeps one question to the tool under way at most, and hands out the last answer."""

    def __init__(self, context: NodeContext, sources: Sources, *, nvidia: bool) -> None:
        self._context, self._sources, self._nvidia = context, sources, nvidia
        self._thread: threading.Thread | None = None
        self._news: ToolAnswer | None = None
        self._ask_at = 0.0
        self._failures = 0

    def news(self, *, needed: bool) -> ToolAnswer | None:
        """Return the answer that came since the last call, if any. Asks again if it is time to; never waits.

        Args:
            needed: nothing else counts the GPUs' errors.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread = None
        news, self._news = self._news, None
        if time.monotonic() >= self._ask_at:
            self._thread = threading.Thread(target=self._ask, args=(needed,), name="gpu-tool", daemon=True)
            self._thread.start()
        return news

    def _ask(self, needed: bool) -> None:
        began = time.monotonic()
        if self._nvidia:
            readings = nvidia_smi.read(self._sources.run, self._sources.limits.canary_s)
            answer = ToolAnswer(readings.health, readings.why)
        else:
            answer = ask_amd_smi(self._sources, self._context.settings.amd_smi_timeout_s)
        took, period = time.monotonic() - began, self._context.settings.period_s
        self._failures = 0 if answer.health else self._failures + 1
        pause_s = max(period, (_REST if needed else _LONG_REST) * took)
        if self._failures:
            pause_s = max(pause_s, period * min(_LONGEST, _AFTER_FAILURE * 2 ** (self._failures - 1)))
        self._ask_at = time.monotonic() + pause_s
        self._news = answer


def tool_exists(context: NodeContext, sources: Sources) -> bool:
    """Return whether there is a tool to ask, or the settings insist on one."""
    named = context.settings.amd_smi not in ("auto", "off")
    return named or sources.find("amd-smi") is not None or sources.find("nvidia-smi") is not None


def is_there(device: Path) -> bool:
    """Return whether a PCI device still answers: one that fell off the bus is gone, or reads as all ones."""
    try:
        return (device / "vendor").read_text().strip() not in ("0xffff", "")
    except OSError:
        return False
