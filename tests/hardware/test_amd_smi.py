"""amd-smi's answers, in the forms that several releases gave them, from public samples."""

from __future__ import annotations

import json

import pytest

from tests.doctor import samples
from tests.doctor.nodes import Node
from zslurm.hardware.amd_smi import documents, gpu_rows, number, parse, size
from zslurm.hardware.gpu_health import GpuProcess


def test_several_documents_with_text_between_them_are_all_read() -> None:
    assert [type(document) for document in documents(samples.CONCATENATED)] == [list, list, list]
    assert [row["gpu"] for row in gpu_rows(samples.CONCATENATED)] == [0, 1]


def test_a_warning_in_front_and_a_document_for_each_gpu_are_read() -> None:
    rows = [samples.metric_row(0), samples.metric_row(1, uncorrectable=2)]
    text = "\n".join([samples.MISSING_GROUPS, *(json.dumps([row]) for row in rows)])
    assert [gpu.uncorrectable for gpu in parse(text)] == [0, 2]


@pytest.mark.parametrize("wrap", [samples.metric, json.dumps], ids=["ROCm 7: gpu_data", "ROCm 6: a list"])
def test_both_forms_of_the_metric_give_the_same(wrap: object) -> None:
    rows = [samples.metric_row(0, correctable=3, deferred=1, uncorrectable=2, used_mb=283)]
    (gpu,) = parse(wrap(rows))  # type: ignore[operator]
    assert (gpu.uncorrectable, gpu.correctable, gpu.deferred) == (2, 3, 1)
    assert gpu.blocks == {"UMC": 2}
    assert gpu.vram_used == 283 << 20


def test_what_is_not_available_is_none_and_not_zero() -> None:
    row = samples.metric_row(0)
    row["ecc"] = dict.fromkeys(row["ecc"], "N/A")
    row["ecc_blocks"] = "N/A"
    row["mem_usage"] = {"used_vram": "N/A"}
    (gpu,) = parse(samples.metric([row]))
    assert (gpu.uncorrectable, gpu.correctable, gpu.deferred, gpu.vram_used) == (None, None, None, None)


def test_a_block_counts_where_the_total_does_not_know() -> None:
    row = samples.metric_row(0)
    row["ecc"] = dict.fromkeys(row["ecc"], "N/A")
    row["ecc_blocks"]["XGMI_WAFL"]["uncorrectable_count"] = 4
    assert row["xgmi_err"] == "N/A"  # as on every MI300X, whatever its links do
    (gpu,) = parse(samples.metric([row]))
    assert (gpu.uncorrectable, gpu.blocks) == (4, {"XGMI_WAFL": 4})


def test_bad_pages_are_counted_and_their_absence_is_a_string() -> None:
    rows = samples.metric([samples.metric_row(0), samples.metric_row(1), samples.metric_row(2)])
    pages = json.loads(samples.bad_pages(3))
    pages[1]["retired"] = [samples.BAD_PAGE, samples.BAD_PAGE]
    pages[2] = {"gpu": 2, "retired": "N/A", "pending": "N/A", "un_res": "N/A"}
    sound, retired, unknown = parse(rows, json.dumps(pages))
    assert sound.bad_pages == {"retired": 0, "pending": 0, "unreservable": 0}
    assert retired.bad_pages == {"retired": 2, "pending": 0, "unreservable": 0}
    assert unknown.bad_pages is None


@pytest.mark.parametrize(
    ("gpu", "text", "expected"),
    [
        (7, samples.PROCESS_IDLE, ()),
        (0, samples.PROCESS_MEM_USAGE_ZERO, (GpuProcess(2266127, None, int(1.9 * 2**30)),)),
        (0, samples.PROCESS_FLAT, (GpuProcess(4242, "python", 2048),)),
        (0, "[]", None),
    ],
)
def test_processes(gpu: int, text: str, expected: tuple[GpuProcess, ...] | None) -> None:
    (found,) = parse(samples.metric([samples.metric_row(gpu)]), process=text)
    assert found.processes == expected


def test_numbers_and_sizes_in_all_their_forms() -> None:
    assert [number(value) for value in (3, "3", {"value": 3, "unit": ""}, "N/A", None, True)] == [
        3,
        3,
        3,
        None,
        None,
        None,
    ]
    assert [size(value) for value in (2048, {"value": 2, "unit": "GB"}, "N/A", {"value": "N/A"})] == [
        2048, 2 << 30, None, None,
    ]  # fmt: skip


def test_what_amd_smi_leaves_open_comes_from_sysfs(node: Node) -> None:
    row = samples.metric_row(0)
    row["ecc"] = dict.fromkeys(row["ecc"], "N/A")
    row["ecc_blocks"] = {}
    place = node.sources().facts.gpus[0].pci
    node.smi(metric=samples.metric([row]), list=json.dumps([{"gpu": 0, "bdf": place}]))
    node.fake.write(f"sys/bus/pci/devices/{place}/ras/umc_err_count", "ue: 1\nce: 7")
    (gpu,) = node.sources().gpus.health
    assert (gpu.uncorrectable, gpu.correctable, gpu.blocks) == (1, 7, {"UMC": 1})
    assert gpu.vram_used == 283 << 20  # amd-smi's own


def test_without_amd_smi_all_comes_from_sysfs(node: Node) -> None:
    (node.root / "opt/rocm/bin/amd-smi").unlink()
    place = node.sources().facts.gpus[5].pci
    node.fake.write(f"sys/bus/pci/devices/{place}/ras/aca_umc", "ue: 2\nce: 0\nde: 3")
    node.fake.write(f"sys/bus/pci/devices/{place}/ras/gpu_vram_bad_pages", samples.RAS_BAD_PAGES)
    node.fake.write(f"sys/bus/pci/devices/{place}/mem_info_vram_used", "297771008")
    found = node.sources().gpus
    assert (found.source, len(found.health)) == ("sysfs", 8)
    gpu = found.health[5]
    assert (gpu.uncorrectable, gpu.deferred, gpu.vram_used) == (2, 3, 297771008)
    assert gpu.bad_pages == {"retired": 3, "pending": 0, "unreservable": 0}
    assert found.health[0].uncorrectable is None  # no counter there: not known, not zero
