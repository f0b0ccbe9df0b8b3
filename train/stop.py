"""Asked to stop: a flag, never an action inside a signal handler.

SIGUSR2, SIGTERM and SIGINT ask the run to save at the next step boundary and to stop. The ranks agree on it in
the all-reduce that they make anyway, so all of them stop after the same step.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """True once this rank was asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._listens = False

    def install(self) -> None:
        """Listen for the signals. Only the main thread may call this."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._ask)
        self._listens = True

    def renew(self) -> None:
        """Listen again, where this did before.

        A library may have taken a signal for itself meanwhile: AMD's ANP plugin ends the process on SIGUSR2 from
        the first collective on (ROCm/amd-anp, src/net_ib.cc).
        """
        if self._listens:
            self.install()

    def close(self) -> None:
        """Ignore the signals from now on: they come twice, and one during Python's own end would kill us."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        self._listens = False

    def _ask(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked = True
