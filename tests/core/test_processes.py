"""Processes that outlive their parent, the local step, and what a rank leaves behind; all of them real."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.train.runs import clean_environment, losses_of, make_corpus, make_run
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.files import read_json
from zslurm.core.processes import _WRAPPER, DetachedProcess, ProcessRecord
from zslurm.job.rank_setup import map_environment
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.on_nodes.srun_output import TaskFailure, task_failures


class Place:
    """Where the files of a detached process go."""

    def __init__(self, directory: Path) -> None:
        self.log, self.record = directory / "log", directory / "record.json"
        self.exit = directory / "exit"
        self.started: list[DetachedProcess] = []

    def start(self, script: str, *arguments: str) -> DetachedProcess:
        process = DetachedProcess.start(
            ["/bin/sh", "-c", script, "sh", *arguments],
            env=dict(os.environ), log=self.log, record_file=self.record, exit_file=self.exit,
        )  # fmt: skip
        self.started.append(process)
        return process


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    here = Place(tmp_path)
    yield here
    for process in here.started:
        process.signal_group(signal.SIGKILL)
        ended(process)
        process.reap()


def ended(process: DetachedProcess) -> int:
    """The exit code, once there is one."""
    wait_for(lambda: process.poll() is not None, "the process to end")
    code = process.poll()
    assert code is not None
    return code


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 1", 1), ("exit 75", 75), ("kill -9 $$", 137)])
def test_the_exit_code_of_the_command_is_left_in_a_file(place: Place, script: str, code: int) -> None:
    process = place.start(script)
    assert ended(process) == code
    assert place.exit.read_text() == f"{code}\n"
    assert process.left_exit_code


def test_output_goes_to_the_log_and_nothing_is_read(place: Place) -> None:
    assert ended(place.start("cat; echo out; echo err >&2")) == 0
    assert place.log.read_text() == "out\nerr\n"


def test_it_is_in_a_session_of_its_own(place: Place) -> None:
    process = place.start("sleep 100")
    assert os.getsid(process.record.pid) == os.getpgid(process.record.pid) == process.record.pid


def test_signals_reach_the_command_and_leave_the_wrapper_to_tell_the_end(place: Place) -> None:
    process = place.start("trap 'echo asked; exit 75' TERM; echo ready; while :; do sleep 0.05; done")
    wait_for(lambda: "ready" in place.log.read_text(), "the command to listen")
    process.signal_group(signal.SIGTERM)
    assert ended(process) == 75
    assert place.log.read_text().endswith("asked\n")


def test_a_command_that_does_not_listen_yet_survives_the_request_to_save_and_stop(place: Place) -> None:
    process = place.start("echo ready; read forever < $1; exit 3", str(_fifo(place)))
    wait_for(lambda: "ready" in place.log.read_text(), "the command to run")
    process.signal_group(signal.SIGUSR2)
    (place.log.parent / "fifo").write_text("go on\n")
    assert ended(process) == 3


def _fifo(place: Place) -> Path:
    path = place.log.parent / "fifo"
    os.mkfifo(path)
    return path


def test_a_wrapper_that_is_killed_leaves_no_code_and_counts_as_killed(place: Place) -> None:
    process = place.start("sleep 100")
    os.kill(process.record.pid, signal.SIGKILL)
    assert ended(process) == 137
    assert not process.left_exit_code


def test_a_signal_to_end_that_comes_before_the_command_keeps_it_from_starting(place: Place) -> None:
    command = ["/bin/sh", "-c", _WRAPPER, "zslurm-step", str(place.exit), "/bin/sh", "-c", "echo started"]
    with place.log.open("ab") as log:
        wrapper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, start_new_session=True)
    wait_for(lambda: _ignores(wrapper.pid, signal.SIGUSR2), "the wrapper to set its traps")
    wrapper.terminate()
    with suppress(BrokenPipeError):
        wrapper.communicate(b"go\n", timeout=DEADLINE_S)
    assert wrapper.returncode == -signal.SIGTERM
    assert not place.log.read_text()


def _ignores(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(mask >> (signum - 1) & 1)


def test_what_outlives_the_wrapper_can_still_be_signalled(place: Place) -> None:
    process = place.start("echo $$; exec sleep 100")
    wait_for(lambda: place.log.read_text().strip(), "the command to run")
    command = psutil.Process(int(place.log.read_text()))
    os.kill(process.record.pid, signal.SIGKILL)
    assert ended(process) == 137
    process.reap()
    assert command.is_running()
    process.signal_group(signal.SIGKILL)
    wait_for(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE, "the command to end")


def test_another_process_can_take_it_up(place: Place) -> None:
    place.start("echo up; sleep 100")
    wait_for(lambda: place.log.read_text() == "up\n", "the command to start")
    program = """
