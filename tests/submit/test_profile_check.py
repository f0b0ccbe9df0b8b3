"""What is wrong with a profile by itself, if there is no Slurm to ask: one line for each fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.places import own
from tests.cluster.rails.fabrics import published_form
from tests.config.run_files import write
from zslurm.config.spec import ClusterSection
from zslurm.core.errors import NotFound
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import expand
from zslurm.slurm.inventory import parse_partitions
from zslurm.submit.checks.fabric import leaf_size_notes, strangers
from zslurm.submit.checks.profile import ProfileReport, check_profile

NICS = "nics: [a, b, c, d, e, f, g, h]"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def checked(tmp_path: Path, text: str) -> ProfileReport:
    own("lab", text)
    (tmp_path / "net" / "eno1").mkdir(parents=True, exist_ok=True)
    return check_profile("lab", interfaces=tmp_path / "net")


def test_a_good_profile_passes(site: Path, tmp_path: Path) -> None:
    report = checked(tmp_path, f"cluster: {{extends: mi300x-pollara, {NICS}, interface: eno1}}\n")
    assert report.faults == []
    assert report.warnings == [
        "cluster.fabric.slices: not given, so ranks are numbered in Slurm's order; see docs/rails.md",
        "Slurm was not asked: its commands are not on this machine",
    ]
    assert report.passed == ["it is valid", "8 GPUs and 8 NICs", "cluster.interface: eno1"]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ("nics: [a, b, c, d, e, f, g]", "cluster: nics: 8 GPUs but 7 NICs: list one for each GPU in rail order"),
        ("nics: [a, a]", "cluster: nics: a device is listed twice"),
        ("interface: 10.0.0.1", "cluster.interface: 10.0.0.1: not the name of a network interface, such as eth0"),
        ("interface: a/b", "cluster.interface: a/b: not the name of a network interface"),
        ("interface: averyveryverylongname", "cluster.interface: averyveryverylongname: not the name of"),
        ("interface: lo", "cluster.interface: lo leads to no other node"),
        (f"{NICS}, storage_interface: a", "cluster.storage_interface: a is a rail (cluster.nics)"),
        ('env: {NCCL_PXN_DISABLE: "1"}', "cluster.env: NCCL_PXN_DISABLE=1: there is no path from one rail"),
        ("gpus: 8", "cluster.gpus: unknown key; did you mean `gpu_nics`?"),
    ],
)
def test_each_fault_is_one_line(site: Path, tmp_path: Path, fields: str, fault: str) -> None:
    report = checked(tmp_path, f"cluster: {{extends: mi300x-pollara, {fields}}}\n")
    (line,) = report.faults
    assert fault in line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("cluster: {extends: mi300x-cx7}\n", "cluster.nics: not given, so RCCL takes every NIC it finds on cx7"),
        ("cluster: {gpus_per_node: 1, nics: [a]}\n", "cluster.network: not given, so no rule for these NICs"),
        ("cluster: {interface: eth77}\n", "cluster.interface: this machine has no eth77; is it there on the"),
        ("cluster: {env: {NCCL_AGLO: Ring}}\n", "cluster.env: NCCL_AGLO=Ring: nothing is known to read this name"),
    ],
)
def test_what_may_be_meant_is_only_a_note(site: Path, tmp_path: Path, text: str, warning: str) -> None:
    report = checked(tmp_path, text)
    assert report.faults == []
    assert any(line.startswith(warning) for line in report.warnings)


FABRIC = """\
  fabric:
    slices:
      - {leaf: a, rails: [0, 1, 2, 3], nodes: "node[0-3]"}
      - {leaf: b, rails: [4, 5, 6], nodes: "node[0-2]"}
"""


def test_what_a_fabric_leaves_out_is_a_note(site: Path, tmp_path: Path) -> None:
    report = checked(tmp_path, f"cluster:\n  extends: mi300x-pollara\n  {NICS}\n{FABRIC}")
    assert report.faults == []
    assert "4 nodes on 7 slices of 2 leaf switches" in report.passed
    assert report.warnings[:4] == [
        "cluster.fabric.slices: nothing is listed for rail 7; hops leave it out",
        *(f"cluster.fabric.slices: node3: on no slice of rail {rail}" for rail in (4, 5, 6)),
    ]


def test_a_mistake_in_the_fabric_has_its_line(site: Path, tmp_path: Path) -> None:
    text = f"cluster:\n  extends: mi300x-pollara\n  {NICS}\n{FABRIC.replace('[4, 5, 6]', '[3, 5, 6]')}"
    (fault,) = checked(tmp_path, text).faults
    assert "lab.yaml:7: cluster.fabric: slices[1].nodes: rail 3 of node0 is on slices[0] already" in fault


def test_nodes_of_the_fabric_and_of_slurm() -> None:
    cluster = ClusterSection(fabric=published_form(["node[0-3]", "node[4-7]"]))
    nodes = expand("node[0-7]")
    assert strangers(cluster, nodes, nodes) == ([], [])
    assert strangers(cluster, nodes[:6], nodes[:6]) == (["cluster.fabric.slices: Slurm has no node node[6-7]"], [])
    faults, (warning,) = strangers(cluster, [*nodes, "node8"], [*nodes, "node8"])
    assert faults == []
    assert warning.startswith("cluster.fabric.slices: node8: on no slice; ")
    assert strangers(ClusterSection(), nodes, nodes) == ([], [])


@pytest.mark.parametrize(
    ("given", "word", "note"),
    [
        (2, "SwitchName", []),
        (None, "BlockName", []),
        (None, "SwitchName", ["cluster.nodes_per_switch: not given, so jobs do not ask for few leaf switches"]),
        (3, "SwitchName", ["cluster.nodes_per_switch: 3, but most leaf switches have 2 nodes"]),
        (3, "BlockName", ["cluster.nodes_per_switch: 3, but Slurm has no topology/tree"]),
    ],
)
def test_leaf_switches_of_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, word: str, note: list[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tree = f"printf '{word}=a Nodes=n[0-1]\\n{word}=b Nodes=n[2-3]\\n'"
    # The partition names its topology, as since 25.05.
    program = write(tmp_path / "scontrol", f'#!/bin/sh\n[ "$*" = "show topology lab" ] && {tree}\n')
    program.chmod(0o755)
    (partition,) = parse_partitions("PartitionName=batch Nodes=n[0-3] State=UP Topology=lab")
    found = list(leaf_size_notes(ClusterSection(nodes_per_switch=given), SlurmClient(), partition))
    assert [line[: len(start)] for line, start in zip(found, note, strict=True)] == note


def test_every_problem_of_a_file_is_reported_at_once(site: Path, tmp_path: Path) -> None:
    report = checked(tmp_path, "cluster: {gpus_per_node: -1, nisc: []}\nslurm: {nodes: 0}\n")
    assert len(report.faults) == 3
    assert report.passed == []


def test_a_local_profile_asks_no_slurm(site: Path, tmp_path: Path) -> None:
    assert checked(tmp_path, "cluster: {launcher: local}\n").warnings == []


def test_an_unknown_profile(site: Path) -> None:
    write(site / "other.yaml", "")
    with pytest.raises(NotFound):
        check_profile("lab")
