"""`zslurm cluster rails --fabric`: the switches behind the rails, at any width, with and without Unicode."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands import Zslurm
from tests.cluster.rails.fabrics import published_form
from tests.fake_sysfs import mi300x_pollara
from zslurm.cli.cluster.rails import draw_fabric
from zslurm.cli.terminal.screen import fold
from zslurm.config.fabric import FabricSection
from zslurm.slurm.hostlist import compress, expand

LONG = [
    compress(f"gpu-rack{rack}-n{node:02d}" for rack in range(4) for node in range(unit, 32, 4))
    for unit in range(4)
]
SHORT = published_form(["node[0,2]", "node[1,3]"], ports=2, uplinks=1)


def profile(name: str, fabric: FabricSection) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / f"zslurm/clusters/{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    given = fabric.model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump({"cluster": {"extends": "mi300x-pollara", "fabric": given}}))


@pytest.fixture
def zslurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Zslurm:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile("lab", SHORT)
    return Zslurm(monkeypatch, capsys)


def test_the_drawing(zslurm: Zslurm) -> None:
    assert (
        zslurm.ok("cluster", "rails", "--fabric", "--cluster", "lab").stdout
        == """\
fabric by the profile: 4 nodes, 8 rails, 16 slices of 8 leaf switches
  4 leaf switches for each node, 4 spines above each leaf, slices of 2 ports at 400 Gb/s, 1 uplink at 400 Gb/s
  4 spines
  ├─ leaf0 ── rails 0-1 ── node[0,2]
  ├─ leaf1 ── rails 2-3 ── node[0,2]
  ├─ leaf2 ── rails 4-5 ── node[0,2]
  ├─ leaf3 ── rails 6-7 ── node[0,2]
  ├─ leaf4 ── rails 0-1 ── node[1,3]
  ├─ leaf5 ── rails 2-3 ── node[1,3]
  ├─ leaf6 ── rails 4-5 ── node[1,3]
  └─ leaf7 ── rails 6-7 ── node[1,3]
  ring of ranks over all nodes, with the rails that pass a spine on the way
    node[0,2]
    │ 8 rails of 8
    node[1,3]
    │ 8 rails of 8 back to the first
  64 hops (96 in the order of names), oversubscription 2:1 (2 ports of a slice send up)
  a full slice is oversubscribed 2:1
"""
    )


def test_json_holds_the_slices_and_the_ring(zslurm: Zslurm) -> None:
    body: dict[str, Any] = zslurm.ok("cluster", "rails", "--fabric", "--cluster", "lab", "--json").json["fabric"]
    assert (body["rails"], body["groups"], len(body["slices"])) == (8, ["node[0,2]", "node[1,3]"], 8)
    assert body["ring"] == {
        "nodes": "node[0,2],node[1,3]", "hops": 64, "hops_by_name": 96, "ports_up": 2, "oversubscription": 2.0,
        "unlisted": "",
    }  # fmt: skip


def test_it_follows_the_maps_of_nodes(zslurm: Zslurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSLURM_SYSROOT", str(tmp_path / "%n"))
    monkeypatch.setenv("SLURMD_NODENAME", "node0")
    mi300x_pollara(tmp_path / "node0")
    done = zslurm.ok("cluster", "rails", "--here", "--cluster", "lab")
    assert done.stdout.startswith("node0: 1 node, 8 rails by PCIe distance\n")
    assert "\n\nfabric by the profile: 4 nodes, " in done.stdout
    assert zslurm.ok("cluster", "rails", "--here", "--cluster", "lab", "--json").json["fabric"]["rails"] == 8


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_broken(width: int) -> None:
    section = published_form(LONG, ports=32, uplinks=16, uplink_gbps=800)
    lines = [
        "".join(text for text, _ in part) for line in draw_fabric(section, width) for part in fold(line, width)
    ]
    assert max(map(len, lines)) <= width
    shown = [node for line in lines for word in line.split() if word.startswith("gpu-") for node in expand(word)]
    assert sorted(shown) == sorted(5 * [node for unit in LONG for node in expand(unit)]), (
        "four leaves, and the ring"
    )


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_map_of_a_node_fits_as_well(
    zslurm: Zslurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("ZSLURM_SYSROOT", str(tmp_path / "%n"))
    monkeypatch.setenv("SLURMD_NODENAME", "node0")
    mi300x_pollara(tmp_path / "node0")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = zslurm.ok("cluster", "rails", "--here", "--cluster", "lab").stdout
    assert not re.search(r"\x1b\[3\d", shown), "bold and dim are no colours"
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, text.splitlines())) <= width
    monkeypatch.setenv("TERM", "dumb")
    assert zslurm.ok("cluster", "rails", "--here", "--cluster", "lab").stdout == text
    words = text.split()
    for name in ("ionic_7", "ACTIVE", "rails", *(("net-ionic_7", "0000:06:00.0") if width == 160 else ())):
        assert name in words


def test_without_unicode(zslurm: Zslurm, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    zslurm("cluster", "rails", "--fabric", "--cluster", "lab")
    output.flush()
    text = output.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "  |- leaf0 -- rails 0-1 -- node[0,2]\n" in text
    assert "  `- leaf7 -- rails 6-7 -- node[1,3]\n" in text


def test_rails_that_the_slices_leave_out_are_named(zslurm: Zslurm) -> None:
    slices = [{"leaf": "a", "rails": [0, 1], "nodes": "n[0-3]"}, {"leaf": "b", "rails": [1], "nodes": "n4"}]
    profile("partial", FabricSection.model_validate({"slices": slices}))
    shown = zslurm.ok("cluster", "rails", "--fabric", "--cluster", "partial").stdout
    assert shown.splitlines()[-2:] == [
        "  warning: cluster.fabric.slices: nothing is listed for rail 2-7; hops leave it out",
        "  warning: cluster.fabric.slices: n4: on no slice of rail 0",
    ]


def test_what_the_shipped_profile_knows(zslurm: Zslurm) -> None:
    assert zslurm.ok("cluster", "rails", "--fabric", "--cluster", "mi300x-pollara").stdout == (
        "fabric by the profile: 4 leaf switches for each node, 4 spines above each leaf, ports at 400 Gb/s; which "
        "nodes are on which slice is not listed (cluster.fabric.slices)\n"
    )


def test_a_profile_without_a_fabric(zslurm: Zslurm) -> None:
    done = zslurm("cluster", "rails", "--fabric", "--cluster", "local")
    assert (done.code, done.stderr.count("\n")) == (3, 1)
    assert done.stderr.startswith("zslurm: local: the profile describes no fabric (cluster.fabric); ")


def test_a_long_line_is_folded_between_words() -> None:
    line = [("  first ", "bold"), ("second third ", ""), ("a-name-that-is-longer-than-all ", "dim")]
    folded = ["".join(text for text, _ in part) for part in fold(line, 20)]
    assert folded == ["  first second third", "      a-name-that-is-longer-than-all"]
    assert list(fold([], 20)) == [[]]
    assert ["".join(t for t, _ in part) for part in fold([("one two three four", "")], 8)] == [
        "one two", "    three", "    four",
    ]  # fmt: skip