import sys, signal
from pathlib import Path
from zslurm.core.processes import DetachedProcess
process = DetachedProcess.adopt(Path(sys.argv[1]), Path(sys.argv[2]))
print(process.poll())
process.reap()
process.signal_group(signal.SIGTERM)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(place.record), str(place.exit)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "None\n"
    assert ended(place.started[0]) == 128 + signal.SIGTERM


def test_nothing_recorded_is_nothing_to_adopt(place: Place) -> None:
    assert DetachedProcess.adopt(place.record, place.exit) is None
    place.record.write_text('{"pid": 1}')
    assert DetachedProcess.adopt(place.record, place.exit) is None


def test_a_command_whose_starter_dies_before_it_is_recorded_never_runs(place: Place) -> None:
    """No process could find it again: it would train next to its successor."""
    program = """
import os, signal, sys
from pathlib import Path
from zslurm.core import processes
class Dies(processes.ProcessRecord):
    def write(self, path):
        os.kill(os.getpid(), signal.SIGKILL)
processes.ProcessRecord = Dies
folder = Path(sys.argv[1])
processes.DetachedProcess.start(
    ["touch", str(folder / "ran")], env=dict(os.environ),
    log=folder / "log", record_file=folder / "record.json", exit_file=folder / "exit",
)
"""
    folder = place.log.parent
    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not _with_argument(str(place.exit)), "the wrapper to give up")
    assert not (folder / "ran").exists()


def _with_argument(argument: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if argument in (p.info["cmdline"] or [])]


def test_a_pid_that_belongs_to_another_process_by_now_is_left_alone(place: Place) -> None:
    process = place.start("sleep 100")
    mine = process.record
    assert mine.started is not None
    stale = replace(mine, started=mine.started - 6000)
    assert mine.alive
    assert not stale.alive
    assert not stale.signal(signal.SIGKILL)
    DetachedProcess(stale, place.exit).signal_group(signal.SIGKILL)
    assert DetachedProcess(stale, place.exit).poll() == 137
    assert process.poll() is None, "the process that has the pid now was not touched"


