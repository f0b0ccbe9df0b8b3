"""The allocator's options are set before torch is there, and never against the user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import clean_environment
from zslurm.train.allocator import DEFAULT, VARIABLES, set_allocator


def test_they_are_set_where_the_user_set_none() -> None:
    environ = {"PATH": "/bin"}
    set_allocator(environ)
    assert environ == {"PATH": "/bin", "PYTORCH_ALLOC_CONF": DEFAULT}


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:False", ""])
def test_what_the_user_sets_stays_as_it_is(name: str, value: str) -> None:
    environ = {name: value}
    set_allocator(environ)
    assert environ == {name: value}


PROGRAM = """
import builtins, os, runpy, sys
original = builtins.__import__
def watch(name, *rest, **options):
    if name == "torch":
        print("torch comes with", os.environ.get("PYTORCH_ALLOC_CONF"), flush=True)
        os._exit(0)
    return original(name, *rest, **options)
builtins.__import__ = watch
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["zslurm.train", "zslurm.job.rank"])
def test_both_ways_to_start_a_rank_set_them_before_they_import_torch(module: str, tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    arguments = [str(tmp_path)] if module == "zslurm.train" else [str(tmp_path), "1"]
    environment = clean_environment() | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *arguments],
        env={name: value for name, value in environment.items() if name not in VARIABLES},
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"torch comes with {DEFAULT}\n", done.stderr
