"""A run with a snapshot runs what was submitted: our packages, and the checkout around the working directory."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.submit.scripted_slurm import BAD_TIME, CANCELLED, ScriptedSlurm
from tests.submit.specs import run_spec
from tests.train.runs import make_corpus
from zslurm.config.spec import RunSpec
from zslurm.core import errors
from zslurm.core.errors import SlurmRefused, ZslurmError
from zslurm.job.preparation import code_copy
from zslurm.job.preparation.code_copy import job_code
from zslurm.run.run_dir import RunDir
from zslurm.submit.script.render import render
from zslurm.submit.submit import submit


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout in which the user stands two folders deep; with a Slurm in scripts."""
    make_corpus(tmp_path / "tokens.h5")
    root = tmp_path / "project"
    (root / "a" / "b").mkdir(parents=True)
    (root / "tool.py").write_text("VERSION = 1\n")
    (root / ".gitignore").write_text("ignored\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    monkeypatch.chdir(root / "a" / "b")
    ScriptedSlurm(tmp_path / "bin", monkeypatch)
    return root


def spec_of(directory: Path, **run: Any) -> RunSpec:
    return run_spec(directory, run={"snapshot": "copy", **run}, cluster={"name": "lab", "launcher": "slurm"})


def copied(run: RunDir) -> set[str]:
    work = run.code_copy / "work"
    return {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}


def test_tracked_and_new_files_are_copied_and_ignored_ones_are_not(tmp_path: Path, checkout: Path) -> None:
    (checkout / "tool.py").write_text("VERSION = 2\n")
    (checkout / "a" / "new.py").write_text("x\n")
    (checkout / "ignored").write_text("x\n")
    (checkout / "link").symlink_to("tool.py")
    done = submit(spec_of(tmp_path))
    assert copied(done.run) == {".gitignore", "tool.py", "a/new.py", "link"}
    assert (done.run.code_copy / "work" / "tool.py").read_text() == "VERSION = 2\n"
    assert (done.run.code_copy / "work" / "link").is_symlink()
    assert (done.run.code_copy / "packages" / "zslurm" / "sbatch_templates" / "train.sbatch.j2").is_file()
    assert done.notes == []


def test_large_and_private_new_files_stay_out_and_are_told(tmp_path: Path, checkout: Path) -> None:
    (checkout / "weights.bin").write_bytes(b"x" * (code_copy.LARGEST_UNTRACKED_FILE + 1))
    (checkout / ".env").write_text("HF_TOKEN=x\n")
    done = submit(spec_of(tmp_path))
    assert copied(done.run) == {".gitignore", "tool.py"}
    (note,) = done.notes
    assert ".env (11 B)" in note
    assert "weights.bin (1.00 MiB)" in note


def test_runs_inside_the_checkout_are_not_copied_into_each_other(tmp_path: Path, checkout: Path) -> None:
    spec = spec_of(tmp_path, runs_dir=str(checkout / "runs"))
    submit(spec)
    again = submit(spec.model_copy(update={"run": spec.run.model_copy(update={"name": "second"})}))
    assert copied(again.run) == {".gitignore", "tool.py"}


def test_the_job_runs_the_copy_after_the_original_has_changed(tmp_path: Path, checkout: Path) -> None:
    spec = spec_of(tmp_path)
    run = submit(spec).run
    (checkout / "tool.py").write_text("VERSION = 2\n")
    question = "import os, tool; print(tool.VERSION, os.getcwd())"
    command = f'{sys.executable} -P -c "{question}" > {tmp_path}/said; echo 0 > "$over"; true'
    script = render(spec, run, command=command)
    environment = {"PATH": os.defpath, "SLURM_JOB_ID": "7"}
    subprocess.run(["bash"], input=script.text, text=True, cwd=checkout, env=environment, check=True)
    assert (tmp_path / "said").read_text() == f"1 {run.code_copy}/work/a/b\n"


def test_outside_a_checkout_only_our_packages_are_copied(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = submit(spec_of(tmp_path)).run
    assert [path.name for path in run.code_copy.iterdir()] == ["packages"]
    code = job_code(spec_of(tmp_path), run)
    assert code is not None
    assert (code.path, code.directory) == (f"{run.code_copy}/packages", None)


def test_the_copy_of_our_packages_has_byte_code_that_holds(tmp_path: Path, checkout: Path) -> None:
    py_compile.compile(str(errors.__file__))
    source = submit(spec_of(tmp_path)).run.code_copy / "packages" / "zslurm" / "core" / "errors.py"
    header = Path(importlib.util.cache_from_source(str(source))).read_bytes()[8:16]
    assert struct.unpack("<II", header) == (int(source.stat().st_mtime), source.stat().st_size)


def test_a_new_submission_replaces_the_copy_and_a_refused_one_does_not(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit(spec_of(tmp_path)).run
    (checkout / "tool.py").write_text("VERSION = 2\n")
    slurm = ScriptedSlurm(tmp_path / "bin2", monkeypatch)
    slurm.gives(CANCELLED)
    slurm.refuses(BAD_TIME)
    with pytest.raises(SlurmRefused):
        submit(spec_of(tmp_path))
    assert (run.code_copy / "work" / "tool.py").read_text() == "VERSION = 1\n"
    slurm.gives(CANCELLED)
    submit(spec_of(tmp_path))
    assert (run.code_copy / "work" / "tool.py").read_text() == "VERSION = 2\n"
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".code")] == []


def test_a_checkout_too_large_to_copy_is_refused(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_copy, "LARGEST_COPY", 5)
    with pytest.raises(ZslurmError, match=r"project: the checkout has more than 5 B to copy; let git ignore"):
        submit(spec_of(tmp_path))
    assert not (tmp_path / "runs" / "tiny" / "submissions.jsonl").exists()


def test_without_a_snapshot_commit_changes_and_new_files_are_recorded(tmp_path: Path, checkout: Path) -> None:
    (checkout / "tool.py").write_text('VERSION = 2\npassword = "hunter22"\n')
    (checkout / "new.py").write_text("x\n")
    run = submit(spec_of(tmp_path, snapshot="none")).run
    assert not run.code_copy.exists()
    code = json.loads(run.code.read_text())
    assert len(code["git_commit"]) == 40
    assert code["git_changed"] is True
    assert "+VERSION = 2" in run.code_diff.read_text()
    assert "hunter22" not in run.code_diff.read_text()
