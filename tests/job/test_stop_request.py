"""Ranks are asked to stop through their store: at any moment of their life, whatever a plugin does to signals."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.local_runs import TAKES_SIGNALS, LocalUser
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.files import read_json, write_atomically
from zslurm.core.processes import DetachedProcess
from zslurm.job.stop_request import KEY, StopListener, StopSender, add_to_key, address_of, publish, stop_key
from zslurm.run.run_dir import RunDir

# --- the store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("libuv", [True, False])
def test_a_key_that_is_set_without_torch_is_seen_with_it(libuv: bool) -> None:
    """The protocol is torch's own and not public: this fails if a new torch has another one."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    address = address_of("127.0.0.1", store.port)
    key = stop_key(address.pop("secret"))
    assert address == {"host": "127.0.0.1", "port": store.port, "takes_stop": True}
    assert not store.check([key])
    assert add_to_key("127.0.0.1", store.port, key)
    assert store.check([key])
    assert add_to_key("127.0.0.1", store.port, key), "a second request does no harm"


def test_the_address_and_its_secret_are_read_by_the_owner_alone(tmp_path: Path) -> None:
    first, second = address_of("127.0.0.1", 1), address_of("127.0.0.1", 1)
    assert first["secret"] != second["secret"]
    publish(tmp_path / "address.json", first)
    assert (tmp_path / "address.json").stat().st_mode & 0o777 == 0o600
    assert read_json(tmp_path / "address.json") == first


def test_ranks_of_a_version_without_a_secret_are_asked_by_their_key() -> None:
    """An upgrade in place: the next supervisor takes over ranks that look at the old key."""
    assert stop_key("") == KEY
    assert stop_key("abc") == f"{KEY}/abc"


def test_an_address_where_nothing_answers_takes_no_request() -> None:
    assert address_of("127.0.0.1", 1)["takes_stop"] is False


class _Store:
    """A store of which a test decides what it holds."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.gone = False

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return set(keys) <= self.keys


def test_a_listener_asks_once_there_is_a_request() -> None:
    store, asked = _Store(), threading.Event()
    listener = StopListener(store, "5ec2e7", asked.set)
    store.keys |= {KEY, stop_key(""), stop_key("a guess")}
    assert not asked.wait(1.0), "whoever does not know the secret"
    store.keys.add(stop_key("5ec2e7"))
    assert asked.wait(DEADLINE_S)
    listener.close()


def test_a_listener_ends_with_its_store_and_when_it_is_closed() -> None:
    for gone in (True, False):
        store, asked = _Store(), threading.Event()
        store.gone = gone
        listener = StopListener(store, "", asked.set)
        listener.close()
        assert not asked.is_set()


@pytest.fixture
def attempt_process(tmp_path: Path) -> Iterator[tuple[RunDir, DetachedProcess]]:
    """An attempt whose step waits, and writes `asked` if it gets SIGUSR2."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    program = (
        "import pathlib, signal, sys\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGUSR2, lambda *_: (here / 'asked').touch())\n"
        "(here / 'listens').touch()\n"
        "while True:\n    signal.pause()\n"
    )
    process = DetachedProcess.start(
        [sys.executable, "-c", program, str(tmp_path)],
        env={"PATH": "/usr/bin:/bin"}, log=attempt.step_log, record_file=attempt.step_process,
        exit_file=attempt.step_exit,
    )  # fmt: skip
    wait_for((tmp_path / "listens").exists, "the step to listen")
    yield RunDir(tmp_path), process
    process.signal_group(signal.SIGKILL)
    process.reap()


def test_a_request_before_the_store_is_there_arrives_later(
    attempt_process: tuple[RunDir, DetachedProcess],
) -> None:
    from torch.distributed import TCPStore

    run, process = attempt_process
    sender = StopSender(run.attempt(1), process)
    assert not sender.send()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    publish(
        run.attempt(1).rendezvous, {"host": "127.0.0.1", "port": store.port, "takes_stop": True, "secret": "s"}
    )
    assert sender.send()
    assert store.check([stop_key("s")])
    run.attempt(1).rendezvous.unlink()
    assert sender.send(), "what has arrived is not asked again, also where the run's directory is gone"
    assert not (run.path / "asked").exists(), "no signal was needed"


def test_ranks_whose_store_does_not_take_requests_get_the_signal(
    attempt_process: tuple[RunDir, DetachedProcess],
) -> None:
    run, process = attempt_process
    write_atomically(run.attempt(1).rendezvous, '{"host": "127.0.0.1", "port": 1}')
    assert not StopSender(run.attempt(1), process).send()
    wait_for((run.path / "asked").exists, "the signal to come")


# --- whole runs --------------------------------------------------------------------------------------------------

MOMENTS = ("submitted", "attempt", "python", "imports", "imports-trainer", "imports-data", "store", "step")
"""When a run is asked to stop: from its submission to its steps."""

_DRAWN = random.Random(13)
_SOAK = [pytest.param(_DRAWN.choice(MOMENTS), _DRAWN.randint(1, 12), marks=pytest.mark.soak) for _ in range(18)]


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


@pytest.mark.parametrize(("moment", "step"), [("python", 1), ("step", 1), *_SOAK])
def test_a_plugin_that_takes_the_signals_keeps_no_run_from_saving(user: LocalUser, moment: str, step: int) -> None:
    moments = user.directory / "moments"
    moments.mkdir()
    env = {"PYTHONPATH": str(TAKES_SIGNALS), "ZSLURM_TEST_MOMENTS": str(moments)}
    run_file = user.write_run("asked", ranks=2, trainer="real", forks=moment == "step", cluster={"env": env})
    user.zslurm("submit", run_file)
    run = user.run_dir("asked")

    def reached() -> bool:
        if moment == "step":
            return any(row["step"] >= step for row in user.steps("asked"))
        there = {"submitted": run.submitted, "attempt": bool(run.attempt_dirs())}
        there["store"] = run.attempt(1).rendezvous.exists()
        return there[moment] if moment in there else (moments / moment).exists()

    wait_for(reached, f"the run to come to: {moment}")
    user.zslurm("cancel", "asked", "--wait")
    state = user.wait_for_end("asked")
    assert (state["state"], state["cause"]) == ("cancelled", None)
    if attempts := user.events("asked", "attempt_ended"):
        assert [attempt["outcome"] for attempt in attempts] == ["interrupted"]
        assert state["checkpoint_step"] == state["step"] >= 1
        assert (moments / "python").exists(), "the plugin's stand-in was there"
    else:
        assert moment in ("submitted", "attempt"), "no rank had been started"
