"""Name the architecture that a tensor is on, and what a kernel has to know of it. No torch at import.

An implementation is chosen, measured and compiled per architecture: `cpu`, or what the compilers call the GPU, as
gfx942 (AMD MI300X, MI300A, MI325X), gfx90a (MI250X, each of its two devices) and sm_90 (NVIDIA H100, H200).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arch:
    """One architecture.

    Attributes:
        name: as the compilers have it, without features: gfx942, sm_90, cpu.
        wave_size: lanes that run in step: AMD's wavefront, NVIDIA's warp; 1 on a CPU.
        lds_bytes: fast memory that one workgroup may have: AMD's LDS, NVIDIA's shared memory with opt-in.
        compute_units: AMD's compute units, NVIDIA's multiprocessors, of the largest card.
    """

    name: str
    wave_size: int
    lds_bytes: int
    compute_units: int

    @property
    def is_amd(self) -> bool:
        """Return whether this is a GPU of AMD."""
        return self.name.startswith("gfx")

    @property
    def is_nvidia(self) -> bool:
        """Return whether this is a GPU of NVIDIA."""
        return self.name.startswith("sm_")


CPU = Arch("cpu", wave_size=1, lds_bytes=0, compute_units=1)
GFX942 = Arch("gfx942", wave_size=64, lds_bytes=64 * 1024, compute_units=304)
GFX90A = Arch("gfx90a", wave_size=64, lds_bytes=64 * 1024, compute_units=110)
SM_90 = Arch("sm_90", wave_size=32, lds_bytes=227 * 1024, compute_units=132)
KNOWN = {arch.name: arch for arch in (CPU, GFX942, GFX90A, SM_90)}
"""Those that kernels are compiled for and checked on; others run what their compiler makes of it."""


_meta = CPU


@contextmanager
def meta_tensors_on(arch: Arch) -> Iterator[None]:
    """Take tensors on the device `meta` for tensors on this architecture: for compiling kernels without a GPU."""
    global _meta
    _meta, before = arch, _meta
    try:
        yield
    finally:
        _meta = before


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU, or is taken for one (`meta_tensors_on`)."""
    return device.type == "cuda" or (device.type == "meta" and _meta != CPU)


def arch_of(device: torch.device | str) -> Arch:
    """Return the architecture of a device; of a GPU that is not among `KNOWN`, as torch describes it.

    Raises:
        ValueError: the device is neither a CPU nor a GPU that torch calls `cuda`.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return _gpu(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "meta":
        return _meta
    if device.type == "cpu":
        return CPU
    raise ValueError(f"no kernel is for a device of type {device.type}: use cpu or cuda (AMD's GPUs are cuda too)")


def _shared_memory(properties: Any) -> int:
    """Return the bytes that one workgroup may have; with opt-in, if there is such a thing."""
    limits = (getattr(properties, f"shared_memory_per_block{opt_in}", 0) for opt_in in ("_optin", ""))
    return int(next(filter(None, limits), 48 * 1024))  # 48 KiB: what every GPU has


@cache
def _gpu(index: int) -> Arch:
    import torch

    properties = torch.cuda.get_device_properties(index)
    amd = str(getattr(properties, "gcnArchName", "")) if torch.version.hip else ""
    name = amd.split(":")[0] if amd else f"sm_{properties.major}{properties.minor}"
    units = int(properties.multi_processor_count)
    if name in KNOWN:
        return replace(KNOWN[name], compute_units=units)
    return Arch(name, int(properties.warp_size), _shared_memory(properties), units)
