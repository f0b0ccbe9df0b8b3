"""`zslurm doctor` on a machine without Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.doctor.nodes import Node
from zslurm.core.errors import Exit

LOCAL = ("doctor", "--cluster", "local")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """This machine has the files of a healthy node with eight GPUs."""
    node = Node(tmp_path / "tree")
    monkeypatch.setenv("ZSLURM_SYSROOT", str(node.root))
    return node


def test_this_machine_alone_is_checked(shell: Shell, machine: Node) -> None:
    done = shell.zslurm(*LOCAL)
    assert (done.code, "\tfail\t" in done.stdout) == (Exit.DONE, False)
    assert done.stdout.splitlines()[0].split("\t") == ["check", "status", "nodes", "where", "what"]
    assert (
        "gpu-ecc\tpass\t1\t(login)\tno uncorrectable error on 8 GPUs (0 correctable)" in done.stdout.splitlines()
    )
    assert done.stderr.startswith("this machine: unavailable (")


def test_a_fault_is_exit_5_and_says_what_to_do(shell: Shell, machine: Node) -> None:
    machine.rows(gpu2={"uncorrectable": 1})
    done = shell.zslurm(*LOCAL)
    assert done.code == Exit.CHECK_FAILED
    assert "gpu-ecc\tfail\t1\t(login)\tGPU 2: 1 uncorrectable error (UMC)" in done.stdout.splitlines()
    assert "gpu-ecc on (login): exclude the node and have the GPU reset" in done.stderr
    assert "exclude\t" not in done.stdout  # there is no node to exclude


def test_json_has_it_all(shell: Shell, machine: Node) -> None:
    done = shell.zslurm(*LOCAL, "--json", "--only", "memlock", "--only", "kernel")
    body = json.loads(done.stdout)
    assert (body["cluster"], body["status"], body["exclude"]) == ("local", "pass", "")
    assert [result["check"] for result in body["results"]] == ["memlock", "kernel"]
    assert body["results"][1]["alike"] == {"kernel": "6.8.0-51-generic"}


def test_without_a_profile_and_without_slurm_this_machine_is_meant(
    shell: Shell, machine: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert shell.zslurm("doctor", "--only", "memlock").code == Exit.DONE


def test_a_cluster_without_slurm_shows_the_login_node_and_is_exit_4(
    shell: Shell, machine: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Path.home() / "config/zslurm/clusters/mi.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("cluster: {gpus_per_node: 8}\n")
    monkeypatch.setenv("PATH", "/nonexistent")
    done = shell.zslurm("doctor", "--cluster", "mi")
    assert done.code == Exit.SLURM_UNAVAILABLE
    assert "slurm\tfail\t1\t(login)\tscontrol: not found on PATH" in done.stdout
    assert "disk\tpass\t1\t(login)" in done.stdout
    assert "gpu-ecc" not in done.stdout
    assert "the nodes were not checked: sinfo: not found on PATH" in done.stderr
    assert shell.zslurm("doctor", "--cluster", "mi", "-q").stdout == ""


def test_variables_of_rccl_are_checked_on_the_login_node(
    shell: Shell, machine: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Path.home() / "config/zslurm/clusters/mi.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("cluster: {launcher: local, gpus_per_node: 8, gpu_type: mi300x, network: pollara}\n")
    assert shell.zslurm("doctor", "--cluster", "mi", "--only", "environment").code == Exit.DONE
    monkeypatch.setenv("NCCL_IB_GID_INDX", "1")
    done = shell.zslurm("doctor", "--cluster", "mi", "--only", "environment")
    assert "environment\twarn\t1\t(login)\tNCCL_IB_GID_INDX=1: " in done.stdout


def test_the_checks_are_listed(shell: Shell) -> None:
    done = shell.zslurm("doctor", "--list")
    assert done.code == Exit.DONE
    assert "gpu-ecc\tgpu\tnode\tuncorrectable, deferred and correctable memory errors of GPUs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "gpu-ecx"), "gpu-ecx: there is no such check; `zslurm doctor --list` shows them"),
        (("--nodes", "2", "--nodelist", "node[0-1]"), "--nodes and --nodelist exclude each other"),
    ],
)
def test_wrong_options_are_refused(shell: Shell, arguments: tuple[str, ...], words: str) -> None:
    code, message = shell.fails("doctor", *arguments)
    assert (code, words in message) == (Exit.USAGE, True)
