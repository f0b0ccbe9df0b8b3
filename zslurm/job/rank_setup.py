"""What every rank does first and last: torchrun's variables from Slurm's, and the place of its progress record."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

from zslurm.hardware import compiler_caches
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import sysroot
from zslurm.slurm.environment import step_info
from zslurm.train.progress import record_path

_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""What hides AMD's GPUs from a process, the outermost first: each counts among those that the ones before show."""


def set_up(environ: MutableMapping[str, str]) -> None:
    """Give a rank its environment before it imports anything that reads it, and print what a user should know.

    Raises:
        SlurmUnavailable: see `map_environment`.
    """
    map_environment(environ)
    notes = [*keep_one_of_visible(environ), *compiler_caches.ready(environ)]
    for note in notes if environ.get("LOCAL_RANK") == "0" else ():
        print(note, flush=True)


def keep_one_of_visible(environ: MutableMapping[str, str], root: Path | None = None) -> list[str]:
    """Leave one of the variables that hide AMD's GPUs: several of Slurm and the user's shell may leave no GPU."""
    present = [name for name in _VISIBLE if environ.get(name)]
    if len(present) < 2 or {gpu.kind for gpu in read_gpus(root or sysroot(environ))} != {"amd"}:
        return []
    for name in present[1:]:
        del environ[name]
    return [f"{', '.join(present[1:])}: not used, as {present[0]}={environ[present[0]]} is set too"]


def map_environment(environ: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from Slurm's; a local step has set them already.

    Raises:
        SlurmUnavailable: neither Slurm nor a local step started this process.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return
    info = step_info(environ)
    environ["RANK"] = str(info.rank)
    environ["WORLD_SIZE"] = str(info.world_size)
    environ["LOCAL_RANK"] = str(info.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(info.local_world_size)
    # Not SLURM_NODEID, which counts the nodes in Slurm's own order also where ranks are placed in another.
    environ["GROUP_RANK"] = str(info.rank // info.local_world_size)


def open_progress(directory: Path, rank: int) -> None:
    """Make the directory and this rank's record in it."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            record_path(directory, rank).touch(mode=0o600)
        except FileNotFoundError:  # the last rank to leave removed it in between
            continue
        return


def close_progress(directory: Path, rank: int) -> None:
    """Remove this rank's record, and with the last one the directory."""
    with contextlib.suppress(OSError):
        record_path(directory, rank).unlink(missing_ok=True)
        directory.rmdir()


def leave(code: int) -> NoReturn:
    """End this process, whose work is done and recorded, without the destructors of native libraries.

    With two SMI libraries of ROCm in the process, RCCL's and hwloc's, these free the same memory twice, and a rank
    that has trained would end by SIGABRT (HewlettPackard/shs-ccl-docs, rccl_tuning_guide.md, double free).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as Python does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
