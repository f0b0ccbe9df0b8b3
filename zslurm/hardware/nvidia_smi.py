"""Read the answers of nvidia-smi, which is asked for single fields as CSV: `0, 00000000:18:00.0, 4, 0, [N/A]`.

Fields and their meaning: `nvidia-smi --help-query-gpu` and its kin. Volatile counters count since the driver was
loaded. A GPU without a field has `[N/A]`, a field that a driver does not know fails the whole question: rows
remapped and pages retired are therefore asked for separately.
"""

from __future__ import annotations

from collections.abc import Sequence

from zslurm.hardware.command import CommandResult
from zslurm.hardware.gpu_health import GpuHealth, GpuProcess, GpuReadings, Run, ask_tool

_GPU = "index,pci.bus_id,memory.used,ecc.errors.uncorrected.volatile.total,ecc.errors.corrected.volatile.total"
_ROWS = "gpu_bus_id,remapped_rows.uncorrectable,remapped_rows.pending,remapped_rows.failure"
_APPS = "gpu_bus_id,pid,used_memory,process_name"


def read(run: Run, canary_s: float) -> GpuReadings:
    """Ask nvidia-smi for the health of the GPUs."""
    queries = (f"--query-gpu={_GPU}", f"--query-remapped-rows={_ROWS}", f"--query-compute-apps={_APPS}")

    def read_answers(answers: Sequence[CommandResult]) -> tuple[GpuHealth, ...]:
        gpus, rows, apps = (answer.out if answer.code == 0 else None for answer in answers)
        return parse(gpus or "", rows, apps)

    questions = [[query, "--format=csv,noheader,nounits"] for query in queries]
    return ask_tool(run, "nvidia-smi", ["--list-gpus"], questions, read_answers, canary_s=canary_s)


def parse(gpus: str, rows: str | None = None, apps: str | None = None) -> tuple[GpuHealth, ...]:
    """Return the three answers, put together by PCI address; None is a question that the driver did not take."""
    remapped = {cells[0].lower(): cells[1:] for cells in _cells(rows or "", 4)}
    processes: dict[str, list[GpuProcess]] = {}
    for bus, pid, used, name in _cells(apps or "", 4):
        processes.setdefault(bus.lower(), []).append(GpuProcess(int(pid), name, _mib(used)))
    return tuple(
        GpuHealth(
            index=int(index),
            pci=bus.lower().removeprefix("0000") if bus.startswith("0000") and len(bus) == 16 else bus.lower(),
            uncorrectable=number(uncorrected),
            correctable=number(corrected),
            bad_pages=_rows(remapped.get(bus.lower())),
            vram_used=_mib(used),
            processes=None if apps is None else tuple(processes.get(bus.lower(), ())),
        )
        for index, bus, used, uncorrected, corrected in _cells(gpus, 5)
    )


def _mib(text: str) -> int | None:
    """Return bytes of a number of MiB."""
    count = number(text)
    return None if count is None else count << 20


def number(text: str) -> int | None:
    """Return a count; None for `[N/A]`, `[Not Supported]` and the like. `Yes` and `No` are 1 and 0."""
    return int(text) if text.isdecimal() else {"yes": 1, "no": 0}.get(text.lower())


def _rows(cells: list[str] | None) -> dict[str, int] | None:
    counts = [number(cell) for cell in cells or []]
    named = zip(("retired", "pending", "unreservable"), counts, strict=False)
    return {name: count for name, count in named if count is not None} or None


def _cells(text: str, count: int) -> list[list[str]]:
    split = ([cell.strip() for cell in line.split(",", count - 1)] for line in text.splitlines())
    return [cells for cells in split if len(cells) == count]
