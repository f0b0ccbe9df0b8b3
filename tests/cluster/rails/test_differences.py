"""Maps of many nodes: the odd ones are named, the others counted, each distinct map is drawn once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.fake_sysfs import mi300x_pollara
from zslurm.cli.cluster.rails import as_json, draw
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.read_nodes import RailReadings, differences, identical, rails_of_answers
from zslurm.cluster.rails.types import RailMap
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import read_facts
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer

NAMES = tuple(f"ionic_{index}" for index in range(8))
BY_NAME = ClusterSection(gpus_per_node=8, nics=NAMES, network="pollara", gid_index=1)
BY_PCIE = ClusterSection(gpus_per_node=8, network="pollara", gid_index=1)


def exchanged(one: int, other: int) -> list[str]:
    names = list(NAMES)
    names[one], names[other] = names[other], names[one]
    return names


def copies(found: RailMap, nodes: Sequence[int]) -> list[RailMap]:
    return [RailMap(f"node{i}", found.source, found.rails, found.others, found.problems) for i in nodes]


def a_map(root: Path, cluster: ClusterSection, **layout: object) -> RailMap:
    mi300x_pollara(root, **layout)  # type: ignore[arg-type]
    return rail_map(read_facts(root), cluster)


def test_a_hundred_and_twenty_five_nodes_agree_and_three_do_not(tmp_path: Path) -> None:
    usual = a_map(tmp_path / "usual", BY_NAME)
    odd = a_map(tmp_path / "odd", BY_NAME, names=exchanged(3, 4))
    maps = copies(usual, range(125)) + copies(odd, range(125, 128))
    assert [str(difference) for difference in differences(maps)] == [
        "node[125-127] (these 3) differ from the other 125: "
        "rail 3 is GPU 3 - 0000:88:00.0, not GPU 3 - 0000:68:00.0",
        "node[125-127] (these 3) differ from the other 125: "
        "rail 4 is GPU 4 - 0000:68:00.0, not GPU 4 - 0000:88:00.0",
    ]
    assert [len(group) for group in identical(maps)] == [125, 3]


def test_other_names_at_the_same_place_differ_by_name_only(tmp_path: Path) -> None:
    """By PCIe the rails are the same; NCCL_IB_HCA, which filters by name, would not be."""
    usual = a_map(tmp_path / "usual", BY_PCIE)
    odd = a_map(tmp_path / "odd", BY_PCIE, names=exchanged(3, 4))
    found = differences(copies(usual, [0, 1]) + copies(odd, [2]))
    assert [(d.aspect, d.rail) for d in found] == [("name", 3), ("name", 4)]
    assert str(found[0]) == "node2 differs from the other 2: rail 3 is ionic_4, not ionic_3"


def test_a_missing_nic_is_its_nodes_problem_not_a_difference_in_place(tmp_path: Path) -> None:
    usual = a_map(tmp_path / "usual", BY_NAME)
    broken = a_map(tmp_path / "broken", BY_NAME, missing=[2])
    assert differences(copies(usual, [0, 1]) + copies(broken, [2])) == []


def test_equal_nodes_and_single_nodes_do_not_differ(tmp_path: Path) -> None:
    usual = a_map(tmp_path, BY_NAME)
    assert differences(copies(usual, range(8))) == []
    assert differences([usual]) == []


def test_answers_become_maps_and_silence_is_named(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path, down=[5])
    value = asdict(read_facts(tmp_path)) | {"node": "node10"}
    answers = [
        NodeAnswer("node10", value),
        NodeAnswer("node3", None, "srun: error: Node failure on node3"),
        NodeAnswer("node9", {"what": "ever"}),
    ]
    found = rails_of_answers(answers, BY_NAME)
    assert [one.node for one in found.maps] == ["node10"]
    assert found.unanswered == {
        "node3": "srun: error: Node failure on node3",
        "node9": "its answer is not what this version of zslurm asks for",
    }
    assert list(found.incomplete) == ["node10"]


def test_the_picture(tmp_path: Path) -> None:
    usual = a_map(tmp_path / "usual", BY_NAME)
    broken = a_map(tmp_path / "broken", BY_NAME, missing=[2], down=[6])
    maps = (*copies(usual, range(7)), *copies(broken, [7]))
    found = RailReadings(maps, {"node8": "no answer within 60 s"}, tuple(differences(maps)))
    lines = ["".join(text for text, _ in line).rstrip() for line in draw(found)]
    assert lines[0] == "node[0-6]: 7 nodes, 8 rails by the profile"
    assert lines[1] == "  NUMA node 0"
    assert lines[2] == (
        "    rail 0  GPU 0 0000:06:00.0 ──[switch 0000:01:00.0]── ionic_0 0000:08:00.0 net-ionic_0  "
        "ACTIVE  400 Gb/s  GID 1"
    )
    assert lines[6] == "  NUMA node 1"
    (missing,) = [line for line in lines if line.startswith("    rail 2") and "missing" in line]
    assert "ionic_2" in missing
    assert "──[" not in missing
    assert lines[-4:] == [
        "  incomplete: rail 2: ionic_2 is missing (7 RDMA devices are there)",
        "  incomplete: rail 6: ionic_6 is DOWN (Disabled)",
        "",
        "node8: no answer: no answer within 60 s",
    ]
    body = as_json(found)
    assert body["groups"] == [[f"node{i}" for i in range(7)], ["node7"]]
    assert body["incomplete"] == ["node7"]
    assert body["nodes"][0]["rails"][3]["nic"] == "ionic_3"
