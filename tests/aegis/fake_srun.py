"""An srun for agents: starts the command once for each node here, gives all of them its input, joins their output.

It says what the real one says of a task that ends. A node that is named in FAKE_SRUN/down cannot be reached; one
in FAKE_SRUN/gone is not in the job any more, so that a step with it is refused. How it was called is added to
FAKE_SRUN/calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from zslurm.slurm.hostlist import expand


def main() -> int:
    directory = Path(os.environ["FAKE_SRUN"])
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    options = options[: next((i for i, word in enumerate(options) if word.startswith("--generation")), None)]
    command = sys.argv[1 + next(i for i, word in enumerate(sys.argv[1:]) if not word.startswith("--")) :]
    with (directory / "calls").open("a") as calls:
        calls.write(" ".join(options) + "\n")
    nodes = expand(next(word.partition("=")[2] for word in options if word.startswith("--nodelist=")))
    down, gone = (
        set(path.read_text().split()) if path.exists() else set()
        for path in (directory / "down", directory / "gone")
    )
    if gone.intersection(nodes):
        words = "Unable to create step for job 12: Requested node configuration is not available"
        print(f"srun: error: {words}", file=sys.stderr)
        return 1
    tasks = {}
    for number, node in enumerate(nodes):
        if node in down:
            words = f"Task launch for StepId=1.1 failed on node {node}: Communication connection failure"
            print(f"srun: error: {words}", file=sys.stderr, flush=True)
            continue
        env = os.environ | {"SLURMD_NODENAME": node, "SLURM_PROCID": str(number)}
        tasks[node] = subprocess.Popen(command, env=env, stdin=subprocess.PIPE)

    def feed() -> None:
        for line in sys.stdin.buffer:
            for task in tasks.values():
                assert task.stdin
                try:
                    task.stdin.write(line)
                    task.stdin.flush()
                except OSError:
                    continue
        for task in tasks.values():
            assert task.stdin
            task.stdin.close()

    def wait(number: int, node: str) -> None:
        code = tasks[node].wait()
        if code:
            what = "Killed" if code < 0 else f"Exited with exit code {code}"
            print(f"srun: error: {node}: task {number}: {what}", file=sys.stderr, flush=True)

    threading.Thread(target=feed, daemon=True).start()
    waits = [threading.Thread(target=wait, args=(nodes.index(node), node)) for node in tasks]
    for thread in waits:
        thread.start()
    for thread in waits:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
