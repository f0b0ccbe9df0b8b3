"""What users get wrong, on a real Slurm: one clear line each, and nothing lost."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.config_files import slurm_version
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, at_work
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    """The user, and a partition that is open for ten minutes at a time, to one account, on two nodes."""
    closed = ["PartitionName=closed", "Nodes=node[0-1]", "MaxTime=10", "AllowAccounts=staff", "State=UP"]
    slurm_cluster.run_as_root(["scontrol", "create", *closed])
    try:
        with at_work(slurm_cluster, "refusals-test") as person:
            yield person
    finally:
        slurm_cluster.run_as_root(["scontrol", "delete", "PartitionName=closed"])


@pytest.fixture(scope="module")
def ended(slurm_cluster: SlurmCluster) -> Iterator[User]:
    """A user whose run `refused` has failed, and may be submitted again; what is refused leaves it alone."""
    with at_work(slurm_cluster, "refused-test") as person:
        person.zslurm("submit", person.write_run("refused", "exit-3:2:0:*", nodes=1, aegis={"mode": "off"}))
        person.wait_for_state("refused", "failed")
        yield person


def one_line(message: str) -> str:
    (line,) = message.splitlines()
    assert line.startswith("zslurm: ")
    return line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--partition", "nonesuch"), "invalid partition specified: nonesuch"),
        (("--set", "cluster.gpu_type=h100"), "Requested node configuration is not available"),
        (("--set", "cluster.gpus_per_node=64"), "Requested node configuration is not available"),
        (("--set", "slurm.constraint=nonesuch"), "Invalid feature specification"),
        (("--set", "slurm.mem=9999G"), "Memory specification can not be satisfied"),
        (("--exclude", "nonesuch[1-"), "Invalid"),
        (("--reservation", "nonesuch"), "Requested reservation is invalid"),
        (("--", "--nonesuch=1"), "nonesuch"),
    ],
)  # fmt: skip
def test_what_slurm_refuses_is_passed_on_and_the_run_stays_as_it_was(
    ended: User, options: tuple[str, ...], words: str
) -> None:
    user = ended
    run = user.directory / "runs" / "refused"
    files = [run / name for name in ("config.json", "script.sh", "submissions.jsonl", "code.json")]
    before = [path.read_bytes() for path in files]
    code, message = user.fails("submit", user.directory / "refused.yaml", *options)
    assert code == 1
    assert words in one_line(message)
    assert [path.read_bytes() for path in files] == before
    assert user.state("refused")["state"] == "failed"


@pytest.mark.parametrize(
    ("options", "reason", "start"),
    [
        (("--nodes", "9"), "(Partition|node configuration)", "# start: never; sbatch: "),
        (
            ("--partition", "closed", "--time", "60"),
            "PartitionTimeLimit",
            "# start: never; partition closed allows",
        ),
        # `sbatch --test-only` does not look at accounts.
        (("--partition", "closed", "--time", "10", "--account", "nobodys"), "account", "# start: about "),
    ],
)
def test_what_slurm_takes_and_never_starts_says_why(
    user: User, options: tuple[str, ...], reason: str, start: str
) -> None:
    if reason == "account" and slurm_version() >= (24, 11, 0):
        pytest.skip("since Slurm 24.11 AllowAccounts is not enforced without accounting")
    run_file = user.write_run("waits")
    done = user.cluster.zslurm("submit", run_file, *options, cwd=user.directory, check=False)
    if done.returncode:  # this Slurm refuses it at once
        assert re.search(reason, one_line(done.stderr), re.IGNORECASE)
        return
    # Slurm says None or Priority until its schedulers have looked at the job.
    wait_for(
        lambda: re.search(reason, str(user.state("waits")["reason"])), f"reason {reason}", every_s=COMMAND_EVERY_S
    )
    assert start in user.zslurm("submit", run_file, *options, "--set", "run.name=other", "--dry-run")


def test_a_job_on_drained_nodes_waits_and_says_so(user: User) -> None:
    nodes = ",".join(user.cluster.node_names)
    user.cluster.run_as_root(["scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=test"])
    user.zslurm("submit", user.write_run("drained", nodes=1, steps=4))
    # Slurm itself goes from one of these to another, as its two schedulers look at the job in turn.
    words = ("DRAINED", "Resources", "ReqNodeNotAvail")
    wait_for(
        lambda: any(word in str(user.state("drained")["reason"]) for word in words),
        "Slurm's reason",
        every_s=COMMAND_EVERY_S,
    )
    assert any(word in user.zslurm("status", "drained") for word in words)
    user.cluster.run_as_root(["scontrol", "update", f"NodeName={nodes}", "State=RESUME"])
    assert user.wait_for_state("drained", "completed", "failed")["state"] == "completed"


BROKEN = {
    "undefined": ("{% block setup %}\n{{ nonesuch }}\n{% endblock %}\n", "'nonesuch' is undefined"),
    "shell": ("{% block setup %}\nif true; then\n{% endblock %}\n", "not valid shell"),
    "jinja": ("{% block setup %}\n", "not a valid template"),
    "no-loop": (
        "{% block launch %}\nsrun train\n{% endblock %}\n",
        "does not have the loop around the supervisor",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_template_is_named_with_its_line_and_nothing_is_submitted(user: User, kind: str) -> None:
    text, words = BROKEN[kind]
    template = user.directory / "site.sbatch.j2"
    template.write_text('{% extends "train.sbatch.j2" %}\n' + text)
    run_file = user.write_run("templated", cluster={"template": str(template)})
    code, message = user.fails("submit", run_file)
    assert code == 2
    assert f"{template}" in one_line(message)
    assert words in message
    assert not (user.directory / "runs").exists()
    assert user.cluster.run(["squeue", "--noheader"]).stdout == ""


@pytest.fixture
def small_disk(user: User) -> Iterator[Path]:
    """A file system of 256 KiB that belongs to the user."""
    place = user.directory / "small"
    place.mkdir()
    options = f"size=256k,uid={user.cluster.user.pw_uid},mode=755"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # a process may still be in it


def fill(user: User, disk: Path) -> None:
    user.cluster.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=1k"], check=False)


def submit_to(user: User, place: Path, **sections: Any) -> Path:
    return user.write_run("full", nodes=1, run={"name": "full", "runs_dir": str(place)}, **sections)


def test_a_full_disk_is_one_line_and_takes_no_job(user: User, small_disk: Path) -> None:
    fill(user, small_disk)
    code, message = user.fails("submit", submit_to(user, small_disk / "runs"))
    assert code in (1, 2)
    assert "No space left on device" in one_line(message)
    assert user.cluster.run(["squeue", "--noheader"]).stdout == ""


def test_a_disk_that_fills_up_later_leaves_the_accepted_run(user: User, small_disk: Path) -> None:
    run_file = submit_to(user, small_disk / "runs", slurm={"flags": {"begin": "now+1hour"}})
    user.zslurm("submit", run_file)
    user.zslurm("cancel", str(small_disk / "runs" / "full"))
    user.wait_for_state(str(small_disk / "runs" / "full"), "cancelled")
    run = small_disk / "runs" / "full"
    before = (run / "config.json").read_bytes()
    fill(user, small_disk)
    code, message = user.fails("submit", run_file, "--set", "run.seed=4")
    assert code in (1, 2)
    assert "No space left on device" in one_line(message)
    assert (run / "config.json").read_bytes() == before
    assert user.state(str(run))["state"] == "cancelled"


def test_a_run_directory_that_others_own_is_one_line(user: User) -> None:
    place = user.directory / "roots"
    place.mkdir(mode=0o755)
    code, message = user.fails("submit", submit_to(user, place))
    assert code == 2
    assert "Permission denied" in one_line(message)


def test_hostile_values_of_new_keys_run_nothing(user: User) -> None:
    trap = user.directory / "trapped"
    evil = f"a'b\"c $(touch {trap}) `touch {trap}`; touch {trap}"
    run_file = user.write_run("hostile", nodes=1, steps=4, cluster={"env": {"DB_PASSWORD": evil}})
    user.zslurm("submit", run_file, "--", "--comment", evil)
    assert user.wait_for_state("hostile", "completed", "failed")["state"] == "completed"
    code, message = user.fails("submit", run_file, "--dependency", evil)
    assert code in (2, 3)
    assert one_line(message)
    module = user.write_run("module", nodes=1, cluster={"modules": [evil]})
    user.zslurm("submit", module)
    assert user.wait_for_state("module", "failed", "completed")["state"] == "failed", "there is no such module"
    assert not trap.exists()
