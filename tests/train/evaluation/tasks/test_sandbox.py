"""Generated programs are run with limits, cut off from the network, and nothing of them is left."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_for
from zslurm.train.errors import DataError
from zslurm.train.evaluation.tasks.sandbox import ProgramRun, Sandbox, _problem, open_sandbox
from zslurm.train.evaluation.tasks.task import ExecutionConfig

CAN_ISOLATE = (
    subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], check=False).returncode == 0
)
isolated = pytest.mark.skipif(not CAN_ISOLATE, reason="this machine allows no namespaces")


def run(program: str, **limits: object) -> ProgramRun:
    settings: dict[str, object] = {"command": "python3 -I -S {file}", "time_s": 60, **limits}
    return open_sandbox(ExecutionConfig.model_validate(settings), "task.yaml").run(program)


LIMITS = {"isolation": "limits", "network": True}
EITHER = pytest.mark.parametrize("how", [pytest.param({}, marks=isolated), LIMITS], ids=["namespaces", "limits"])


@EITHER
def test_a_program_passes_where_it_exits_with_0(how: dict[str, object]) -> None:
    assert run("print(1)", **how) == ("passed", 0, "1\n")
    failed = run("assert 1 == 2, 'no'", **how)
    assert (failed.outcome, failed.exit_code) == ("failed", 1)
    assert failed.output.endswith("AssertionError: no\n")


@EITHER
def test_a_program_that_does_not_end_is_ended(how: dict[str, object]) -> None:
    for program in ("import time; time.sleep(1000)", "while True: pass"):
        assert run(program, time_s=0.5, **how).outcome == "timed out"


@EITHER
def test_a_program_that_forks_without_end_is_stopped(how: dict[str, object]) -> None:
    if how and os.getuid() == 0:
        pytest.skip("Linux limits no processes of root without a namespace")
    ended = run("import os\nwhile True: os.fork()", processes=16, **how)
    assert ended.outcome == "failed"
    assert "BlockingIOError" in ended.output


def left() -> list[psutil.Process]:
    """What is left of programs: their folder is in their environment."""
    return [each for each in psutil.process_iter(["environ"]) if "zslurm-sample" in str(each.info["environ"])]


@EITHER
def test_what_a_program_leaves_behind_is_ended_with_it(how: dict[str, object]) -> None:
    program = "import os\nif os.fork() == 0:\n os.setsid()\n os.execvp('sleep', ['sleep', '1000'])"
    assert run(program, **how).passed
    wait_for(lambda: not left(), "what the program started to end")


@EITHER
def test_what_a_program_started_that_does_not_end_is_ended_too(how: dict[str, object]) -> None:
    program = "import os, time\nif os.fork() == 0:\n os.setsid()\ntime.sleep(1000)"
    assert run(program, time_s=0.5, **how).outcome == "timed out"
    wait_for(lambda: not left(), "the program and what it started to end")


@isolated
def test_programs_that_run_at_the_same_time_have_a_limit_of_processes_each() -> None:
    config = ExecutionConfig(command="python3 -I -S {file}", time_s=60, processes=8)
    box = open_sandbox(config, "task.yaml")
    program = (
        "import os, time\nchildren = [os.fork() or time.sleep(2) or os._exit(0) for _ in range(5)]\n"
        "assert all(os.waitstatus_to_exitcode(os.wait()[1]) == 0 for _ in children)"
    )
    with ThreadPoolExecutor(4) as pool:
        assert [each.output for each in pool.map(box.run, [program] * 4) if not each.passed] == []


@EITHER
def test_a_program_that_computes_too_long_in_several_processes_ran_out_of_time(how: dict[str, object]) -> None:
    """The limit of processor time comes before that of the clock where threads compute side by side."""
    ended = run("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", time_s=3, **how)
    assert ended.output == "(4, 5)\n"
    ended = run("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", **how)
    assert ended.outcome == "timed out"


@pytest.mark.skipif(not CAN_ISOLATE, reason="a program that kills its launcher ends with its namespace")
def test_a_program_that_kills_the_launcher_does_not_outlive_it() -> None:
    program = "import os, signal, time\nos.fork() or os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)"
    run(program, time_s=1)
    wait_for(lambda: not left(), "the program and what it started to end")


@EITHER
def test_memory_and_files_are_limited(how: dict[str, object]) -> None:
    assert "MemoryError" in run("x = 'a' * 10**9", memory_mb=200, **how).output
    assert run("open('big', 'w').write('x' * 10**8)", file_mb=1, **how).outcome == "failed"
    assert run("while True: print('x' * 1000)", file_mb=1, **how).outcome == "failed"


@isolated
def test_there_is_no_network() -> None:
    ended = run("import socket; socket.create_connection(('192.0.2.1', 80), 5)")
    assert "Network is unreachable" in ended.output


@isolated
def test_nothing_outside_can_be_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    ended = run(f"open('here', 'w').write('x'); open({str(tmp_path / 'x')!r}, 'w')")
    assert ended.outcome == "failed"
    assert not list(tmp_path.iterdir())


@isolated
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_the_same_sandbox() -> None:
    """Namespaces of users are what a user needs for the others, where Linux allows them."""
    code = (
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "from zslurm.train.evaluation.tasks.sandbox import Sandbox\n"
        "from zslurm.train.evaluation.tasks.task import ExecutionConfig\n"
        "box = Sandbox(ExecutionConfig(command='python3 -I -S {file}', processes=16))\n"
        "for program in ('import socket; socket.create_connection((\"192.0.2.1\", 80))',"
        " 'import os\\nwhile True: os.fork()', 'print(7)'):\n"
        "    print(*box.run(program)[:2], box.run(program).output.strip()[-24:])\n"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    if "unshare" in done.stderr:
        pytest.skip("this machine allows an ordinary user no namespaces")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("failed 1") and "unreachable" in lines[0], done.stdout + done.stderr
    assert lines[1].startswith("failed 1") and "unavailable" in lines[1]
    assert lines[2] == "passed 0 7"


def test_a_machine_without_namespaces_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Sandbox, program: str) -> ProgramRun:
        raise DataError("Operation not permitted (unshare)")

    monkeypatch.setattr(Sandbox, "run", refused)
    _problem.cache_clear()
    try:
        with pytest.raises(DataError, match=r"task.yaml: execution: .*unshare.*isolation: limits"):
            open_sandbox(ExecutionConfig(command=("true",)), "task.yaml")
    finally:
        _problem.cache_clear()


@EITHER
def test_limits_in_which_nothing_runs_are_named_as_the_reason(how: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"execution: not even `true` runs within these limits: .*; raise them"):
        run("", memory_mb=1, **how)


@pytest.mark.parametrize(
    ("key", "value"), [("memory_mb", 2**40), ("time_s", 1e12), ("command", ""), ("command", [])]
)
def test_limits_beyond_any_machine_and_no_command_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"less than or equal to 1073741824|names no program"):
        ExecutionConfig.model_validate({"command": "true", key: value})


def test_a_command_that_is_not_there_is_refused_before_anything_is_generated() -> None:
    with pytest.raises(DataError, match=r"execution.command: no-such-program is not there"):
        run("", command="no-such-program {file}", **LIMITS)
