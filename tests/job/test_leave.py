"""A rank whose work is done ends with its own code, whatever native libraries do when a process ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# Registers abort() as a library's destructor, and a function of Python's.
PROGRAM = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
atexit.register(print, "python's")
from zslurm.job.rank import leave
print("trained")
{end}(3)
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit", -signal.SIGABRT), ("leave", 3)])
def test_a_library_that_aborts_at_exit_does_not_change_how_a_rank_ended(end: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout.split() == (["trained", "python's"] if end == "leave" else done.stdout.split())
