"""How long the demo trains: as many tokens as this machine can train in the time that a demo may take.

Measured first are the rate of forward and backward, on all ranks at once, and what starting Python and torch
costs; from them follows how many tokens there is time for. Fewer tokens are trained in smaller steps: the loss
falls with the number of steps, and the demo shows the same on any machine, to another depth.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zslurm.core.errors import ZslurmError

TIME_S = 120.0
"""What the whole demo should take at most: two thirds of the three minutes that it may, for rates vary."""
MOST_TOKENS, FEWEST_TOKENS = 1_000_000, 100_000
LARGE_BATCH, SMALL_BATCH = 16, 8  # sequences in a step
LARGE_FROM = 500_000
"""Tokens that are enough for 122 steps of the large batch. The fewest make 48 steps of the small one."""
_ROUND = 50_000
_STEP_SHARE = 0.75
"""Of a step's time, what forward and backward take; the rest is the optimizer, the ranks' sums and the data."""
_STARTS = 4.0
"""What the demo spends on starting and ending two runs, in starts of one process with torch and a model."""


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        tokens_per_s: of all ranks together, of whole steps.
        start_s: seconds from starting Python to a model that is ready.
    """

    tokens_per_s: float
    start_s: float


def measure(config: Path, ranks: int) -> Machine:
    """Measure this machine with a run's configuration (a resolved config.json), by `train.plan.tokens_per_second`.

    Raises:
        ZslurmError: a measuring process failed.
    """
    started = time.monotonic()
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-P", "-m", "zslurm.train.plan.tokens_per_second", str(config)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(ranks)
    ]
    outputs = [process.communicate() for process in processes]
    took_s = time.monotonic() - started
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise ZslurmError(f"this machine's speed could not be measured: {_reason(process.returncode, errors)}")
    found = [json.loads(output) for output, _ in outputs]
    rate = sum(each["tokens_per_s"] for each in found)
    return Machine(rate * _STEP_SHARE, max(0.0, took_s - max(each["seconds"] for each in found)))


def _reason(code: int, errors: str) -> str:
    """Return the last line of a traceback without the name of its exception, or the exit code if there is none."""
    lines = errors.strip().splitlines()
    return re.sub(r"^[\w.]+: ", "", lines[-1]) if lines else f"it ended with exit code {code}"


def affordable_tokens(machine: Machine, spent_s: float) -> int:
    """Return how many tokens to train on, so that the demo takes about `TIME_S`, of which `spent_s` are over."""
    left_s = TIME_S - spent_s - _STARTS * machine.start_s
    tokens = int(machine.tokens_per_s * left_s) // _ROUND * _ROUND
    return min(MOST_TOKENS, max(FEWEST_TOKENS, tokens))


def batch_for(tokens: int) -> int:
    """Return the sequences of a step for so many tokens."""
    return LARGE_BATCH if tokens >= LARGE_FROM else SMALL_BATCH
