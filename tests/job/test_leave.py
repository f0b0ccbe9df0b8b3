"""A rank whose work is done ends with its own code, whatever native libraries do when a process ends."""

from __future__ import annotations

import signal
import subprocess
import sys

# Registers abort() as a library's destructor, a function of Python's, and a thread that is not done yet.
PROGRAM = """
import atexit, ctypes, sys, threading, time
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
atexit.register(print, "registered")
from zslurm.job.rank_setup import leave
threading.Thread(target=lambda: (time.sleep(0.5), print("thread"))).start()
print("trained")
{end}(3)
"""


def ended(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True)


def test_a_library_that_aborts_at_exit_does_not_change_how_a_rank_ended() -> None:
    assert ended("sys.exit").returncode == -signal.SIGABRT
    assert ended("leave").returncode == 3


def test_threads_and_what_python_has_to_do_at_exit_are_waited_for() -> None:
    assert ended("leave").stdout.split() == ["trained", "thread", "registered"]
