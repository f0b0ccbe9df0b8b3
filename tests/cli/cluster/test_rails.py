"""`zslurm cluster rails` on a machine without Slurm: this machine, or one that only its files show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Zslurm
from tests.fake_sysfs import FakeNode, mi300x_pollara

PROFILE = """\
cluster:
  launcher: slurm
  gpus_per_node: 8
  network: pollara
  nics: [ionic_0, ionic_1, ionic_2, ionic_3, ionic_4, ionic_5, ionic_6, ionic_7]
slurm:
  partition: batch
parallel:
  bucket_bytes: not checked here
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """This machine is a node of a cluster whose profile `pollara` names eight NICs."""
    monkeypatch.setenv("ZSLURM_SYSROOT", str(tmp_path / "%n"))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = tmp_path / "config/zslurm/clusters/pollara.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE)
    return mi300x_pollara(tmp_path / "node7")


@pytest.fixture
def zslurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Zslurm:
    return Zslurm(monkeypatch, capsys)


def test_whole_rails_are_drawn(zslurm: Zslurm, node: FakeNode) -> None:
    done = zslurm.ok("cluster", "rails", "--here")
    lines = done.stdout.splitlines()
    assert lines[0] == "node7: 1 node, 8 rails by the profile"
    assert sum(" ACTIVE " in line for line in lines) == 8
    assert done.stderr == ""
    assert "\x1b" not in done.stdout, "colours are for terminals"


def test_json_holds_everything(zslurm: Zslurm, node: FakeNode) -> None:
    body = zslurm.ok("cluster", "rails", "--here", "--json").json
    (found,) = body["nodes"]
    assert (found["node"], found["source"], len(found["rails"])) == ("node7", "profile", 8)
    assert found["rails"][2] == {
        "index": 2, "gpus": [2], "gpu_pci": ["0000:46:00.0"], "nic": "ionic_2", "nic_pci": "0000:48:00.0",
        "netdev": "net-ionic_2", "numa": 0, "near": "switch", "bridge": "0000:41:00.0", "state": "ACTIVE",
        "rate_gbps": 400.0, "gid_index": 1,
    }  # fmt: skip
    assert (body["incomplete"], body["differences"], body["silent"]) == ([], [], {})


def test_an_incomplete_rail_is_shown_and_is_exit_code_5(zslurm: Zslurm, node: FakeNode) -> None:
    node.take_nic_down("ionic_6")
    for options in ((), ("--json",)):
        done = zslurm("cluster", "rails", "--here", *options)
        assert (done.code, done.stderr) == (5, "zslurm: rails are incomplete or unknown on node7\n")
        assert "rail 6: ionic_6 is DOWN (Disabled)" in done.stdout
    (problem,) = done.json["nodes"][0]["problems"]
    assert (problem["kind"], problem["rail"], problem["nic"], problem["incomplete"]) == (
        "nic-down", 6, "ionic_6", True,
    )  # fmt: skip


def test_a_machine_without_rails(zslurm: Zslurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSLURM_SYSROOT", str(tmp_path))
    done = zslurm.ok("cluster", "rails", "--cluster", "local")
    assert done.stdout.endswith(": 1 node, 0 rails by PCIe distance\n")


def test_nodes_are_asked_through_slurm_only(
    zslurm: Zslurm, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    done = zslurm("cluster", "rails")
    assert done.code == 4
    assert done.stderr.startswith("zslurm: srun: not found on PATH")


def test_a_profile_with_a_mistake_is_one_line(zslurm: Zslurm, node: FakeNode, tmp_path: Path) -> None:
    path = tmp_path / "config/zslurm/clusters/pollara.yaml"
    path.write_text(PROFILE.replace("ionic_6, ionic_7]", "ionic_6]"))
    done = zslurm("cluster", "rails", "--here")
    assert done.code == 2
    assert done.stderr.startswith(f"zslurm: {path}:")
    assert "8 GPUs but 7 NICs" in done.stderr
    assert done.stderr.count("\n") == 1


def test_options_that_contradict_each_other(zslurm: Zslurm, node: FakeNode) -> None:
    done = zslurm("cluster", "rails", "--here", "--nodes", "2")
    assert (done.code, done.stderr) == (2, "zslurm: --nodes, --nodelist, --here and --fabric exclude each other\n")
