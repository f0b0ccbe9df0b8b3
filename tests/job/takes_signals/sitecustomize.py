"""What a network plugin does to a rank: C handlers, set again and again, that end it on SIGUSR1 and SIGUSR2.

AMD's ANP installs such a handler for SIGUSR2 when it is loaded. A run gets this module by PYTHONPATH in
`cluster.env`; only ranks are affected. It also notes in ZSLURM_TEST_MOMENTS how far the start of rank 0 is, so
that a test can act in that very moment.
"""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

_IS_RANK = "zslurm.job.rank" in sys.orig_argv
_MOMENTS = os.environ.get("ZSLURM_TEST_MOMENTS")
_libc = ctypes.CDLL(None)


def _take():
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        _libc.signal(int(signum), ctypes.cast(_libc._exit, ctypes.c_void_p))


def _take_again():
    while not threading.Event().wait(0.05):
        _take()


class _Notes:
    """A finder that finds nothing, and notes the first import of some modules."""

    moments = {  # noqa: RUF012
        "torch": "imports",
        "zslurm.train.loop": "imports-trainer",
        "zslurm.train.data.loader": "imports-data",
    }

    def find_spec(self, name, path=None, target=None):
        if moment := self.moments.get(name):
            note(moment)


def note(moment):
    """Note that rank 0 has come so far."""
    if _MOMENTS and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0":
        (Path(_MOMENTS) / moment).touch()


if _IS_RANK:
    _take()
    threading.Thread(target=_take_again, daemon=True).start()
    note("python")
    sys.meta_path.insert(0, _Notes())
