"""A warm program is what the program would be, its keeper reports its end; without one ranks start as usual."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from tests.waiting import wait_for
from zslurm.config.python_call import PythonCall, python_call
from zslurm.config.spec import ProgramSpec
from zslurm.config.trainer import TrainerSection
from zslurm.job.program import warm_program
from zslurm.job.program.warm_keeper import remove_stale
from zslurm.job.program.warm_program import import_statements, receive, send
from zslurm.job.program.warm_rank import WarmProcess, WarmSlot
from zslurm.run.run_dir import RunDir

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (["python", "a.py", "-m", "x"], PythonCall(("python",), "script", "a.py", ("-m", "x"))),
        (
            ["/v/bin/python3.11", "-u", "-m", "p.q", "-x"],
            PythonCall(("/v/bin/python3.11", "-u"), "module", "p.q", ("-x",)),
        ),
        (
            ["python3", "-X", "dev", "-Wignore", "-OO", "a.py"],
            PythonCall(("python3", "-X", "dev", "-Wignore", "-OO"), "script", "a.py", ()),
        ),
        (["python", "-c", "print()"], None),
        (["python", "-um", "p"], None),
        (["python"], None),
        (["torchrun", "a.py"], None),
        (["bash", "python", "a.py"], None),
    ],
)
def test_a_command_is_read_as_python_reads_it(command: list[str], call: PythonCall | None) -> None:
    assert python_call(command) == call


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ["torchrun", "a.py"]}, "needs a command of the form"),
        ({"command": ["python", "a.py"], "launcher": "node"}, "needs launcher: rank"),
    ],
)
def test_only_python_programs_that_zslurm_starts_for_each_rank_are_kept_warm(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerSection.model_validate({"warm": True, **changes})


def test_the_imports_of_a_program_are_those_of_installed_modules_at_its_top_level(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from . import inner\nimport array\n")
    (tmp_path / "package" / "inner.py").write_text("import package, bisect\nfrom ..package import other\n")
    (tmp_path / "package" / "other.py").write_text("import calendar")
    (tmp_path / "mine.py").write_text("import colorsys\nfrom package.other import thing\nraise SystemExit\n")
    script = tmp_path / "a.py"
    script.write_text(
        "from __future__ import annotations\nimport json, mine\n"
        "from os import path as p\nfrom package import inner\n"
        "if True:\n    import a_missing\ntry:\n    import b_missing\nexcept ImportError:\n    pass\n"
        "def f():\n    import c_missing\n"
    )
    statements = [ast.unparse(statement) for statement, _ in import_statements(script, tmp_path)]
    of_package = ["import bisect", "import calendar", "import array"]
    assert statements == ["import json", "import colorsys", *of_package, "from os import path as p"]


PROGRAM = """
import sys, os, subprocess, time
if sys.argv[1] == "leaves":
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if sys.argv[1] == "waits":
    time.sleep(600)
