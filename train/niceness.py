"""Niceness: the one place that lowers the priority of a process or of a thread.

Linux schedules threads: `os.nice` changes only the calling thread, and threads that a library started before keep
the old niceness. So a process is lowered thread by thread; what it starts later inherits. A niceness is never
raised on top of one that is high enough already, and never lowered, which only root may do.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

BACKGROUND = 10
"""Niceness of work that gives way to other processes: to other users' on a login node, to the ranks in a job."""


def lower_process(niceness: int = BACKGROUND) -> None:
    """Lower every thread of this process to `niceness`, if it is not as low already."""
    try:
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    except OSError:  # no Linux: a process has one niceness
        threads = [0]
    for thread in threads:
        _lower(thread, niceness)


def lower_thread(niceness: int = BACKGROUND) -> None:
    """Lower only the calling thread to `niceness`. On other systems than Linux: nothing."""
    if Path("/proc/self/task").is_dir():
        _lower(threading.get_native_id(), niceness)


def _lower(thread: int, niceness: int) -> None:
    with suppress(OSError):  # the thread has ended
        if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
