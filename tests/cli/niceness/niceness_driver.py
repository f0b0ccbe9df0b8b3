"""Run a zslurm command in a fresh process, and note the niceness of all its threads.

Every thread of the process and of its descendants is looked at again and again, from the moment on in which the
command has lowered its own niceness, if it does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
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


def run(arguments: list[str], place: Path, environment: Mapping[str, str], out: Path) -> None:
    """Run a command in a directory, with nothing but these variables; `out` gets what was seen, as JSON."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    printed = os.open(out.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    watch_from_here()
    watcher = threading.Thread(target=watch)
    watcher.start()
    sys.argv = ["zslurm", *arguments]
    try:
        from zslurm.cli.main import main  # now, for it keeps `lower_process`

        main()
    finally:
        OVER.set()
        watcher.join()
        look()
        out.write_text(json.dumps(SEEN))