def _set_the_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Forward: every process seems to be created so much later than was recorded."""
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + seconds)


def test_a_clock_that_is_set_makes_no_other_process_of_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    process = place.start("sleep 100")
    adopted = DetachedProcess.adopt(place.record, place.exit)
    assert adopted is not None
    assert adopted.record == process.record
    _set_the_clock(monkeypatch, 3600.0)
    assert adopted.poll() is None
    assert adopted.record.owns_group
    assert adopted.record.signal(signal.SIGCONT)


def test_a_record_of_an_older_zslurm_is_understood(place: Place) -> None:
    process = place.start("sleep 100")
    body = json.loads(place.record.read_text())
    place.record.write_text(json.dumps({name: body[name] for name in ("pid", "created", "host")}))
    old = ProcessRecord.read(place.record)
    assert old is not None
    assert old.alive
    assert not replace(old, created=old.created - 60).alive
    assert process.record.started is not None


def test_a_process_of_an_earlier_boot_is_neither_alive_nor_signalled(place: Place) -> None:
    mine = place.start("sleep 100").record
    before = replace(mine, boot="another")
    assert not before.alive
    assert not before.owns_group
    DetachedProcess(before, place.exit).signal_group(signal.SIGKILL)
    assert mine.alive


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_nothing_is_known_of_the_end_while_the_file_system_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    process = place.start("exit 3")
    assert ended(process) == 3

    def stalled(*_: object, **__: object) -> str:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as away:
        away.setattr(Path, "read_text", stalled)
        away.setattr(Path, "stat", stalled)
        assert process.poll() is None
        assert not process.left_exit_code
    assert process.poll() == 3


def test_a_process_of_another_machine_is_neither_alive_nor_signalled(place: Place) -> None:
    mine = place.start("sleep 100").record
    elsewhere = ProcessRecord(mine.pid, mine.created, "another-host")
    assert not elsewhere.here
    assert not elsewhere.alive
    DetachedProcess(elsewhere, place.exit).signal_group(signal.SIGKILL)
    assert mine.alive


def test_a_zombie_has_ended(place: Place) -> None:
    child = subprocess.Popen(["sleep", "100"])
    record = ProcessRecord.of(child.pid)
    assert record.alive
    child.kill()
    wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "the child to end")
    assert not record.alive
    child.wait()


# ---------------------------------------------------------------------------------------------- the local step


def local_step(output: Path, script: str, *, ranks: int) -> subprocess.Popen[str]:
    output.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "zslurm.job.local_step", f"--ranks={ranks}", f"--output={output}", "--",
         "/bin/sh", "-c", script],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ranks_get_torchruns_variables_and_a_log_each(tmp_path: Path) -> None:
    step = local_step(
        tmp_path / "logs", "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK", ranks=3
    )
    assert step.communicate() == ("", "")
    assert step.returncode == 0
    texts = [(tmp_path / "logs" / f"rank-{rank:05d}.log").read_text() for rank in range(3)]
    assert texts == ["0/3 0/3 0\n", "1/3 1/3 0\n", "2/3 2/3 0\n"]


@pytest.mark.parametrize(
    ("endings", "code"),
    [(["0", "75", "2"], 75), (["1", "0", "0"], 1), (["kill", "1", "75"], 137)],
)
def test_a_step_ends_with_the_highest_code_and_prints_who_failed_as_srun_would(
    tmp_path: Path, endings: list[str], code: int
) -> None:
    script = f"set -- {' '.join(endings)}; shift $RANK; [ $1 = kill ] && kill -9 $$; exit $1"
    step = local_step(tmp_path / "logs", script, ranks=3)
    printed, _ = step.communicate()
    assert step.returncode == code
    expected = {
        TaskFailure(os.uname().nodename, (rank,), "Killed" if e == "kill" else f"Exited with exit code {e}")
        for rank, e in enumerate(endings)
        if e != "0"
    }
    assert set(task_failures(printed)) == expected


def test_a_failed_rank_leaves_its_peers_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    step = local_step(tmp_path / "logs", f"[ $RANK = 0 ] && exit 5; read word < {tmp_path}/fifo", ranks=2)
    assert step.stdout is not None
    assert step.stdout.readline().endswith("task 0: Exited with exit code 5\n")
    assert step.poll() is None
    (tmp_path / "fifo").write_text("go on\n")
    assert step.wait() == 5
    step.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on_to_every_rank(tmp_path: Path, signum: signal.Signals) -> None:
    program = (
        f"import signal; signal.signal({int(signum)}, lambda *_: exit(3)); "
        "print('ready', flush=True); signal.pause()"
    )
    logs = tmp_path / "logs"
    step = local_step(logs, f'exec {sys.executable} -c "{program}"', ranks=2)
    wait_for(
        lambda: all("ready" in _text(logs / f"rank-0000{rank}.log") for rank in (0, 1)), "the ranks to listen"
    )
    step.send_signal(signum)
    printed, _ = step.communicate()
    assert step.returncode == 3
    assert len(task_failures(printed)) == 2


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# ---------------------------------------------------------------------------------------------------- one rank


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}


def prepare(directory: Path, corpus: Path) -> AttemptDir:
    """A run with the directory of a first attempt, as the supervisor makes it."""
    attempt = RunDir(make_run(directory, corpus, steps=2)).attempt(1)
    attempt.ranks.mkdir(parents=True)
    return attempt


def one_rank(attempt: AttemptDir, *, python: str = "") -> subprocess.CompletedProcess[str]:
    """Run `zslurm.job.rank` as the only rank; `python` runs before it in the same process."""
    program = f"import runpy, sys; {python or 'pass'}\nrunpy.run_module('zslurm.job.rank', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", program, str(attempt.path.parent.parent), "1"],
        env=clean_environment() | ALONE, capture_output=True, text=True, check=False,
    )  # fmt: skip


def forked_rank(attempt: AttemptDir, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in a process that need not wait for torch; `site` has a sitecustomize for it."""
    environment = clean_environment() | ALONE | ({"PYTHONPATH": str(site)} if site else {})
    arguments = [str(attempt.path.parent.parent), "1"]
    return forked.server(torch=True).run(
        arguments, module="zslurm.job.rank", env=environment, cwd=attempt.path, timeout=DEADLINE_S
    )


