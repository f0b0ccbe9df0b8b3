"""Every file in examples/ runs as it is, says first how to start it, and is listed; on Slurm: tests/on_slurm."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.checkpoint_tools.saves import save
from tests.submit.local_runs import LocalUser

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def printed(user: LocalUser, example: str, *words: str | Path, exit_code: int = 0) -> list[str]:
    """Run an example as its user would; returns its lines."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example, *map(str, words)],
        cwd=user.directory,
        env=user.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_first_what_it_shows_and_how_to_start_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    assert text is not None
    assert re.search(rf"^    \S.*examples/{path.name}", text, re.MULTILINE)
    assert f"[{path.name}]({path.name})" in (ROOT / "examples" / "README.md").read_text()


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    assert {path.name for path in EXAMPLES} == set(re.findall(r'"(\w+\.py)"', source)) | {"tiny_trainer.py"}


def test_run_from_python(user: LocalUser) -> None:
    lines = printed(user, "run_from_python.py")
    assert lines[0].startswith("from-python is job local-")
    assert "completed at step 50" in lines
    assert "  the run completed (exit code 0)" in lines
    first, last = map(float, re.findall(r"\d\.\d\de[+-]\d\d", lines[-1]))
    assert first > last
    again = printed(user, "run_from_python.py", "--cluster", "nix", exit_code=1)
    assert again == ["nix: no cluster profile has this name; " + again[0].partition("; ")[2]]


def test_sweep(user: LocalUser) -> None:
    lines = printed(user, "sweep.py", "--lr", "0.01", "0.3")
    assert [line.partition(",")[0] for line in lines[:2]] == [
        "sweep-lr-0.01: completed",
        "sweep-lr-0.3: completed",
    ]
    assert lines[2] == "best learning rate: 0.3"


def test_classify_log(user: LocalUser) -> None:
    lines = printed(user, "classify_log.py")
    assert lines[0].startswith("root cause: gpu_oom, line 2 of ")
    assert "rank 3" in lines[1]
    log = user.directory / "fine.out"
    log.write_text("step 1\nstep 2\n")
    assert printed(user, "classify_log.py", log) == ["no fault was found"]


def test_read_checkpoint(user: LocalUser) -> None:
    root = user.directory / "checkpoints"
    root.mkdir()
    save(root, 400)
    lines = printed(user, "read_checkpoint.py", root)
    assert "step 400" in lines[0]
    assert lines[1].startswith("embed.weight: shape (13, 7), from ")
    assert lines[2] == "every byte is sound"
    assert len(printed(user, "read_checkpoint.py", user.directory / "nix", exit_code=1)) == 1


def test_submitit_function(user: LocalUser) -> None:
    lines = printed(user, "submitit_function.py", "--cluster", "local")
    assert "(144, " in lines[0]
    assert lines[1] == "array: [0, 1, 4, 9]"


def test_ddp(user: LocalUser) -> None:
    """Two ranks of torch on CPUs, with the two lines: the run has its steps."""
    program = ROOT / "examples" / "ddp.py"
    quick = ["--set", "slurm.ranks_per_node=2", "--set", "aegis.grace_s=1"]
    user.zslurm("submit", "--cluster", "local", *quick, "--wait", "--", sys.executable, program, "--steps", "15")
    assert user.steps("ddp")[-1]["step"] == 15
    assert b"on 2 ranks" in user.run_dir("ddp").attempt(1).rank_log(0).read_bytes()


@pytest.mark.parametrize("example", ["recover_ddp.py", "recover_fsdp2.py"])
def test_recovering_programs(user: LocalUser, example: str) -> None:
    """One rank outside of a run: it only trains. With lost ranks: tests/submit/test_recovering.py."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    user.environment |= rank
    lines = printed(user, example, "--steps", "3")
    assert [line.partition(" loss ")[0] for line in lines[:3]] == ["step 1", "step 2", "step 3"]
    assert re.fullmatch(r"weights \S+ after 3 steps on 1 ranks", lines[3])
