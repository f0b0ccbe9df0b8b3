"""Run one part in this process: `python -m benchmarks.gpu.part NAME --device gpu --rows FILE`; for command.py."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import PARTS
from zslurm.kernels.arch import arch_of
from zslurm.train.allocator import VARIABLES


def main() -> None:
    """Write a line of JSON for each row of the part, or print what the device is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("describe", *PARTS))
    parser.add_argument("--device", choices=("gpu", "cpu"), required=True)
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "gpu" else torch.device("cpu")
    if options.part == "describe":
        print(json.dumps(_description(device)))
        return
    with options.rows.open("a") as out:
        for row in PARTS[options.part].run(device):
            out.write(json.dumps(row, default=str) + "\n")
            out.flush()


def _description(device: torch.device) -> dict[str, Any] | None:
    versions: dict[str, Any] = {"torch": torch.__version__, "triton": _version("triton")}
    versions["transformers"] = _version("transformers")
    if device.type == "cpu":
        return {"card": f"rehearsal-on-cpu-{platform.machine()}", "driver": None, **versions}
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    torch.zeros(2**26, device=device)  # in the allocator's segments, which not every driver has
    torch.cuda.synchronize(device)
    return {
        "card": properties.name,
        "architecture": arch_of(device).name,
        "memory_gib": round(properties.total_memory / 2**30),
        "compute_units": properties.multi_processor_count,
        "driver": _driver(),
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "allocator": next((os.environ[name] for name in VARIABLES if name in os.environ), None),
        **versions,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of the kernel's driver: amdgpu's or NVIDIA's."""
    for file in ("/sys/module/amdgpu/version", "/sys/module/nvidia/version"):
        if Path(file).is_file():
            return Path(file).read_text().strip()
    text = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module.*?\b(\d+\.\d+(?:\.\d+)?)\b", text.read_text()) if text.is_file() else None
    return found[1] if found else None


if __name__ == "__main__":
    main()
