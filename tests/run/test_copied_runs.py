"""A run directory that was copied or moved acts on itself, never on the run that it was made from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.local_runs import LocalUser
from tests.submit.scripted_slurm import FORGOTTEN, RUNNING, ScriptedSlurm
from tests.submit.specs import run_spec
from tests.train.runs import make_corpus
from zslurm.config.spec import RunSpec
from zslurm.core.errors import NotFound, ZslurmError
from zslurm.run.find import find_to_change
from zslurm.run.index import find_run
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import last_job, look
from zslurm.submit.control import cancel, requeue
from zslurm.submit.submit import submit
from zslurm.train.jsonl import read_jsonl


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def copy(source: Path, target: Path) -> RunDir:
    """As `cp -a`."""
    shutil.copytree(source, target, symlinks=True)
    return RunDir(target)


def test_a_copy_of_a_run_that_trains_has_a_life_of_its_own(user: LocalUser) -> None:
    run_file = user.write_run("first", save_every=5)
    user.zslurm("submit", run_file)
    user.wait_for_step("first", 8)
    ranks = {process.pid for process in user.processes()}
    copy(user.run_dir("first").path, user.run_dir("second").path)
    state = user.state("second")
    assert (state["state"], state["active"], state["job_id"]) == ("copied", False, None)
    for command in ("cancel", "requeue"):
        refused = user.zslurm(command, "second", exit_code=1).stderr
        assert "runs/second: is a copy of " in refused
        assert f"runs/first, and has no job to {command}: job local-1 is the original's" in refused

    # The two share their checkpoints' past, and nothing else.
    user.zslurm("submit", run_file, "--set", "run.name=second")
    user.wait_for_step("second", user.steps("second")[-1]["step"] + 2, attempt=2)
    assert user.state("second")["job_id"] == "local-2"
    assert ranks <= {process.pid for process in user.processes()}, "the original's processes are untouched"
    assert user.zslurm("cancel", "second", "--wait").stderr == "cancelled job local-2 of second\n"
    assert user.state("first")["state"] == "running"
    assert ranks <= {process.pid for process in user.processes()}
    user.zslurm("cancel", "first", "--wait")


def test_a_run_that_was_moved_is_requeued_where_it_is(user: LocalUser) -> None:
    user.zslurm("submit", user.write_run("first"))
    user.wait_for_step("first", 2)
    user.zslurm("cancel", "first", "--wait")
    user.wait_for_end("first")
    before, after = user.run_dir("first"), user.run_dir("second")
    before.path.rename(after.path)
    assert user.state("local-1")["run_dir"] == str(after.path), "its job is still its job"
    assert user.zslurm("requeue", "second").stderr == "requeued second as job local-2\n"
    user.wait_for_step("second", 1, attempt=2)
    user.zslurm("cancel", "local-2", "--wait")
    user.wait_for_end("second")
    assert not before.path.exists()
    assert [row["run_dir"] for row in read_jsonl(after.submissions) if row["action"] == "submit"] == [
        str(before.path),
        str(after.path),
    ]


def test_a_user_with_two_homes_or_none_gets_no_job_number_twice(user: LocalUser) -> None:
    run_file = user.write_run("shared", "exit-3:2:0:*", aegis={"mode": "off"})  # it may be submitted again
    everywhere = dict(user.environment)
    numbers = []
    for home in ("one", "two", "unwritable"):
        user.environment = everywhere | {"HOME": str(user.directory / home)}
        del user.environment["XDG_STATE_HOME"]
        if home == "unwritable":
            (user.directory / home).touch()  # no directory, so that root cannot write there either
        numbers.append(user.zslurm("submit", "-q", run_file, "--wait", exit_code=1).stdout.strip())
    assert numbers == ["local-1", "local-2", "local-3"]
    run = user.run_dir("shared")
    assert len(user.events("shared", "run_ended")) == 3, "each job ran, and took no other's end for its own"
    assert sorted(path.name for path in run.logs.glob("job-*")) == [f"job-local-{n}.log" for n in (1, 2, 3)]


def test_a_completed_run_is_not_started_for_nothing(user: LocalUser) -> None:
    run_file = user.write_run("short", steps=3, trainer="real")
    user.zslurm("submit", run_file, "--wait")
    expected = (
        "zslurm: short: the run is complete: step 3 of 3 is saved, and there is nothing left to train; give it "
        "more tokens to continue (now phases[0].tokens=288; for example `zslurm submit RUN_FILE --set "
        "phases.0.tokens=576`), or start over with --new\n"
    )
    for command in (("submit", run_file), ("submit", "--dry-run", run_file), ("requeue", "short")):
        assert user.zslurm(*command, exit_code=1).stderr == expected
    assert len(user.run_dir("short").attempt_dirs()) == 1
    user.zslurm("submit", run_file, "--set", "phases[0].tokens=576", "--wait")
    assert user.state("short")["checkpoint_step"] == 6
    user.zslurm("submit", run_file, "--new", "--wait")
    assert user.state("short")["checkpoint_step"] == 3


# --- the same under Slurm, by its files -------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    make_corpus(tmp_path / "tokens.h5")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    for program in ("scancel", "scontrol"):
        slurm.write_program(program, f"echo $0 $* >> {tmp_path}/done")
    return slurm


def spec_of(directory: Path, name: str = "tiny") -> RunSpec:
    return run_spec(directory, cluster={"name": "lab", "launcher": "slurm"}, run={"name": name})


def test_no_command_on_a_copy_reaches_the_job_of_the_original(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    slurm.gives(RUNNING)
    run = submit(spec_of(tmp_path)).run
    twin = RunDir(run.path.with_name("twin"))
    shutil.copytree(run.path, twin.path)
    assert look(run).active
    assert (look(twin).state, look(twin).active) == ("copied", False)
    for act in (cancel, requeue):
        with pytest.raises(
            ZslurmError, match=rf"is a copy of {run.path}, and has no job to {act.__name__}: job 4 "
        ):
            act(twin)
    with pytest.raises(ZslurmError, match="is a copy of"):
        requeue(twin, exclude="node1")
    assert not (tmp_path / "done").exists(), "Slurm was asked for nothing"
    assert last_job(twin) is None


@pytest.mark.usefixtures("slurm")
def test_a_moved_run_keeps_its_job_and_a_copy_of_it_gets_none(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    slurm.gives(RUNNING)
    run = submit(spec_of(tmp_path)).run
    moved = RunDir(run.path.rename(run.path.with_name("moved")))
    assert look(moved).active
    assert find_run(RUNNING) == moved
    twin = copy(moved.path, run.path.with_name("twin"))
    assert look(twin).state == "copied"
    # At the recorded path lies what the job works in, whatever inode it has.
    back = copy(moved.path, run.path)
    assert look(back).active
    assert look(moved).state == "copied"


@pytest.mark.usefixtures("slurm")
def test_a_path_through_a_link_is_the_run_itself(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    slurm.gives(RUNNING)
    run = submit(spec_of(tmp_path)).run
    (tmp_path / "link").symlink_to(run.path.parent)
    assert look(RunDir(tmp_path / "link" / run.name)).active


def test_a_job_id_does_not_mean_another_run_that_took_the_name(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    old = submit(spec_of(tmp_path)).run
    slurm.gives("998")
    new = submit(spec_of(tmp_path), new=True).run
    assert find_run("998") == new == old
    aside = find_run(FORGOTTEN)
    assert aside.path.name.startswith("tiny.")
    shutil.rmtree(aside.path)
    with pytest.raises(NotFound, match="no run of yours has this job id"):
        find_run(FORGOTTEN)


def test_an_earlier_job_of_a_run_is_not_its_present_one(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path)).run
    slurm.gives(RUNNING)
    submit(spec_of(tmp_path))
    assert find_to_change(RUNNING, "cancel") == find_to_change("tiny", "cancel") == run
    with pytest.raises(ZslurmError, match="999: an earlier job of tiny, whose job is 4 now; `zslurm cancel tiny`"):
        find_to_change(FORGOTTEN, "cancel")


def test_a_directory_that_was_renamed_to_no_runs_name_says_so(user: LocalUser) -> None:
    run_file = user.write_run("first", "exit-3:2:0:*", aegis={"mode": "off"})  # it may be submitted again
    user.zslurm("submit", run_file, "--wait", exit_code=1)
    user.run_dir("first").path.rename(user.directory / "a copy")
    refused = user.zslurm("requeue", str(user.directory / "a copy"), exit_code=2).stderr
    assert "a copy: rename the directory: run.name must be letters, digits" in refused
