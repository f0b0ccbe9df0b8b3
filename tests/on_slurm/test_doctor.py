"""`zslurm doctor` on a real Slurm: eight nodes, each with a tree of files of its own, and faults in some."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkout import DOCS
from tests.doctor import rccl_logs
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.doctor_site import PROFILE, Site
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import directory_of
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.errors import Exit
from zslurm.slurm.on_nodes.run_on_nodes import JOB_PREFIX

pytestmark = pytest.mark.slurm


@pytest.fixture
def site(slurm_cluster: SlurmCluster) -> Iterator[Site]:
    with directory_of(slurm_cluster, "doctor-test") as directory:
        yield Site(slurm_cluster, directory)


def rows(stdout: str, *statuses: str) -> list[list[str]]:
    """Rows of a piped table that have one of the statuses."""
    split = [line.split("\t") for line in stdout.splitlines()]
    return [row for row in split if len(row) == 5 and row[1] in statuses]


def results(report: dict[str, Any], status: str) -> set[tuple[str, str]]:
    return {(result["check"], result["node"]) for result in report["results"] if result["status"] == status}


def test_healthy_nodes_pass_every_check(site: Site) -> None:
    done = site.doctor()
    not_passed = [row[0] for row in rows(done.stdout, "fail", "warn", "unavailable")]
    assert not_passed == ["small-product"], f"torch sees no GPU here: {done.stdout}"
    assert done.returncode == Exit.DONE
    assert "8 nodes: no failure" in done.stderr
    checks = {row[0]: row for row in rows(done.stdout, "pass")}
    assert {"gpu-ecc", "nics", "rails", "memlock", "clock", "shared-files", "python", "slurm"} <= set(checks)
    assert checks["gpu-ecc"][2:4] == ["8", "node[0-7]"]
    assert checks["python"][2:4] == ["9", "(login), node[0-7]"]
    assert site.doctor("-q", "--nodes", "1").stdout == ""
    assert not list(site.directory.glob(".zslurm-doctor-*"))


def documented() -> list[list[str]]:
    """The lines of the example in docs/doctor.md, by columns."""
    document = (DOCS / "doctor.md").read_text()
    (example,) = re.findall(r"^```text\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    return [re.split(r"\s{2,}", line) for line in example.splitlines()]


def test_faulty_nodes_are_named_and_listed_for_exclude(site: Site) -> None:
    site.nodes[1].fake.remove_nic("ionic_6")
    site.nodes[3].rows(gpu2={"uncorrectable": 1})
    site.profile(setup=['[ "$SLURMD_NODENAME" != node5 ] || ulimit -l 64'])
    site.cluster.kill_node("node6", noticed_at_once=True)
    done = site.doctor("--nodelist", "node[0-7]")
    assert done.returncode == Exit.CHECK_FAILED
    assert rows(done.stdout, "fail") == [
        ["state", "fail", "1", "node6", "Slurm shows down: killed"],
        ["gpu-ecc", "fail", "1", "node3", "GPU 2: 1 uncorrectable error (UMC)"],
        ["nics", "fail", "1", "node1", "rail 6: ionic_6 is missing (7 RDMA devices are there)"],
        ["memlock", "fail", "1", "node5", "memlock is 64.0 KiB, 0.001 GiB needed"],
    ]
    assert done.stdout.splitlines()[-1] == "exclude\tnode[1,3,5-6]"
    assert [*rows(done.stdout, "fail"), ["exclude", "node[1,3,5-6]"]] == documented()
    these = [word for check in ("gpu-ecc", "nics", "memlock") for word in ("--only", check)]
    assert site.doctor("-q", "--nodelist", "node[0-7]", *these).stdout == "node[1,3,5-6]\n"
    # Of its own accord the doctor asks only the nodes that could run a job now; the dead one is named.
    own = site.json(*these)
    assert (own["exclude"], len(own["asked"])) == ("node[1,3,5]", 7)
    assert own["not_asked"]["node6"].endswith(": killed")
    assert ("state", "node6") in results(own, "warn")


def test_a_network_that_is_not_the_profiles_fails_between_two_nodes(site: Site) -> None:
    """The ranks themselves are stand-ins that print what RCCL has printed elsewhere; no GPU is here."""
    site.nodes[3].rccl_log(rccl_logs.SOCKET)
    done = site.doctor("--nodelist", "node[0-4]", "--only", "transport")
    assert done.returncode == Exit.CHECK_FAILED
    (failed,) = rows(done.stdout, "fail")
    assert failed[:4] == ["transport", "fail", "1", "node3"]
    assert "RCCL opened TCP sockets, not AMD's plugin librccl-anp.so" in failed[4]
    assert done.stdout.splitlines()[-1] == "exclude\tnode3"
    assert sorted((site.directory / "ranks").read_text().splitlines()) == [
        "node0: rank 0 of 2",
        "node1: rank 1 of 2",
        "node2: rank 0 of 3",
        "node3: rank 1 of 3",
        "node4: rank 2 of 3",
    ]
    fine = site.json("--nodelist", "node6", "--only", "transport")
    assert results(fine, "pass") == {("transport", "node6")}, "alone it starts two ranks"


def test_a_node_whose_slurmd_just_died_is_named_and_the_others_are_examined(site: Site) -> None:
    site.nodes[3].rows(gpu2={"uncorrectable": 1})
    site.cluster.kill_node("node6")
    report = site.json("--nodelist", "node[0-7]")
    assert report["exclude"] == "node[3,6]"
    assert ("gpu-ecc", "node3") in results(report, "fail")
    assert {("answer", "node6"), ("state", "node6")} & results(report, "fail")
    assert {node for check, node in results(report, "pass") if check == "memlock"} == {
        f"node{index}" for index in (0, 1, 2, 3, 4, 5, 7)
    }
    site.cluster.kill_node("node6", noticed_at_once=True)  # its job ends sooner


def test_drift_is_told_as_these_differ_from_the_others(site: Site) -> None:
    for index in (2, 4):
        site.nodes[index].fake.write("opt/rocm/.info/version", "6.3.0-39")
    site.nodes[7].fake.write("proc/sys/kernel/osrelease", "6.8.0-40-generic")
    done = site.doctor("--only", "versions", "--only", "kernel")
    assert [row[:4] for row in rows(done.stdout, "fail", "warn")] == [
        ["kernel", "warn", "1", "node7"],
        ["versions", "fail", "2", "node[2,4]"],
    ]
    assert "these 2 differ from the other 6: ROCm is 6.3.0-39, not 6.4.1-83" in done.stdout
    assert done.stdout.splitlines()[-1] == "exclude\tnode[2,4]"


def test_a_driver_that_hangs_holds_up_only_its_own_checks(site: Site) -> None:
    site.profile(doctor=PROFILE["doctor"] | {"canary_s": 5})
    site.nodes[4].program("amd-smi", "exec sleep 600")
    report = site.json("--nodelist", "node[3-4]", "--only", "gpu-driver", "--only", "memlock")
    assert results(report, "fail") == {("gpu-driver", "node4")}
    assert report["exclude"] == "node4"


def test_a_node_that_waits_in_the_queue_says_why(site: Site) -> None:
    busy = site.cluster.sbatch("sleep 600", "--exclusive", "-w", "node2", cwd=site.directory)
    wait_for(
        lambda: site.cluster.node_states().get("node2") == "allocated", "node2 to be busy", every_s=COMMAND_EVERY_S
    )
    done = site.doctor("--nodelist", "node2", "--timeout", "8")
    assert done.returncode == Exit.SLURM_UNAVAILABLE
    assert "waits in the queue (" in done.stderr
    assert "did not start within 8 s" in done.stderr
    assert rows(done.stdout, "pass"), "the login node's checks are shown all the same"
    assert set(site.cluster.run(["squeue", "--noheader", "--format=%i"]).stdout.split()) == {busy}


def test_ctrl_c_cancels_the_job_that_waits(site: Site) -> None:
    site.cluster.sbatch("sleep 600", "--exclusive", "-w", "node2", cwd=site.directory)
    wait_for(
        lambda: site.cluster.node_states().get("node2") == "allocated", "node2 to be busy", every_s=COMMAND_EVERY_S
    )
    user = site.cluster.user
    argv = [str(site.cluster.installation().python), "-P", "-m", "zslurm", "doctor", "--cluster", "mi"]
    doctor = subprocess.Popen(
        [*argv, "--nodelist", "node2"], env=site.cluster.environment | site.environment, cwd=site.directory,
        user=user.pw_uid, group=user.pw_gid, extra_groups=[], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # Tests that run in the background of a shell are born deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip

    def waits() -> bool:
        return JOB_PREFIX in site.cluster.run(["squeue", "--noheader", "--format=%j"]).stdout

    wait_for(waits, "the doctor's job to be in the queue", every_s=COMMAND_EVERY_S)
    doctor.send_signal(signal.SIGINT)
    _, err = doctor.communicate(timeout=DEADLINE_S)
    assert (doctor.returncode, err.splitlines()[-1]) == (Exit.FAILED, "zslurm: stopped")
    wait_for(lambda: not waits(), "the job to be gone", every_s=COMMAND_EVERY_S)
    assert not list(site.directory.glob(".zslurm-doctor-*"))


def test_what_an_ended_job_left_behind_is_found_on_its_node(site: Site) -> None:
    """Told by job and node in the environment: all nodes of this machine share one /proc."""
    left = {"SLURM_JOB_ID": "99999", "SLURMD_NODENAME": "node2"}
    user = site.cluster.user
    orphan = subprocess.Popen(
        ["sleep", "600"], env=site.cluster.environment | left, user=user.pw_uid, group=user.pw_gid, extra_groups=[]
    )
    try:
        report = site.json("--only", "orphaned-processes", trees=False)
    finally:
        orphan.kill()
        orphan.wait()
    assert results(report, "fail") == {("orphaned-processes", "node2")}, report["results"]
    (result,) = [result for result in report["results"] if result["status"] == "fail"]
    assert result["reason"] == f"1 process of ended jobs (99999): {orphan.pid} sleep"


def test_inside_a_job_its_own_nodes_are_examined_as_a_step(site: Site) -> None:
    python = site.cluster.installation().python
    variables = " ".join(f"{name}={value}" for name, value in site.environment.items())
    doctor = f"env {variables} {python} -P -m zslurm doctor --cluster mi --json --only memlock"
    site.cluster.sbatch(
        f"{doctor} > report.json; touch done",
        "-N2", "-w", "node[4-5]", "--gpus-per-node=8", "--exclusive", cwd=site.directory,
    )  # fmt: skip
    wait_for(lambda: (site.directory / "done").exists(), "the job to end")
    report = json.loads((site.directory / "report.json").read_text())
    assert results(report, "pass") == {("memlock", "node4"), ("memlock", "node5")}


def test_a_directory_that_nodes_do_not_share_fails(site: Site) -> None:
    """The nodes share this machine's disk; a folder that a node may not enter stands for one it does not have."""
    hidden = site.directory / "hidden"
    hidden.mkdir()
    os.chown(hidden, site.cluster.user.pw_uid, site.cluster.user.pw_gid)
    site.profile(setup=[f'[ "$SLURMD_NODENAME" != node7 ] || rm -rf {hidden}/.zslurm-doctor-*'])
    report = site.json("--nodelist", "node7", "--directory", str(hidden), "--only", "shared-files")
    (result,) = [result for result in report["results"] if result["check"] == "shared-files"]
    assert "what the login node wrote is not visible: No such file or directory" in result["reason"]
    assert report["exclude"] == "node7"


