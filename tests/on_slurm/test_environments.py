"""Where the ranks' Python comes from, on a real Slurm: a container, a copy on each node, a copy of the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.job.fake_apptainer import FakeApptainer
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import ENDLESS, STEPS, User, at_work
from zslurm.slurm.hostlist import expand

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    # Which Python the processes of a run are, is what these tests ask.
    with at_work(slurm_cluster, "environments-test", forks=False) as person:
        yield person


@pytest.fixture
def outside(slurm_cluster: SlurmCluster) -> Iterator[User]:
    """A user whose supervisors and agents, which are in no container, are forked."""
    with at_work(slurm_cluster, "environments-test") as person:
        yield person


def container(user: User, **settings: Any) -> tuple[FakeApptainer, dict[str, Any]]:
    """An apptainer for the user, and the section `cluster` of a run inside it."""
    python = user.cluster.installation().python
    apptainer = FakeApptainer(user.directory, python)
    for path in (apptainer.log, apptainer.image):
        path.chmod(0o666)
    section = {
        "setup": [f"export PATH={apptainer.directory}:$PATH"],
        "container": {"image": str(apptainer.image), "python": str(python), **settings},
    }
    return apptainer, section


def test_ranks_start_inside_are_requeued_and_continue(outside: User) -> None:
    """Signals reach the ranks through the container, so that a requeue loses no step."""
    user = outside
    apptainer, cluster = container(user, binds=["/usr/share:/site:ro"], options=["--rocm"])
    user.zslurm("submit", user.write_run("inside", steps=ENDLESS, cluster=cluster))
    user.wait_for_step("inside", 3)
    checks = [call for call in apptainer.calls if "zslurm.job.preparation.container_check" in call["command"]]
    ranks = [call for call in apptainer.calls if "zslurm.job.program.rank" in call["command"]]
    assert len(checks) == 2, "one for each node"
    assert sorted(call["rank"] for call in ranks) == ["0", "1"]
    assert {tuple(call["options"]) for call in ranks} == {("--rocm",)}
    assert all({"/usr/share:/site:ro", "/dev/shm", str(user.directory)} <= set(call["binds"]) for call in ranks)
    assert all(call["pythonpath"].endswith("/runs/inside/code/packages") for call in ranks)
    (checked,) = [event for event in user.events("inside") if event["event"] == "container_checked"]
    assert expand(checked["nodes"]) == user.nodes_of("inside")

    user.zslurm("requeue", "inside", "--now")
    stopped_at = user.stopped_at("inside")
    user.wait_for_step("inside", stopped_at + 2)
    second = [row for row in user.steps("inside") if row["attempt"] == 2]
    assert second[0]["step"] == stopped_at + 1
    user.zslurm("cancel", "inside", "--wait")


def small_environment(user: User) -> Path:
    """A virtual environment of the user's that finds everything else where the installation has it."""
    installation = user.cluster.installation()
    prefix = user.directory / "venv"
    user.cluster.run([installation.python, "-m", "venv", "--without-pip", prefix])
    code = "import sys; print(*[path for path in sys.path if 'site-packages' in path], sep='\\n')"
    packages = user.cluster.run([installation.python, "-c", code]).stdout
    (target,) = prefix.glob("lib/python*/site-packages")
    (target / "rest.pth").write_text(f"{packages}{installation.sources}\n")
    return prefix


def test_the_environment_is_staged_once_per_node_and_goes_with_the_job(user: User) -> None:
    prefix = small_environment(user)
    local_disk = user.directory / "node-local"
    user.cluster.run(["mkdir", local_disk])
    cluster = {"venv": str(prefix), "stage_env": str(local_disk)}
    command = programs.command(STEPS, **user.places() | {"python": "python"})
    run_file = user.write_run("staged", trainer_section={"command": command}, cluster=cluster)
    job_id = user.zslurm("submit", "-q", run_file)
    state = user.wait_for_state("staged", "completed", "failed")
    assert state["state"] == "completed", user.zslurm("logs", "staged", "--supervisor")
    assert state["step"] == STEPS
    staged = f"{local_disk}/zslurm-env-{user.cluster.user.pw_uid}-{job_id}/venv"
    (event,) = [event for event in user.events("staged") if event["event"] == "environment_staged"]
    assert event["path"] == staged
    attempt = (user.directory / "runs" / "staged" / "attempts" / "000001" / "attempt.json").read_text()
    assert f"{staged}/bin/python" in attempt
    left = {path.name for path in local_disk.iterdir()}
    assert left <= {f"zslurm-kernels-{user.cluster.user.pw_uid}"}, "nothing stays but kernels for the next job"
    assert len(list((user.directory / "runs" / "staged").glob("env-*.tar"))) == 1


def test_a_requeue_runs_the_code_that_was_submitted(outside: User) -> None:
    """The job's shell looks into the copy; what changes in the checkout meanwhile does not reach it."""
    user = outside
    project = user.directory / "project"
    user.cluster.run(["git", "init", "-q", project])
    tool = project / "version.sh"
    tool.write_text("echo one\n")
    user.cluster.run(["chown", str(user.cluster.user.pw_uid), tool], check=False)
    run_file = user.write_run(
        "frozen",
        steps=ENDLESS,
        run={"name": "frozen", "snapshot": "copy", "runs_dir": str(user.directory / "runs")},
        cluster={"template": "train"},
    )
    template = user.directory / "says.sbatch.j2"
    template.write_text(
        '{% extends "train.sbatch.j2" %}{% block python %}{{ super() }}\n'
        "{ sh ./version.sh; pwd; } >> {{ run_dir | sh }}/said\n{% endblock %}\n"
    )
    user.cluster.zslurm("submit", run_file, "--set", f"cluster.template={template}", cwd=project)
    user.wait_for_step("frozen", 2)
    tool.write_text("echo two\n")
    user.zslurm("requeue", "frozen", "--now")
    stopped_at = user.stopped_at("frozen")
    user.wait_for_step("frozen", stopped_at + 1)
    code = user.directory / "runs" / "frozen" / "code"
    said = (user.directory / "runs" / "frozen" / "said").read_text().splitlines()
    assert said == ["one", f"{code}/work"] * 2
    assert (code / "packages" / "zslurm" / "train" / "loop.py").is_file()
    user.zslurm("cancel", "frozen", "--wait")
