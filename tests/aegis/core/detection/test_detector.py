"""What becomes of the faults of sensors, and that a training without faults has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.core.detection.simulated_training import SETTINGS, WALL, Training
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.protocol import AgentReport, SensorReport, Stamp
from zslurm.aegis.types import Fault, Role


def test_a_training_that_goes_well_is_no_fault() -> None:
    training = Training()
    assert training.run(600) == []
    assert training.detector.step == 300


def _fault(kind: str, *, role: Role = "root", **fields: Any) -> Fault:
    return Fault(kind, role, "gpu", WALL, "gpu", "words", **fields)


def _sensor(
    *faults: Fault, ok: bool = True, why: str = "", node: str = "node1", sensor: str = "gpu", wall: float = WALL
) -> SensorReport:
    return SensorReport(Stamp(node, 1, wall, 1.0), sensor, ok, why, tuple(faults))


def _begun() -> Detector:
    detector = Detector(SETTINGS)
    detector.begin(1, ["node0", "node1"], 0.0)
    return detector


def test_a_fault_of_a_sensor_is_passed_on_once_with_its_node() -> None:
    detector = _begun()
    for _ in range(3):
        detector.feed(_sensor(_fault("gpu_ras_uncorrectable", gpu="3")), 1.0)
    detector.feed(_sensor(_fault("gpu_ras_uncorrectable", gpu="4")), 1.0)
    found = detector.check(1.0, WALL)
    assert [(fault.kind, fault.node, fault.gpu) for fault in found] == [
        ("gpu_ras_uncorrectable", "node1", "3"),
        ("gpu_ras_uncorrectable", "node1", "4"),
    ]
    assert detector.check(2.0, WALL) == []


def test_a_fault_that_was_cleared_may_come_again() -> None:
    detector = _begun()
    down, up = _fault("nic_link_down", nic="rdma0"), _fault("nic_link_down", nic="rdma0", cleared=True)
    seen = []
    for fault in (up, down, down, up, up, down):
        detector.feed(_sensor(fault, sensor="nic"), 1.0)
        seen += [(fault.kind, fault.cleared) for fault in detector.check(1.0, WALL)]
    assert seen == [("nic_link_down", False), ("nic_link_down", True), ("nic_link_down", False)]


@pytest.mark.parametrize("wrong_by", [-90.0, 0.0, 3600.0])
def test_a_fault_is_reported_in_the_supervisors_time_whatever_its_nodes_clock_shows(wrong_by: float) -> None:
    """By a clock that is behind, a link that has just gone down would have been down for long."""
    detector = _begun()
    there = WALL + wrong_by
    down = replace(_fault("nic_link_down", nic="rdma0"), time=there - 2.0)
    detector.feed(_sensor(down, sensor="nic", wall=there), 1.0, WALL)
    detector.feed(_sensor(ok=False, why="no amd-smi", wall=there + 1.0), 2.0, WALL + 1.0)
    assert [fault.time for fault in detector.check(5.0, WALL + 4.0)] == [WALL - 2.0, WALL + 1.0]
    detector.begin(2, ["node0", "node1"], 6.0)
    assert [fault.time for fault in detector.check(6.0, WALL + 5.0)] == [WALL - 2.0]


def test_in_a_new_attempt_an_error_counts_again_and_a_lasting_state_is_reported_again() -> None:
    """The sensor of the link speaks of changes only: the new attempt would not know why it cannot communicate."""
    detector = _begun()
    ecc, down = _fault("gpu_ras_uncorrectable", gpu="3"), _fault("nic_link_down", nic="rdma0")
    low = _fault("memory_low", role="advisory")
    detector.feed(_sensor(ecc, down, low), 1.0)
    assert len(detector.check(1.0, WALL)) == 3
    detector.begin(2, ["node0", "node1"], 2.0)
    (again,) = detector.check(2.0, WALL)
    assert (again.kind, again.node, again.nic, again.time) == ("nic_link_down", "node1", "rdma0", down.time)
    detector.feed(_sensor(ecc, down, low), 3.0)
    assert [fault.kind for fault in detector.check(3.0, WALL)] == ["gpu_ras_uncorrectable"]
    detector.feed(_sensor(_fault("nic_link_down", nic="rdma0", cleared=True)), 4.0)
    assert [fault.cleared for fault in detector.check(4.0, WALL)] == [True]
    detector.begin(3, ["node0", "node1"], 5.0)
    assert detector.check(5.0, WALL) == []


def test_a_storm_is_thinned() -> None:
    detector = _begun()
    for number in range(1000):
        detector.feed(_sensor(_fault("pcie_error", gpu=str(number))), 1.0)
    assert 1 <= len(detector.check(1.0, WALL)) < 50
    detector.feed(_sensor(_fault("pcie_error", gpu="later")), 100.0)
    assert [fault.gpu for fault in detector.check(100.0, WALL)] == ["later"]


def test_an_unavailable_sensor_is_reported_once_for_each_reason_and_when_it_is_back() -> None:
    detector = _begun()
    told = []
    for ok, why in ((True, ""), (False, "no amd-smi"), (False, ""), (False, "it hangs"), (True, ""), (True, "")):
        detector.feed(_sensor(ok=ok, why=why), 1.0)
        told += [(fault.kind, fault.role, fault.line, fault.cleared) for fault in detector.check(1.0, WALL)]
    assert told == [
        ("sensor_unavailable", "advisory", "gpu: no amd-smi", False),
        ("sensor_unavailable", "advisory", "gpu: it hangs", False),
        ("sensor_unavailable", "advisory", "gpu: can be read again", True),
    ]


def test_nothing_is_needed_to_begin_with() -> None:
    detector = Detector(SETTINGS)
    detector.feed(AgentReport(Stamp("node0", 1, WALL, 1.0), "started"), 1.0)
    assert detector.check(1.0, WALL) == []
    assert detector.step == -1
