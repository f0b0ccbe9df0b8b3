"""`python niceness_driver.py OUT ARGUMENT...`: run a zslurm command, and note the niceness of all its threads.

Every thread of this process and of its descendants is looked at again and again. OUT gets the last niceness of
each as JSON, from the moment on in which the command has lowered its own, if it does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import psutil

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
    while not OVER.wait(0.002):
        with LOCK:
            look()


def watch_from_here(lower: object = niceness.lower_process) -> None:
    """Replace `lower_process` by itself, and forget what was seen before."""

    def lower_and_forget(*arguments: int) -> None:
        with LOCK:
            lower(*arguments)  # type: ignore[operator]
            SEEN.clear()

    niceness.lower_process = lower_and_forget


if __name__ == "__main__":
    out, *arguments = sys.argv[1:]
    watch_from_here()
    watcher = threading.Thread(target=watch)
    watcher.start()
    sys.argv = ["zslurm", *arguments]
    try:
        from zslurm.cli.main import main

        main()
    finally:
        OVER.set()
        watcher.join()
        look()
        Path(out).write_text(json.dumps(SEEN))
