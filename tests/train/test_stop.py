"""Being asked to stop: a flag that a signal sets, also after a library took the signal for itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from zslurm.train.stop import STOP_SIGNAL, STOP_SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_each_signal_asks(signum: signal.Signals) -> None:
    stop = StopRequest()
    stop.install()
    assert not stop.asked
    os.kill(os.getpid(), signum)
    assert stop.asked
    assert stop.signal_name == ("SIGRTMIN+3" if signum == STOP_SIGNAL else signal.Signals(signum).name)


def test_a_signal_that_a_library_took_is_taken_back() -> None:
    stop, taken = StopRequest(), []
    stop.install()
    signal.signal(signal.SIGUSR2, lambda *_: taken.append(True))
    stop.renew()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (stop.asked, taken) == (True, [])


def test_who_did_not_listen_and_who_is_done_do_not_begin_again() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    StopRequest().renew()
    assert signal.getsignal(signal.SIGUSR2) is before
    stop = StopRequest()
    stop.install()
    stop.close()
    stop.renew()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not stop.asked
