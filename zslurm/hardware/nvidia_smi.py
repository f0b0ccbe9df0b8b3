"""What nvidia-smi says, asked for single fields as CSV: `0, 00000000:18:00.0, 4, 0, [N/A]`.

Fields and their meaning: `nvidia-smi --help-query-gpu` and its kin. Volatile counters count since the driver was
loaded. A GPU without a field says `[N/A]`, a field that a driver does not know fails the whole question: rows
remapped and pages retired are therefore asked for separately.
"""

from __future__ import annotations

from zslurm.hardware.command import CommandHung
from zslurm.hardware.gpu_health import GpuHealth, GpuProcess, Gpus
from zslurm.hardware.machine import Machine

_GPU = "index,pci.bus_id,memory.used,ecc.errors.uncorrected.volatile.total,ecc.errors.corrected.volatile.total"
_ROWS = "gpu_bus_id,remapped_rows.uncorrectable,remapped_rows.pending,remapped_rows.failure"
_APPS = "gpu_bus_id,pid,used_memory,process_name"
_FORMAT = "--format=csv,noheader,nounits"
_MIB = 1 << 20
_PATIENCE = 3


def read(sources: Machine) -> Gpus:
    """Ask nvidia-smi; not again once it has fallen silent."""
    patience = sources.limits.canary_s
    try:
        listed = sources.run("nvidia-smi", "--list-gpus", timeout_s=patience)
        if listed is None:
            return Gpus(why="nvidia-smi is not on PATH")
        answers = []
        for question in (f"--query-gpu={_GPU}", f"--query-remapped-rows={_ROWS}", f"--query-compute-apps={_APPS}"):
            said = sources.run("nvidia-smi", question, _FORMAT, timeout_s=_PATIENCE * patience)
            answers.append(said.out if said and said.code == 0 else None)
    except CommandHung as error:
        return Gpus(hung=str(error), why=str(error))
    health = parse(answers[0] or "", answers[1], answers[2])
    words = (listed.err or listed.out).strip().splitlines()
    if not health:
        return Gpus(why=f"nvidia-smi names no GPU: {words[-1]}" if words else "nvidia-smi printed nothing")
    return Gpus(health, source="nvidia-smi")


def parse(gpus: str, rows: str | None = None, apps: str | None = None) -> tuple[GpuHealth, ...]:
    """The three answers, put together by PCI address; None is a question that the driver did not take."""
    remapped = {cells[0].lower(): cells[1:] for cells in _cells(rows or "", 4)}
    processes: dict[str, list[GpuProcess]] = {}
    for bus, pid, used, name in _cells(apps or "", 4):
        held = number(used)
        processes.setdefault(bus.lower(), []).append(
            GpuProcess(int(pid), name, None if held is None else held * _MIB)
        )
    found = []
    for index, bus, used, uncorrected, corrected in _cells(gpus, 5):
        memory = number(used)
        found.append(
            GpuHealth(
                index=int(index),
                pci=bus.lower().removeprefix("0000") if bus.startswith("0000") and len(bus) == 16 else bus.lower(),
                uncorrectable=number(uncorrected),
                correctable=number(corrected),
                bad_pages=_rows(remapped.get(bus.lower())),
                vram_used=None if memory is None else memory * _MIB,
                processes=None if apps is None else tuple(processes.get(bus.lower(), ())),
            )
        )
    return tuple(found)


def number(text: str) -> int | None:
    """A count; None for `[N/A]`, `[Not Supported]` and the like. `Yes` and `No` are 1 and 0."""
    words = {"yes": 1, "no": 0}
    return int(text) if text.isdecimal() else words.get(text.lower())


def _rows(cells: list[str] | None) -> dict[str, int] | None:
    counts = [number(cell) for cell in cells or []]
    named = zip(("retired", "pending", "unreservable"), counts, strict=False)
    return {name: count for name, count in named if count is not None} or None


def _cells(text: str, count: int) -> list[list[str]]:
    split = ([cell.strip() for cell in line.split(",", count - 1)] for line in text.splitlines())
    return [cells for cells in split if len(cells) == count]
