"""`python -m zslurm.job.preparation.container_check`: whether this container can train here; asked once a node.

It must have what the ranks import, and its RDMA library must have the ABI of the host's driver: if it does
not, libibverbs drops every device, and RCCL falls back to sockets or dies with "Connection refused".
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from zslurm.core.files import read_text
from zslurm.slurm.on_nodes.run_on_nodes import answer

NEEDED = ("torch", "numpy", "h5py", "psutil", "pydantic", "zslurm")
NEEDED_BY_PROGRAMS = ("psutil", "pydantic", "yaml", "yamlcore", "zslurm")
"""What the rank of a program that is not ours imports; what the program needs is its own affair."""
VERBS = Path("/sys/class/infiniband_verbs")
# In a separate process: libibverbs prints to stderr, and a broken provider may take its process along.
_LIST_DEVICES = """
import ctypes, json
lib = ctypes.CDLL("libibverbs.so.1")
lib.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
lib.ibv_get_device_name.restype = ctypes.c_char_p
lib.ibv_get_device_name.argtypes = [ctypes.c_void_p]
count = ctypes.c_int(0)
devices = lib.ibv_get_device_list(ctypes.byref(count))
print(json.dumps([lib.ibv_get_device_name(devices[i]).decode() for i in range(count.value)]))
"""
# libibverbs/init.c of rdma-core.
_WRONG_ABI = re.compile(
    r"Driver (?P<driver>\S+) does not support the kernel ABI of (?P<abi>\d+) "
    r"\(supports (?P<least>\d+) to (?P<most>\d+)\) for device (?P<device>\S+)"
)


@dataclass(frozen=True)
class AbiCheck:
    """Whether the RDMA library of this place can drive the devices of this kernel."""

    state: Literal["ok", "mismatch", "unavailable"]
    detail: str


def check_rdma_abi(verbs: Path = VERBS) -> AbiCheck:
    """Compare the devices that the kernel lists in `verbs` with those that libibverbs can open."""
    entries = sorted(verbs.glob("uverbs*"))
    kernel = {read_text(entry / "ibdev") or "": read_text(entry / "abi_version") or "" for entry in entries}
    kernel.pop("", None)
    if not kernel:
        return AbiCheck("unavailable", "no RDMA devices to be seen")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_DEVICES], capture_output=True, text=True, errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        return AbiCheck("unavailable", "libibverbs did not list its devices within 60 s")
    if done.returncode != 0:
        (reason,) = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return AbiCheck("unavailable", f"libibverbs cannot be asked: {reason}")
    return compare(kernel, json.loads(done.stdout), done.stderr)


def compare(kernel: dict[str, str], usable: list[str], errors: str) -> AbiCheck:
    """Compare the kernel's devices (name -> ABI) with the devices that libibverbs lists and what it prints."""
    dropped = [device for device in kernel if device not in usable]
    if not dropped:
        return AbiCheck("ok", f"{len(kernel)} RDMA devices can be used")
    named = f"{len(dropped)} of {len(kernel)} RDMA devices cannot be used ({', '.join(dropped)})"
    if wrong := _WRONG_ABI.search(errors):
        return AbiCheck(
            "mismatch",
            f"{named}: the driver {wrong['driver']} in here speaks ABI {wrong['least']} to {wrong['most']}, the "
            f"host's kernel ABI {wrong['abi']}; take an image with the host's version of lib{wrong['driver']}",
        )
    return AbiCheck("mismatch", f"{named}: the libibverbs in here has no working driver for them")


def main() -> None:
    """Answer `run_on_nodes`; the arguments are the modules that must be there, NEEDED by default."""
    missing = [name for name in sys.argv[1:] or NEEDED if find_spec(name) is None]
    answer({"python": platform.python_version(), "missing": missing, "abi": asdict(check_rdma_abi())})


if __name__ == "__main__":
    main()
