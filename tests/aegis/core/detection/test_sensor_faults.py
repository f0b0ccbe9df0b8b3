"""What sensors report is told once, also if another agent reports it, or another supervisor hears it."""

from __future__ import annotations

from typing import Any

from zslurm.aegis.core.detection.sensor_faults import SensorFaults
from zslurm.aegis.protocol import SensorReport, Stamp
from zslurm.aegis.types import Fault

WALL = 1_700_000_000.0


def fault(kind: str = "nic_link_down", *, cleared: bool = False, **more: Any) -> Fault:
    fields: dict[str, Any] = {
        "source": "nic",
        "line": f"words of {kind}",
        "node": "node1",
        "nic": "ionic_0",
    } | more
    return Fault(kind, "root", "nic", WALL, cleared=cleared, **fields)


def report(*faults: Fault, first: bool = False, sensor: str = "nic") -> SensorReport:
    return SensorReport(Stamp("node1", 1, WALL, 1.0), sensor, faults=faults, first=first)


def fed(faults: SensorFaults, *reports: SensorReport) -> list[tuple[str, bool]]:
    for each in reports:
        faults.feed(each, 100.0)
    return [(found.kind, found.cleared) for found in faults.take()]


DOWN, UP = fault(), fault(cleared=True)


def test_what_the_agent_before_has_told_is_not_told_again() -> None:
    faults = SensorFaults()
    assert fed(faults, report(DOWN)) == [("nic_link_down", False)]
    assert fed(faults, report(DOWN, first=True)) == []
    assert fed(faults, report(UP)) == [("nic_link_down", True)], "and its end is"


def test_what_the_agent_before_did_not_live_to_tell_is_told() -> None:
    assert fed(SensorFaults(), report(DOWN, first=True)) == [("nic_link_down", False)]


def test_a_state_that_a_first_report_does_not_name_is_over() -> None:
    """The link came back while no agent looked; or a sound node would be excluded for it."""
    faults = SensorFaults()
    fed(faults, report(DOWN))
    assert fed(faults, report(first=True, sensor="gpu")) == [], "another sensor knows nothing of it"
    assert fed(faults, report(first=True)) == [("nic_link_down", True)]
    assert fed(faults, report(DOWN)) == [("nic_link_down", False)], "again"


def test_what_came_and_went_is_told_once_however_often_the_log_is_read_again() -> None:
    faults = SensorFaults()
    flap = (fault(source="kernel_log"), fault(source="kernel_log", cleared=True))
    whole = report(*flap, first=True, sensor="kernel_log")
    assert fed(faults, whole) == [("nic_link_down", False), ("nic_link_down", True)]
    assert fed(faults, whole) == []
    down_again = report(*flap, flap[0], first=True, sensor="kernel_log")
    assert fed(faults, down_again)[-1] == ("nic_link_down", False), "but a link that is down is"


def test_an_error_without_an_end_is_told_once_in_an_attempt() -> None:
    faults = SensorFaults()
    ecc = fault("gpu_ras_uncorrectable", source="kernel_log", nic=None, gpu="0")
    assert fed(faults, report(ecc, sensor="kernel_log")) == [("gpu_ras_uncorrectable", False)]
    assert fed(faults, report(ecc, first=True, sensor="kernel_log")) == []
    faults.begin_attempt()
    assert fed(faults, report(ecc, sensor="kernel_log")) == [("gpu_ras_uncorrectable", False)]


def test_a_supervisor_that_takes_an_attempt_over_knows_what_was_recorded() -> None:
    faults = SensorFaults()
    faults.begin_attempt()
    dead = fault("node_dead", source="agent", nic=None)
    faults.restore([DOWN, fault(nic="ionic_1"), fault(nic="ionic_1", cleared=True), dead])
    assert faults.take() == [], "it is recorded already"
    assert fed(faults, report(DOWN, first=True)) == []
    assert fed(faults, report(UP)) == [("nic_link_down", True)], "or it would count as down for ever"
    assert fed(faults, report(fault(nic="ionic_1"))) == [("nic_link_down", False)]
