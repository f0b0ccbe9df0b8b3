"""A request to save and stop: a flag, never an action inside a signal handler.

Any of STOP_SIGNALS asks the run to save at the next step boundary and to stop. The ranks agree on it in the
all-reduce that they make anyway, so all of them stop after the same step, and one rank that knows is enough. A
request that comes before the first step is kept: the run then saves and stops after that step.

Network plugins install signal handlers in the ranks: AMD's ANP takes SIGUSR2 and ends the process on
it (ROCm/amd-anp, src/net_ib.cc), NCCL's proxy takes SIGUSR1. zslurm therefore does not send a signal: its
supervisor asks through the store (zslurm/job/stop_request.py). Under plain torchrun use SIGTERM or STOP_SIGNAL,
which no plugin takes.
"""

from __future__ import annotations

import signal
from enum import IntEnum
from types import FrameType

STOP_SIGNAL = signal.SIGRTMIN + 3
"""A real-time signal for people who ask one rank by hand: `kill -s RTMIN+3 PID`."""

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, STOP_SIGNAL)


class Ending(IntEnum):
    """Exit code of a rank that ends in order."""

    COMPLETED = 0
    INTERRUPTED = 75  # saved and stopped because it was asked to: start again to continue


class StopRequest:
    """True once this rank was asked to stop.

    Attributes:
        asked: whether it was.
        signum: the signal that asked first; None if nothing, or no signal, did.
    """

    def __init__(self) -> None:
        self.asked = False
        self.signum: int | None = None
        self._listens = False

    def install(self) -> None:
        """Listen for the signals. Only the main thread may call this."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
        self._listens = True

    def renew(self) -> None:
        """Listen again, if this did before: a library may have taken a signal for itself.

        So `scancel --signal=USR2`, which Slurm sends to every rank, does no harm after the first step.
        """
        if self._listens:
            self.install()

    def close(self) -> None:
        """Ignore the signals from now on: they come twice, and one during Python's own end would kill us."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        self._listens = False

    @property
    def signal_name(self) -> str | None:
        """`SIGTERM` and the like, of the signal that asked first."""
        if self.signum is None:
            return None
        return "SIGRTMIN+3" if self.signum == STOP_SIGNAL else signal.Signals(self.signum).name

    def ask(self) -> None:
        """Ask to save and stop, from any thread."""
        self.asked = True

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self.signum = signum
        self.asked = True
