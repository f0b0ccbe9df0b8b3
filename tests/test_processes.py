"""Tests that run in forked processes are reported as if they had run in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

_ONE = """
import os, warnings
import pytest

@pytest.fixture(scope="module")
def process(tmp_path_factory):
    yield os.getpid()
    (tmp_path_factory.getbasetemp().parent / "torn-down").touch()

def test_first(process):
    print("printed by the first")
    assert process == os.getpid() != os.getppid()

def test_second(process):
    assert process == os.getpid(), "tests of a file run in one process"
    print("printed by the second")
    assert False, "it fails"

def test_third(process):
    warnings.warn("something is old", DeprecationWarning)
"""
_OTHER = """
import os, signal

def test_before():
    pass

def test_dies(tmp_path):
    os.kill(os.getpid(), signal.SIGKILL)

def test_after(tmp_path):
    pass

def test_skips():
    import pytest
    pytest.skip("not here")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_one.py").write_text(_ONE)
    (tmp_path / "test_other.py").write_text(_OTHER)
    return tmp_path


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (project / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "tests.distribution", "--basetemp", "temporary"]
    return subprocess.run(
        [*command, "--processes", "2", *options],
        cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_test_is_reported_once_and_one_that_kills_its_process_costs_only_itself(project: Path) -> None:
    done = run(project, "-rs", "-v")
    assert done.returncode == 1
    assert "2 failed, 4 passed, 1 skipped, 1 warning" in done.stdout
    outcomes = re.findall(r"^test_\w+\.py::(\w+) (\w+)", done.stdout, re.MULTILINE)
    assert sorted(outcomes) == [
        ("test_after", "PASSED"),
        ("test_before", "PASSED"),
        ("test_dies", "FAILED"),
        ("test_first", "PASSED"),
        ("test_second", "FAILED"),
        ("test_skips", "SKIPPED"),
        ("test_third", "PASSED"),
    ]
    assert "the process that ran this test ended with exit code -9" in done.stdout
    assert "assert False" in done.stdout
    assert "printed by the second" in done.stdout
    assert "printed by the first" not in done.stdout
    assert "something is old" in done.stdout
    assert "not here" in done.stdout
    assert (project / "temporary" / "torn-down").exists()


def test_no_test_begins_after_the_last_failure_that_is_allowed(project: Path) -> None:
    (project / "test_other.py").unlink()
    done = run(project, "--maxfail", "1")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "stopping after 1 failures" in done.stdout
    assert (project / "temporary" / "torn-down").exists()
