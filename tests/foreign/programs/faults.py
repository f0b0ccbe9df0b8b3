"""What a test asks a foreign program to do to itself, in the first attempt only: FAULT=WHAT:STEP:RANK."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_FIRST = {"ZSLURM_ATTEMPT": "1", "TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "0"}
"""What counts starts, and its value at the first."""


def after_step(step: int) -> None:
    """Be killed, hang, use too much memory or fail, if the test asks for it."""
    time.sleep(float(os.environ.get("PACE_S", "0")))
    _note("step", step)
    what, _, rest = os.environ.get("FAULT", "").partition(":")
    if (
        not rest
        or os.environ.get("ZSLURM_ATTEMPT", "1") != "1"
        or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        or os.environ.get("ZSLURM_GENERATION", "0") != "0"
    ):
        return
    if rest != f"{step}:{os.environ['RANK']}":
        return
    print(f"fault: {what}", flush=True)
    _note("fault", step)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(100_000)
    if what == "oom":
        import torch

        torch.empty(1 << 50)
    if what == "raise":
        raise ValueError("a matrix has the wrong shape")


def _note(what: str, step: int) -> None:
    """Write down when it was, for a benchmark (TIMES, a file)."""
    if "TIMES" in os.environ:
        with Path(os.environ["TIMES"]).open("a") as file:
            file.write(f"{what} {step} {os.environ['RANK']} {os.getpid()} {time.time()}\n")
