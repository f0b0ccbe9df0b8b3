"""The health of AMD GPUs from sysfs: what is left if amd-smi is missing, silent or prints `N/A`.

`ras/BLOCK_err_count` holds lines `ue: 0` and `ce: 0` (newer kernels: `ras/aca_BLOCK`, with `de: 0`);
`ras/gpu_vram_bad_pages` a line for each page, `0x027f5d43 : 0x00001000 : R`, whose last letter is R for retired, P
for pending and F for a page that could not be reserved (drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c). Processes that
hold GPU memory are in /sys/class/kfd/kfd/proc/PID/vram_ID; one that merely opened the driver is listed with 0
bytes, and holds nothing (ROCm/legacy-rocm-build#4411).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from zslurm.core.files import read_text
from zslurm.hardware.gpu_health import GpuHealth, GpuProcess
from zslurm.hardware.gpus import Gpu
from zslurm.hardware.sysfs import key_values, names, read_int

_COUNTERS = re.compile(r"aca_(?P<aca>\w+?)(?:_err_count)?|(?P<block>\w+)_err_count")
_PAGE_LETTERS = {"R": "retired", "P": "pending", "F": "unreservable"}


def read(root: Path, gpus: Sequence[Gpu]) -> list[GpuHealth]:
    """Read the counters of the AMD GPUs among these, in their order."""
    return [
        _health(gpu.index, gpu.pci, root / "sys/bus/pci/devices" / gpu.pci)
        for gpu in gpus
        if gpu.kind == "amd" and gpu.pci
    ]


def _health(index: int, pci: str, device: Path) -> GpuHealth:
    counts: list[tuple[str, dict[str, int]]] = []
    for name in names(device / "ras"):
        if match := _COUNTERS.fullmatch(name):
            values = key_values(device / "ras" / name)
            block = (match["aca"] or match["block"]).upper()
            counts.append((block, {kind: int(value) for kind, value in values.items() if value.isdecimal()}))
    counts_known = [count for _, count in counts if count]
    return GpuHealth(
        index=index,
        pci=pci,
        uncorrectable=sum(count.get("ue", 0) for count in counts_known) if counts_known else None,
        correctable=sum(count.get("ce", 0) for count in counts_known) if counts_known else None,
        deferred=sum(count["de"] for count in counts_known if "de" in count)
        if any("de" in c for c in counts_known)
        else None,
        blocks={block: count["ue"] for block, count in counts if count.get("ue")},
        bad_pages=parse_bad_pages(read_text(device / "ras/gpu_vram_bad_pages")),
        vram_used=read_int(device / "mem_info_vram_used"),
    )


def parse_bad_pages(text: str | None) -> dict[str, int] | None:
    """Return how many pages of each kind; None if the file cannot be read (it is root's on many sites)."""
    if text is None:
        return None
    letters = [line.rpartition(":")[2].strip() for line in text.splitlines() if line.count(":") == 2]
    return {name: letters.count(letter) for letter, name in _PAGE_LETTERS.items()}


def kfd_processes(root: Path) -> list[GpuProcess] | None:
    """Return the processes that hold GPU memory; None if the KFD does not show them."""
    kfd = root / "sys/class/kfd/kfd/proc"
    if not kfd.is_dir():
        return None
    held = {
        int(pid): sum(read_int(kfd / pid / name) or 0 for name in names(kfd / pid) if name.startswith("vram_"))
        for pid in names(kfd)
        if pid.isdecimal()
    }
    return [GpuProcess(pid, None, vram) for pid, vram in held.items() if vram]
