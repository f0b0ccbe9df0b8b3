"""`python -m tests.cli.niceness.niceness_driver OUT ARGUMENTS...`: run `zslurm ARGUMENTS...`, and note niceness.

OUT gets that of all its threads, as JSON.
Every thread of the process and of its descendants is looked at again and again, from the moment on in which the
command has lowered its own niceness, if it does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import psutil

from zslurm.cli.main import main
from zslurm.train import niceness

SEEN: dict[str, int] = {}
LOCK = threading.Lock()
OVER = threading.Event()


def look() -> None:
    """Note every thread that lives now."""
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            try:
                SEEN[f"{process.pid}/{thread}"] = os.getpriority(os.PRIO_PROCESS, thread)
            except OSError:
                continue


def watch() -> None:
    """Look until the command is over."""
    while not OVER.wait(0.01):
        with LOCK:
            look()


def watch_from_here(lower: object = niceness.lower_process) -> None:
    """Replace `lower_process` by itself, and forget what was seen before."""

    def lower_and_forget(*arguments: int) -> None:
        with LOCK:
            lower(*arguments)  # type: ignore[operator]
            SEEN.clear()

    for module in list(sys.modules.values()):
        if getattr(module, "lower_process", None) is lower:
            vars(module)["lower_process"] = lower_and_forget


def run() -> None:
    """Run the command."""
    out = Path(sys.argv.pop(1))
    watch_from_here()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        main()
    finally:
        OVER.set()
        watcher.join()
        look()
        out.write_text(json.dumps(SEEN))


if __name__ == "__main__":
    run()
