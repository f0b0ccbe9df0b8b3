"""A program that trains nothing and needs no torch: it counts steps, saves, and does to itself what a test asks.

toy_program.py STEPS [WHAT STEP RANK], in a directory of its own; WHAT happens only before anything was saved.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from zslurm import progress

saved = [int(path.stem) for path in Path("saved").glob("*.txt")]
rank, world_size, first = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), max(saved, default=0) + 1
steps, *fault = sys.argv[1:]
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])


def save(step: int) -> None:
    if rank == 0:
        Path("saved").mkdir(exist_ok=True)
        Path(f"saved/{step:04d}.txt").write_text("x")


def meet(step: int) -> None:
    """Wait until every rank of this attempt is here, as a collective does."""
    places = [Path(f"at-{os.environ['ZSLURM_ATTEMPT']}-{other}") for other in range(world_size)]
    places[rank].write_text(f"{step:9}")
    while any(not place.exists() or int(place.read_text() or -1) < step for place in places):
        time.sleep(0.005)


def stop(*_: object) -> None:
    save(step)
    sys.exit(0)


step = first
signal.signal(signal.SIGTERM, signal.SIG_IGN if "--deaf" in fault else stop)
sys.stdout.buffer.write(b"\xff\xfe no text \x00\n")
for step in range(first, int(steps) + 1):
    time.sleep(float(os.environ.get("PACE_S", "0.02")))
    meet(step)
    progress.step(step, loss=1 / step)
    print(f"step={step} loss={1 / step:.4f}", flush=True)
    if fault[1:3] == [str(step), str(rank)] and not saved:
        print("now", flush=True)
        if fault[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault[0] == "raise":
            raise ValueError("a matrix has the wrong shape")
        if fault[0] == "exit":
            sys.exit(3)
        time.sleep(10_000)
    if step % 10 == 0:
        save(step)
