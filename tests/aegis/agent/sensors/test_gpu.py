"""GPUs: what their counters say of this run, by sysfs and by a tool that may be missing, hang or print garbage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.aegis.contexts import context
from tests.doctor import samples
from tests.fake_sysfs import FakeNode, mi300x_pollara
from tests.waiting import wait_for
from zslurm.aegis.agent.gpu_tool import ToolSources, ask_amd_smi, parse_throttling
from zslurm.aegis.agent.sensor import Reading
from zslurm.aegis.agent.sensors.gpu import Gpus, GpuState, changes, make, worth_reporting
from zslurm.aegis.fault_kinds import rule_of
from zslurm.aegis.types import Fault
from zslurm.hardware.facts import read_facts


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """Eight GPUs whose files count no errors, and no tool."""
    fake = mi300x_pollara(tmp_path / "root")
    for gpu in range(8):
        count(fake, gpu)
    return fake


def address(node: FakeNode, gpu: int) -> str:
    pci = read_facts(node.root).gpus[gpu].pci
    assert pci is not None
    return pci


def count(node: FakeNode, gpu: int, block: str = "umc", *, ue: int = 0, ce: int = 0) -> None:
    node.write(f"sys/bus/pci/devices/{address(node, gpu)}/ras/{block}_err_count", f"ue: {ue}\nce: {ce}")


def sensor(node: FakeNode, **settings: Any) -> Gpus:
    made = make(context(node.root, **{"amd_smi": "off"} | settings))
    assert made is not None
    return made


def started(node: FakeNode) -> Gpus:
    gpus = sensor(node)
    reading = gpus.read()
    assert reading.ok and not reading.faults
    return gpus


def told(fault: Fault) -> tuple[str, str, str | None]:
    return fault.kind, fault.role, fault.gpu


# --- sysfs ------------------------------------------------------------------------------------------------------


def test_an_uncorrectable_error_is_a_root(node: FakeNode) -> None:
    count(node, 3, ue=2)
    gpus = started(node)
    count(node, 3, ue=3)
    reading = gpus.read()
    (fault,) = reading.faults
    pci = address(node, 3)
    assert told(fault) == ("gpu_ras_uncorrectable", "root", pci)
    assert (fault.scope, fault.node, fault.line) == (
        "gpu", "node0", f"GPU 3 ({pci}) counts 1 new uncorrectable error (UMC)",
    )  # fmt: skip
    assert reading.values == {"gpus": 8, "unknown": [], "uncorrectable": 3, "correctable": 0}
    assert gpus.read().faults == ()


def test_an_error_of_xgmi_is_told_as_such(node: FakeNode) -> None:
    count(node, 1, "xgmi_wafl")
    gpus = started(node)
    count(node, 1, "xgmi_wafl", ue=2)
    (fault,) = gpus.read().faults
    assert told(fault) == ("xgmi_error", "root", address(node, 1))
    count(node, 1, "xgmi_wafl", ue=3)
    count(node, 1, "umc", ue=1)
    assert [fault.kind for fault in gpus.read().faults] == ["xgmi_error", "gpu_ras_uncorrectable"]


def test_correctable_errors_are_told_more_and_more_rarely(node: FakeNode) -> None:
    gpus = started(node)
    said = []
    for total in (1, 2, 9, 10, 50, 99, 100, 5_000):
        count(node, 0, ce=total)
        said.append([(fault.kind, fault.role) for fault in gpus.read().faults])
    word = [("gpu_ras_correctable", "advisory")]
    assert said == [word, [], [], word, [], [], word, word]


@pytest.mark.parametrize(
    ("reported", "count", "worth"), [(0, 0, False), (0, 1, True), (1, 9, False), (1, 10, True)]
)
def test_worth_reporting(reported: int, count: int, worth: bool) -> None:
    assert worth_reporting(reported, count) is worth


def test_bad_pages_are_an_advisory_until_the_driver_gives_up(node: FakeNode) -> None:
    pages = f"sys/bus/pci/devices/{address(node, 2)}/ras/gpu_vram_bad_pages"
    node.write(pages, samples.RAS_BAD_PAGES)
    gpus = started(node)
    row = samples.RAS_BAD_PAGES.splitlines()[0]
    node.write(pages, "\n".join([row] * 5))
    (fault,) = gpus.read().faults
    assert told(fault) == ("gpu_bad_pages", "advisory", address(node, 2))
    assert "has 2 new bad pages, 5 in all" in fault.line
    node.write(pages, "\n".join([row] * 128))
    (fault,) = gpus.read().faults
    assert told(fault) == ("gpu_bad_pages", "root", address(node, 2))


@pytest.mark.parametrize("how", ["gone", "all ones"])
def test_a_gpu_that_disappears_is_a_root_told_once(node: FakeNode, how: str) -> None:
    pci = address(node, 6)
    gpus = started(node)
    if how == "gone":
        (node.root / "sys/bus/pci/devices" / pci).unlink()
    else:
        node.write(f"sys/bus/pci/devices/{pci}/vendor", "0xffff")
    (fault,) = gpus.read().faults
    assert told(fault) == ("gpu_init_fail", "root", pci)
    assert fault.line.endswith("has disappeared from the bus")
    assert gpus.read().faults == ()


def test_a_bus_that_was_never_seen_is_no_loss(tmp_path: Path) -> None:
    fake = mi300x_pollara(tmp_path / "root")
    for device in (fake.root / "sys/bus/pci/devices").iterdir():
        device.unlink()
    gpus = sensor(fake, amd_smi=answering(tmp_path, rows()), period_s=0.01)
    assert after_tool(gpus, lambda reading: reading.ok).faults == ()
    answering(tmp_path, rows(gpu2={"uncorrectable": 1}))
    (fault,) = after_tool(gpus, lambda reading: reading.faults).faults
    assert fault.kind == "gpu_ras_uncorrectable"


def test_counters_that_go_back_tell_of_a_reset_and_count_from_there(node: FakeNode) -> None:
    count(node, 4, ue=7, ce=50)
    gpus = started(node)
    count(node, 4)
    (fault,) = gpus.read().faults
    assert told(fault) == ("gpu_hang_reset", "advisory", address(node, 4))
    count(node, 4, ue=1)
    assert [fault.kind for fault in gpus.read().faults] == ["gpu_ras_uncorrectable"]


def test_a_counter_that_could_not_be_read_for_a_while_misses_nothing(node: FakeNode) -> None:
    gpus = started(node)
    file = node.root / f"sys/bus/pci/devices/{address(node, 5)}/ras/umc_err_count"
    file.write_text("")
    reading = gpus.read()
    assert reading.ok and not reading.faults and reading.values["unknown"] == [5]
    count(node, 5, ue=1)
    assert [told(fault)[0] for fault in gpus.read().faults] == ["gpu_ras_uncorrectable"]


def test_a_first_look_that_finds_no_counter_makes_the_next_one_the_first() -> None:
    assert changes(GpuState(), GpuState(uncorrectable=9, correctable=9, bad_pages=9, throttled=())) == []


def test_no_counters_and_no_tool_is_unavailable_not_healthy(tmp_path: Path) -> None:
    gpus = sensor(mi300x_pollara(tmp_path / "root"))
    for _ in range(2):
        reading = gpus.read()
        assert not reading.ok and reading.why.startswith("no GPU shows its errors")


def test_a_machine_without_gpus_has_no_sensor(tmp_path: Path) -> None:
    assert make(context(tmp_path / "root")) is None


def test_gpus_that_are_expected_and_not_there_are_unavailable(tmp_path: Path) -> None:
    made = make(context(tmp_path / "root", cluster={"gpus_per_node": 8}))
    assert made is not None and not made.read().ok


# --- the tool ---------------------------------------------------------------------------------------------------


def tool(tmp_path: Path, script: str) -> str:
    program = tmp_path / "bin" / "amd-smi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def answering(tmp_path: Path, metric: str) -> str:
    """A tool that answers as amd-smi does; what it says of metrics lies in a file."""
    (tmp_path / "metric").write_text(metric)
    (tmp_path / "bad-pages").write_text(samples.bad_pages(8))
    return tool(tmp_path, f'[ -e {tmp_path}/"$1" ] && cat {tmp_path}/"$1"')


def rows(**counts: dict[str, int]) -> str:
    return samples.metric([samples.metric_row(gpu, **counts.get(f"gpu{gpu}", {})) for gpu in range(8)])


def after_tool(gpus: Gpus, wanted: Callable[[Reading], object]) -> Reading:
    """The first reading of which something is true; the tool answers between two of them."""
    kept: list[Reading] = []

    def look() -> bool:
        kept.append(gpus.read())
        return bool(wanted(kept[-1]))

    wait_for(look, "the tool's answer")
    return kept[-1]


def test_the_tool_fills_in_what_sysfs_does_not_tell(tmp_path: Path) -> None:
    fake = mi300x_pollara(tmp_path / "root")
    gpus = sensor(fake, amd_smi=answering(tmp_path, rows(gpu2={"uncorrectable": 1})), period_s=0.01)
    first = gpus.read()
    assert first.pending and not first.ok, "it has not answered yet"
    reading = after_tool(gpus, lambda reading: reading.ok)
    assert not reading.faults and reading.values["uncorrectable"] == 1
    answering(tmp_path, rows(gpu2={"uncorrectable": 2}))
    (fault,) = after_tool(gpus, lambda reading: reading.faults).faults
    assert told(fault) == ("gpu_ras_uncorrectable", "root", address(fake, 2))


def test_a_tool_that_falls_silent_is_unavailable_and_what_it_missed_is_told_later(tmp_path: Path) -> None:
    fake = mi300x_pollara(tmp_path / "root")
    gpus = sensor(fake, amd_smi=answering(tmp_path, rows()), period_s=0.01)
    after_tool(gpus, lambda reading: reading.ok)
    tool(tmp_path, "exit 1")
    after_tool(gpus, lambda reading: not reading.ok)
    answering(tmp_path, rows(gpu2={"uncorrectable": 1}))
    reading = after_tool(gpus, lambda reading: reading.ok)
    assert [told(fault) for fault in reading.faults] == [("gpu_ras_uncorrectable", "root", address(fake, 2))]


def test_an_error_that_both_count_is_told_once(node: FakeNode, tmp_path: Path) -> None:
    gpus = sensor(node, amd_smi=answering(tmp_path, rows()), period_s=0.01)
    gpus.read()
    count(node, 2, ue=1)
    answering(tmp_path, rows(gpu2={"uncorrectable": 1}))
    assert len(gpus.read().faults) == 1
    assert [gpus.read().faults for _ in range(20)] == [()] * 20


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exec sleep 600", "`amd-smi metric` did not answer within 0.2 s"),
        ("echo 'Segmentation fault' >&2; exit 139", "amd-smi names no GPU: Segmentation fault"),
        ("head -c 4096 /dev/urandom", "amd-smi names no GPU"),
        ('echo \'[{"gpu": "N/A"}, 3, {"gpu": 0\'', "amd-smi names no GPU"),
        (f"echo '{samples.MISSING_GROUPS}'", "amd-smi names no GPU: WARNING: User is missing"),
        ("true", "amd-smi prints nothing"),
    ],
)
def test_a_tool_that_fails_is_unavailable(tmp_path: Path, script: str, why: str) -> None:
    fake = mi300x_pollara(tmp_path / "root")
    limit_s = 0.2 if "sleep" in script else 180.0
    gpus = sensor(fake, amd_smi=tool(tmp_path, script), amd_smi_timeout_s=limit_s, period_s=0.01)
    reading = after_tool(gpus, lambda reading: "amd-smi" in reading.why)
    assert not reading.ok and why in reading.why
    assert not reading.faults


def test_a_missing_tool_is_unavailable(tmp_path: Path) -> None:
    fake = mi300x_pollara(tmp_path / "root")
    reading = after_tool(sensor(fake, amd_smi="/no/such/amd-smi"), lambda reading: "not there" in reading.why)
    assert (reading.ok, reading.why) == (False, "no GPU shows its errors: amd-smi is not there")


def test_a_hanging_tool_does_not_hold_up_sysfs(node: FakeNode, tmp_path: Path) -> None:
    gpus = sensor(node, amd_smi=tool(tmp_path, "exec sleep 600"), amd_smi_timeout_s=3600.0)
    assert gpus.read().ok
    count(node, 0, ue=1)
    assert [fault.kind for fault in gpus.read().faults] == ["gpu_ras_uncorrectable"]


def test_after_a_failure_the_tool_is_asked_rarely(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    gpus = sensor(
        mi300x_pollara(tmp_path / "root"), amd_smi=tool(tmp_path, f"echo call >> {calls}"), period_s=3600.0
    )
    after_tool(gpus, lambda reading: "prints nothing" in reading.why)
    asked = calls.read_text()
    assert [gpus.read().ok for _ in range(50)] == [False] * 50
    assert calls.read_text() == asked


def test_numbers_that_are_none(tmp_path: Path) -> None:
    rows = [{"gpu": 0, "ecc": {"total_uncorrectable_count": "N/A"}, "ecc_blocks": "N/A", "xgmi_err": "N/A"}]
    path = answering(tmp_path, f"warning\n{json.dumps(rows)}\nLegend:\n")
    sources = ToolSources.of(context(tmp_path / "root", amd_smi=path))
    answer = ask_amd_smi(sources, 30.0)
    assert [(gpu.index, gpu.uncorrectable) for gpu in answer.health] == [(0, None)]


def test_off_and_percent_n(tmp_path: Path) -> None:
    assert ToolSources.of(context(tmp_path / "root", amd_smi="off")).find("amd-smi") is None
    (tmp_path / "smi-node0").write_text("#!/bin/sh\n")
    (tmp_path / "smi-node0").chmod(0o755)
    sources = ToolSources.of(context(tmp_path / "root", amd_smi=str(tmp_path / "smi-%n")))
    assert sources.find("amd-smi") == str(tmp_path / "smi-node0")


THROTTLED = {"prochot_violation_status": "NOT ACTIVE", "hbm_thermal_violation_status": "ACTIVE"}
AT_ITS_POWER_LIMIT = {"prochot_violation_status": "NOT ACTIVE", "ppt_violation_status": "ACTIVE"}


def test_throttling_in_both_forms() -> None:
    text = json.dumps(
        [
            {"gpu": 0, "throttle": THROTTLED},
            {"gpu": 1, "throttle": AT_ITS_POWER_LIMIT},
            {"gpu": 2, "throttle": dict.fromkeys(THROTTLED, "N/A")},
            {"gpu": 3, "power": {"throttle_status": "THROTTLED"}},
            {"gpu": 4, "power": {"throttle_status": "UNTHROTTLED"}},
            {"gpu": 5, "power": {"throttle_status": "N/A"}, "throttle": "N/A"},
        ]
    )
    assert parse_throttling(text) == {0: ("memory too hot",), 1: (), 3: ("throttled",), 4: ()}


def test_throttling_is_told_when_it_begins_and_ends() -> None:
    cool, hot = GpuState(throttled=()), GpuState(throttled=("memory too hot",))
    (begun,) = changes(cool, hot)
    (over,) = changes(hot, cool)
    assert (begun.kind, begun.role or rule_of(begun.kind).role, begun.cleared) == (
        "gpu_throttled",
        "advisory",
        False,
    )
    assert over.cleared
    assert changes(hot, hot) == changes(cool, cool) == changes(hot, GpuState()) == []
