"""Trace some steps of rank 0, for chrome://tracing or https://ui.perfetto.dev.

torch.profiler records every operation and every GPU kernel of the steps FIRST to LAST (metrics.profile) and one
step before, whose record is thrown away: starting the profiler is slow. Other ranks are not profiled, and other
steps cost nothing. The trace is compressed, without stacks and shapes; at most `LONGEST_PROFILE`
steps bound it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.train.schedule import Position
from zslurm.train.telemetry.observer import ObservedRun, Observer, StepResult
from zslurm.train.telemetry.timing import StepPart

_LOG = logging.getLogger(__name__)


class Profiler(Observer):
    """Profiles its window inside of its `with` block."""

    def __init__(self, window: tuple[int, int], *, done: int, directory: Path, device: torch.device) -> None:
        """Prepare to trace the first to the last step of `window`, counted from 1, into `directory`.

        Of the window, the steps that are `done` already are left out.
        """
        self._done, self._directory = done, directory
        self._profile: profile | None = None
        self._unwanted = False
        first, last = max(window[0], done + 1), window[1]
        if last < first:
            _LOG.info("metrics.profile: steps %d to %d are done already; nothing is profiled", *window)
            return
        self._first, self._last = first, last
        ahead = first - 1 - done
        with warnings.catch_warnings():
            # Before the run's first step there is none to warm up with.
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")
            plan = schedule(
                skip_first=max(0, ahead - 1), wait=0, warmup=min(1, ahead), active=last - first + 1, repeat=1
            )
        on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *on_gpu], schedule=plan, on_trace_ready=self._write, acc_events=True
        )

    @classmethod
    def create(cls, run: ObservedRun) -> Profiler | None:
        """Return the observer of rank 0, if steps are to be profiled."""
        window = run.config.metrics.profile_steps
        if not run.world.is_first or window is None:
            return None
        return cls(window, done=run.done, directory=run.run_dir / "profile", device=run.world.device)

    def __enter__(self) -> Self:
        """Start the profiler, which skips the steps before its window."""
        if self._profile is not None:
            self._profile.start()
        return self

    def step_done(self, step: int, here: Position, result: StepResult, split: Mapping[StepPart, float]) -> None:
        """Count the step; see `after_step`."""
        self.after_step()

    def after_step(self) -> None:
        """Count one more step."""
        self._done += 1
        if self._profile is not None:
            self._profile.step()
            if self._done >= self._last:
                self._stop()

    def __exit__(self, *failure: Any) -> None:
        """Stop: a run that is asked to stop leaves what it has; one that fails does not wait for a trace.

        Either way the profiler is stopped: torch 2.13 crashes at the end of a process in which one still runs.
        """
        self._unwanted = failure[0] is not None
        self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, recorded: Any) -> None:
        if self._unwanted or self._done < self._first:
            return  # the run failed, or ended just before the window
        path = self._directory / f"steps-{self._first}-{self._done}.json.gz"
        self._directory.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(path))
        size = show_bytes(path.stat().st_size)
        _LOG.info(
            "profiled steps %d to %d of rank 0: %s (%s); open it at https://ui.perfetto.dev",
            self._first, self._done, path, size,
        )  # fmt: skip
