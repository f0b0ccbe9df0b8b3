"""`python -m zslurm.job.local_step --ranks N --output DIR -- COMMAND`: srun's part on one machine.

Starts N copies of COMMAND with the variables that torchrun would set, one output file each, forwards signals,
reports each copy that fails as srun does (so one parser reads both), and exits with the highest exit
code, 128 + signal for a killed one. It does not end the other copies when one fails, as srun does with
--kill-on-bad-exit=0: the supervisor decides.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2)


def _describe(code: int) -> str:
    return f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code) or f"signal {-code}"


def main(argv: list[str] | None = None) -> int:
    """Run the copies; returns the exit code of the step."""
    parser = argparse.ArgumentParser(prog="zslurm.job.local_step", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", default="rank", help="what the names of the output files begin with")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)

    children: dict[int, subprocess.Popen[bytes]] = {}

    def forward(signum: int, _frame: FrameType | None) -> None:
        for child in children.values():
            if child.poll() is None:
                child.send_signal(signum)

    # Ranks ignore the signals until they have handlers; until then they would be killed.
    for signum in FORWARDED:
        signal.signal(signum, signal.SIG_IGN)
    for rank in range(options.ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "GROUP_RANK": "0",
        }
        with (options.output / f"{options.name}-{rank:05d}.log").open("ab") as output:
            children[rank] = subprocess.Popen(
                options.command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
    for signum in FORWARDED:
        signal.signal(signum, forward)
    worst = 0
    running = dict(children)
    while running:
        for rank, child in list(running.items()):
            code = child.poll()
            if code is None:
                continue
            del running[rank]
            if code != 0:
                print(f"step: error: {socket.gethostname()}: task {rank}: {_describe(code)}", flush=True)
            worst = max(worst, code if code >= 0 else 128 - code)
        time.sleep(0.05)
    return worst


if __name__ == "__main__":
    sys.exit(main())
