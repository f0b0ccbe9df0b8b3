"""The section cluster.fabric: mistakes are one line each, with the line of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.rails.fabrics import published_form
from tests.config.run_files import PHASES, complaints, resolve_text

GOOD = """\
cluster:
  gpus_per_node: 8
  fabric:
    leaves: 2
    ports: 4
    slices:
      - {leaf: a, rails: [0, 1], nodes: "node[0-3]"}
      - {leaf: b, rails: [0, 1], nodes: "node[4-7]"}
      - {leaf: 3, rails: [2], nodes: "node[0-3]"}
"""


def test_a_fabric_is_read(tmp_path: Path) -> None:
    fabric = resolve_text(tmp_path, PHASES, profile=GOOD).spec.cluster.fabric
    assert [(part.leaf, part.rails, part.nodes) for part in fabric.slices] == [
        ("a", (0, 1), "node[0-3]"),
        ("b", (0, 1), "node[4-7]"),
        ("3", (2,), "node[0-3]"),
    ]
    assert fabric.rails == (0, 1, 2)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("node[4-7]", "node[4-7"), "8: cluster.fabric.slices[1].nodes: hostlist `node[4-7`: brackets do"),
        (("node[4-7]", "node[3-6]"), "8: cluster.fabric: slices[1].nodes: rail 0 of node3 is on slices[0]"),
        (("node[4-7]", "node[4-8]"), "8: cluster.fabric: slices[1].nodes: 5 nodes on a slice of 4 ports"),
        (('"node[4-7]"', '"n4,n4"'), "8: cluster.fabric: slices[1].nodes: a node is listed twice"),
        (('"node[4-7]"', '""'), "8: cluster.fabric.slices[1].nodes: names no node"),
        (("b, rails: [0, 1]", "b, rails: [0, 0]"), "8: cluster.fabric: slices[1].rails: a rail is listed twice"),
        (("b, rails: [0, 1]", "b, rails: []"), "8: cluster.fabric.slices[1].rails: expected at least"),
        (("b, rails: [0, 1]", "b"), "8: cluster.fabric.slices[1].rails: required, but not given"),
        (("rails: [2]", "rails: [8]"), "9: cluster: fabric.slices[2].rails: 8 is none of the 8 rails"),
        (("leaf: b", "leafs: b"), "8: cluster.fabric.slices[1].leafs: unknown key; did you mean `leaf`"),
        (("leaves: 2", "leaves: 1"), "4: cluster.fabric: leaves: 1, but the rails of node[0-3] are on 2 leaves"),
        (("leaves: 2", "leaves: two"), "4: cluster.fabric.leaves: expected a number"),
        (("ports: 4", "port_gbps: 0"), "5: cluster.fabric.port_gbps: expected greater than 0"),
        (
            ("  fabric:", "  leaf_switches: {x: node0}\n  fabric:"),
            "3: cluster: leaf_switches: fabric.slices describes the network already",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, change: tuple[str, str], line: str) -> None:
    assert change[0] in GOOD
    found = complaints(tmp_path, PHASES, profile=GOOD.replace(*change))
    assert [text for text in found if text.startswith(f"lab.yaml:{line}")], found


@pytest.mark.parametrize(
    ("given", "whole", "of_two"),
    [
        ({}, None, None),
        ({"ports": 32, "uplinks": 16}, 2.0, 0.125),
        ({"ports": 32, "uplinks": 16, "uplink_gbps": 800}, 1.0, 0.0625),
        ({"uplinks": 1}, None, 2.0),
        ({"ports": 4, "uplinks": 2, "port_gbps": None, "uplink_gbps": 800}, None, None),
    ],
)
def test_oversubscription_of_a_slice(given: dict[str, int], whole: float | None, of_two: float | None) -> None:
    fabric = published_form([], **given)
    assert (fabric.oversubscription, fabric.oversubscription_of(2)) == (whole, of_two)