def test_nodes_and_checks_that_do_not_exist_are_refused(site: Site) -> None:
    for arguments, code, words in (
        (["--nodelist", "node[6-9]"], Exit.NOT_FOUND, "node[8-9]: Slurm has no such node"),
        (["--nodes", "9"], Exit.USAGE, "of the 8 nodes of batch 8 are usable"),
        (["--nodelist", "node[0"], Exit.USAGE, "brackets do not match"),
        (["--only", "no-such"], Exit.USAGE, "no-such: there is no such check"),
    ):
        done = site.doctor(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), arguments
        assert words in done.stderr


def test_without_the_controller_the_login_node_is_examined(site: Site) -> None:
    site.cluster.stop_controller()
    done = site.doctor(env=site.cluster.impatient)
    assert done.returncode == Exit.SLURM_UNAVAILABLE
    assert "the nodes were not checked: the Slurm controller does not answer" in done.stderr
    assert [row[0] for row in rows(done.stdout, "fail")] == ["slurm"]
    assert "python" in {row[0] for row in rows(done.stdout, "pass")}


def test_some_nodes_of_slurms_choice(site: Site) -> None:
    report = site.json("--nodes", "2", "--only", "memlock", "--only", "names")
    assert len(report["asked"]) == 2
    assert report["status"] == "pass"
