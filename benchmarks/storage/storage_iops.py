"""IOPS of `zslurm bench storage` against the kernel's own counters, in the same seconds.

Random reads of 16 KiB at several depths, five times each. The peers are `read_bytes` of /proc/self/io, which
counts what this process had the storage read, and the completed reads in /sys/block/DEVICE/stat, which counts
those of the whole machine: where others read meanwhile it shows more.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, write_result
from zslurm.bench.storage import BLOCK
from zslurm.bench.storage_io import ScratchFile, read_bytes

SIZE, SECONDS, RUNS, DEPTHS = 1 << 30, 1.0, 5, (1, 4, 16, 64)


def completed_reads(directory: Path) -> int | None:
    """Reads that the block device of a directory has completed (Documentation/block/stat.rst), if it has one."""
    number = directory.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    return int(stat.read_text().split()[0]) if stat.exists() else None


def run() -> None:
    """Measure and write the result."""
    rows = []
    with tempfile.TemporaryDirectory(dir=ROOT) as place:
        directory = Path(place)
        file = ScratchFile(directory, "scratch", SIZE)
        file.write()
        for depth in DEPTHS:
            iops, by_process, by_device = [], [], []
            for _ in range(RUNS):
                before, device_before = read_bytes(), completed_reads(directory)
                found = file.read_randomly(depth, SECONDS, BLOCK)
                after, device_after = read_bytes(), completed_reads(directory)
                iops.append(found.operations / found.elapsed)
                assert before is not None and after is not None, "the kernel does not count (/proc/self/io)"
                by_process.append((after - before) / BLOCK / found.elapsed)
                if device_before is not None and device_after is not None:
                    by_device.append((device_after - device_before) / found.elapsed)
            rows.append(
                {
                    "depth": depth,
                    "iops": round(statistics.median(iops)),
                    "kernel_process_iops": round(statistics.median(by_process)),
                    "kernel_device_iops": round(statistics.median(by_device)) if by_device else None,
                    "of_process": [round(a / b, 4) for a, b in zip(iops, by_process, strict=True)],
                    "of_device": [round(a / b, 4) for a, b in zip(iops, by_device, strict=False)],
                }
            )
        how = "direct" if file.is_direct else "page cache dropped"
        file.close()
    worst = max(abs(1 - share) for row in rows for share in row["of_process"] + row["of_device"])
    write_result(
        "storage_iops",
        {
            "how": how,
            "block_bytes": BLOCK,
            "file_bytes": SIZE,
            "rows": rows,
            "largest_difference": round(worst, 4),
        },
    )