def test_a_rank_trains_and_leaves_where_its_store_was_and_how_it_ended(tmp_path: Path, data: Path) -> None:
    attempt = prepare(tmp_path / "run", data)
    done = one_rank(attempt)
    assert done.returncode == 0, done.stderr
    assert len(losses_of(tmp_path / "run")) == 2
    address = read_json(attempt.rendezvous)
    assert address is not None
    assert address["host"] == "127.0.0.1"
    assert 0 < address["port"] < 65536
    record = json.loads(attempt.rank_end(0).read_text())
    assert record.pop("time") > 0
    assert record.pop("usage")["cpu_s"] > 0
    assert record == {
        "rank": 0, "node": os.uname().nodename, "exit_code": 0, "step": 2, "member": f"{os.uname().nodename}/0",
    }  # fmt: skip


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path, data: Path) -> None:
    attempt = prepare(tmp_path / "run", data)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["data"]["path"] = str(tmp_path / "nowhere.h5")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    done = forked_rank(attempt)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: data.path: {tmp_path}/nowhere.h5")
    assert len(done.stderr.splitlines()) == 1
    record = json.loads(attempt.rank_end(0).read_text())
    assert (record["exit_code"], record["error"], record["step"]) == (2, "DataError", -1)
    assert f"error: {record['message']}\n" == done.stderr


def test_a_bug_is_recorded_with_its_traceback_and_exit_code_1(tmp_path: Path, data: Path) -> None:
    attempt = prepare(tmp_path / "run", data)
    broken = "import zslurm.train.loop as loop; loop.Trainer.run = lambda self: 1 / 0"
    (tmp_path / "sitecustomize.py").write_text(broken)
    done = forked_rank(attempt, tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stderr
    record = json.loads(attempt.rank_end(0).read_text())
    assert (record["exit_code"], record["error"], record["message"]) == (
        1,
        "ZeroDivisionError",
        "division by zero",
    )
    assert record["traceback"].startswith("Traceback (most recent call last)")


def test_a_request_to_stop_that_comes_before_torch_is_there_is_heeded(tmp_path: Path, data: Path) -> None:
    attempt = prepare(tmp_path / "run", data)
    asked_early = """
import os, signal, zslurm.train.progress as progress
real = progress.record_path
def record_path(*arguments):
    if "zslurm.train.loop" not in sys.modules:
        os.kill(os.getpid(), signal.SIGUSR2)
    return real(*arguments)
progress.record_path = record_path
"""
    done = one_rank(attempt, python=asked_early)
    assert done.returncode == 75, done.stderr
    assert len(losses_of(tmp_path / "run")) == 1
    assert json.loads(attempt.rank_end(0).read_text())["exit_code"] == 75


def test_slurms_variables_become_torchruns() -> None:
    environ = {
        "SLURM_PROCID": "11", "SLURM_NTASKS": "12", "SLURM_LOCALID": "3", "SLURM_NODEID": "2",
        "SLURMD_NODENAME": "node2", "SLURM_JOB_ID": "77", "SLURM_STEP_TASKS_PER_NODE": "4(x3)",
    }  # fmt: skip
    map_environment(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [environ[name] for name in names] == ["11", "12", "3", "4", "2"]


def test_variables_of_a_local_step_are_kept() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "9", "SLURM_NTASKS": "10"}
    map_environment(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("1", "2")