print(os.environ["WORD"], sys.argv[1:], flush=True)
sys.exit(int(sys.argv[2]))
"""


class Node:
    """A keeper on this machine, and what a rank of it does."""

    def __init__(self, directory: Path, program: str = PROGRAM) -> None:
        (directory / "a.py").write_text(program)
        self.words = [sys.executable, "a.py"]
        trainer = {"command": self.words, "directory": str(directory), "warm": True}
        spec = ProgramSpec.model_validate(
            {"run": {"name": "warm", "runs_dir": str(directory)}, "trainer": trainer}
        )
        self.run = RunDir(directory / "run")
        self.run.path.mkdir()
        self.run.config.write_text(spec.model_dump_json())
        self.environ = {**os.environ, **RANK, "ZSLURM_JOB_ID": "local-1"}
        self.socket, self.log = self.run.warm_socket(self.environ), directory / "keeper.log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "zslurm.job.program.warm_keeper", str(self.run.path)]
            self.keeper = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)
        wait_for(self.socket.exists, "the keeper")

    def slot(self) -> WarmSlot:
        return WarmSlot(self.socket)

    def take(self, slot: WarmSlot, *words: str, **environ: str) -> WarmProcess | None:
        return slot.take([*self.words, *words], {**self.environ, **environ}, lambda: False)

    def warm(self) -> WarmSlot:
        """A slot whose keeper prepares a program."""
        slot = self.slot()

        def told() -> bool:
            slot.look(stepped=True)
            return bool(self.children())

        wait_for(told, "a process that imports")
        return slot

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.keeper.pid).children()

    def close(self) -> None:
        self.keeper.kill()
        self.keeper.wait()
        self.socket.unlink(missing_ok=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def ended(process: WarmProcess | None) -> int:
    assert process is not None
    return wait_for(lambda: (process.poll(),) if process.poll() is not None else None, "its end")[0] or 0


def test_a_rank_gets_the_program_that_was_prepared_with_its_words_and_output(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    assert node.take(node.slot(), "runs", "0") is None  # nothing has been prepared before the first start
    node.warm()
    process = node.take(node.slot(), "runs", "3", WORD="hello")
    assert (ended(process), process and process.left_behind) == (3, [])
    lines = capfd.readouterr().out.splitlines()
    assert set(lines) == {"zslurm: the program was started in a warm process", "hello ['runs', '3']"}


def test_what_a_program_leaves_behind_is_ended_but_not_the_next_program(node: Node) -> None:
    slot = node.warm()
    process = node.take(slot, "leaves", "0", WORD="")
    slot.look(stepped=True)
    assert (ended(process), process and process.left_behind) == (0, ["sleep"])
    next_slot = node.warm()
    assert ended(node.take(next_slot, "runs", "0", WORD="")) == 0


def test_a_program_ends_with_its_rank(node: Node) -> None:
    slot = node.warm()
    process = node.take(slot, "waits", "0")
    assert process is not None
    slot.close()  # what the end of the rank's process does
    wait_for(lambda: not psutil.pid_exists(process.pid), "the program to end")


def test_a_program_ends_with_its_keeper_and_counts_as_killed(node: Node) -> None:
    process = node.take(node.warm(), "waits", "0")
    node.keeper.kill()
    assert ended(process) == -signal.SIGKILL


def test_an_import_that_fails_leaves_the_rank_to_start_as_usual(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, "import time, a_module_that_is_missing")
    slot = node.slot()
    try:
        slot.look(stepped=True)
        assert node.take(node.slot(), "runs", "0") is None
        wait_for(lambda: "No module named 'a_module_that_is_missing'" in node.log.read_text(), "the reason")
    finally:
        node.close()


def test_the_keeper_ends_with_the_run_and_takes_its_files_along(node: Node) -> None:
    node.warm()
    node.run.job_exit("local-1").write_text("0\n")
    assert node.keeper.wait(60) == 0
    assert not node.socket.exists()


def test_a_keeper_under_which_a_program_saves_stays_after_a_signal_to_the_job(node: Node) -> None:
    slot = node.warm()
    process = node.take(slot, "waits", "0")
    assert process is not None
    node.keeper.send_signal(signal.SIGTERM)
    time.sleep(0.3)  # it would end within a look
    assert node.keeper.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert ended(process) == -signal.SIGTERM
    assert node.keeper.wait(60) == 0


def test_a_keeper_removes_what_killed_ones_left_and_nothing_of_those_that_live(node: Node, tmp_path: Path) -> None:
    dead = RunDir(tmp_path / "dead").warm_socket(node.environ)
    modules = RunDir(tmp_path / "dead").warm_modules(node.environ)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
        listener.listen(1)
    modules.write_text("json")
    try:
        remove_stale(node.socket)
        assert not dead.exists() and not modules.exists()
        assert node.socket.exists()
    finally:
        dead.unlink(missing_ok=True)
        modules.unlink(missing_ok=True)


def outputs(directory: Path, kind: str, target: str, modules: str = "") -> tuple[str, str]:
    """What a program prints with RANK 3: started as usual, and in a process that was prepared with RANK 7."""
    environ = {**os.environ, "RANK": "3"}
    words = [target] if kind == "script" else ["-m", target]
    plain = subprocess.run(
        [sys.executable, *words], cwd=directory, env=environ, capture_output=True, text=True, check=False
    )
    assert plain.returncode == 0, plain.stderr
    (directory / "modules").write_text(modules)
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, warm_program.__file__, str(theirs.fileno()), "modules", kind, target]
    with ours, (directory / "out").open("w+b") as out:
        process = subprocess.Popen(
            arguments, cwd=directory, env=environ | {"RANK": "7"}, pass_fds=[theirs.fileno()], stderr=out
        )
        theirs.close()
        assert receive(ours) is not None, (directory / "out").read_text()
        send(ours, {"environ": environ, "arguments": []}, [out.fileno(), out.fileno()])
        assert process.wait(60) == 0, (directory / "out").read_text()
    return plain.stdout, (directory / "out").read_text()


def test_a_warm_script_is_compiled_and_finds_its_modules_as_usual(tmp_path: Path) -> None:
    (place := tmp_path / "prog").mkdir()
    (place / "beside.py").write_text("import os\nRANK = os.environ['RANK']\n")
    (place / "train.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    lr: float = 1.0\n"
        "from beside import RANK\nprint(dataclasses.fields(C)[0].type, RANK, __name__)\n"
    )
    (tmp_path / "link.py").symlink_to(place / "train.py")
    printed = "<class 'float'> 3 __main__\n"
    assert outputs(tmp_path, "script", "link.py", "beside\nbeside.nothing\njson\n") == (printed, printed)


def test_a_warm_module_imports_its_package_only_as_the_rank(tmp_path: Path) -> None:
    (package := tmp_path / "pq").mkdir()
    (package / "__init__.py").write_text("import os\nRANK = os.environ['RANK']\n")
    (package / "inner.py").write_text("")
    (package / "train.py").write_text("import json\nfrom pq import RANK\nprint(RANK, 'receive' in globals())\n")
    assert outputs(tmp_path, "module", "pq.train", "pq\npq.inner\n") == ("3 False\n", "3 False\n")
