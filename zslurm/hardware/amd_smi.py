"""Read the answers of amd-smi. Its JSON has had several forms, and all of them are read.

A document is a list of GPUs, or `{"gpu_data": [...]}` since ROCm 7, or one document for each GPU after the other,
with warnings and legends between them. A number is a number, `"N/A"`, or `{"value": 283, "unit": "MB"}`.
Fields: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py; forms: amd/node-scraper, amdsmi_collector.py and its tests.

`xgmi_err` is never looked at: on MI300X it is always `N/A` (ROCm/rocm-systems#11468), so a check of it passes
whatever happens. XGMI's errors are in ecc_blocks.XGMI_WAFL.
"""

from __future__ import annotations

import json
import re
from typing import Any

from zslurm.hardware.gpu_health import GpuHealth, GpuProcess, GpuReadings, Run, ask_tool

_START = re.compile(r"[\[{]")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_PAGE_KINDS = {"retired": "retired", "pending": "pending", "un_res": "unreservable"}
_QUESTIONS = ("metric --ecc --ecc-blocks --mem-usage", "bad-pages", "process", "list")


def read(run: Run, canary_s: float) -> GpuReadings:
    """Ask amd-smi for the health of the GPUs."""
    return ask_tool(
        run,
        "amd-smi",
        ["version", "--json"],
        [[*question.split(), "--json"] for question in _QUESTIONS],
        lambda answers: parse(*(answer.out for answer in answers)),
        canary_s=canary_s,
    )


def parse(metric: str, bad_pages: str = "", process: str = "", listing: str = "") -> tuple[GpuHealth, ...]:
    """Return the answers to the four questions, put together by GPU."""
    pages = {row["gpu"]: _bad_pages(row) for row in gpu_rows(bad_pages)}
    processes = {row["gpu"]: _processes(row) for row in gpu_rows(process)}
    places = {row["gpu"]: row.get("bdf") for row in gpu_rows(listing)}
    return tuple(
        GpuHealth(
            index=row["gpu"],
            pci=places.get(row["gpu"]),
            uncorrectable=_known_sum(row, "uncorrectable"),
            correctable=_known_sum(row, "correctable"),
            deferred=_known_sum(row, "deferred"),
            blocks={block: count for block, count in _blocks(row, "uncorrectable").items() if count},
            bad_pages=pages.get(row["gpu"]),
            vram_used=size(_section(row, "mem_usage").get("used_vram")),
            processes=processes.get(row["gpu"]),
        )
        for row in gpu_rows(metric)
    )


def documents(text: str) -> list[Any]:
    """Yield every JSON value in a text, whatever is between them."""
    values, position, decoder = [], 0, json.JSONDecoder()
    while match := _START.search(text, position):
        try:
            value, position = decoder.raw_decode(text, match.start())
            values.append(value)
        except ValueError:
            position = match.end()
    return values


def gpu_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of an answer that are about a GPU."""
    rows: list[Any] = []
    for document in documents(text):
        inner = document.get("gpu_data", document) if isinstance(document, dict) else document
        rows += inner if isinstance(inner, list) else [inner]
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("gpu"), int)]


def number(value: Any) -> int | None:
    """Return a count; None for `N/A` and everything else that is none."""
    if isinstance(value, dict):
        return number(value.get("value"))
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return int(value)
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None


def size(value: Any) -> int | None:
    """Return bytes of `{"value": 283, "unit": "MB"}` or of a bare number, which is of bytes.

    Amd-smi's MB is 2^20.
    """
    unit = value.get("unit", "B") if isinstance(value, dict) else "B"
    count = value.get("value") if isinstance(value, dict) else value
    if isinstance(count, bool) or not isinstance(count, int | float) or unit not in _UNITS:
        return None
    return int(count * _UNITS[unit])


def _section(row: dict[str, Any], name: str) -> dict[str, Any]:
    section = row.get(name)
    return section if isinstance(section, dict) else {}


def _blocks(row: dict[str, Any], kind: str) -> dict[str, int]:
    """Return the errors of each hardware block whose count is known."""
    return {
        block: count
        for block, counters in _section(row, "ecc_blocks").items()
        if isinstance(counters, dict) and (count := number(counters.get(f"{kind}_count"))) is not None
    }


def _known_sum(row: dict[str, Any], kind: str) -> int | None:
    """Return the total; or the sum over blocks if it is more, or if the total is unknown."""
    total, blocks = number(_section(row, "ecc").get(f"total_{kind}_count")), _blocks(row, kind)
    totals = [total] if total is not None else []
    return max([*totals, sum(blocks.values())] if blocks else totals, default=None)


def _bad_pages(row: dict[str, Any]) -> dict[str, int] | None:
    counts = {}
    for key, name in _PAGE_KINDS.items():
        entry = row.get(key)
        if isinstance(entry, list):
            counts[name] = len(entry)
        elif isinstance(entry, str) and "no bad pages" in entry.lower():
            counts[name] = 0
    return counts or None


def _processes(row: dict[str, Any]) -> tuple[GpuProcess, ...] | None:
    listed = row.get("process_list")
    if not isinstance(listed, list):
        return None
    gpu_processes = []
    for entry in listed:
        info = entry.get("process_info", entry) if isinstance(entry, dict) else entry
        if isinstance(info, dict) and (pid := number(info.get("pid"))) is not None:
            # mem_usage may be 0 where memory_usage.vram_mem is what is held (ROCm/amdsmi#130).
            held = [size(_section(info, "memory_usage").get("vram_mem")), size(info.get("mem_usage"))]
            name = info.get("name")
            vram = max((count for count in held if count is not None), default=None)
            gpu_processes.append(GpuProcess(pid, name if isinstance(name, str) and name != "N/A" else None, vram))
    return tuple(gpu_processes)
