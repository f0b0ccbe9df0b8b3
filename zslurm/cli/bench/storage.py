"""`zslurm bench storage`."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from zslurm.bench.run.work_directory import PREFIX
from zslurm.bench.storage_space import refusal
from zslurm.cli.bench.choices import size_of
from zslurm.cli.bench.options import MeasureForProfile
from zslurm.cli.bench.run import run_benchmark
from zslurm.cli.options import command_of
from zslurm.core.errors import ConfigError

_LEAST_BYTES = 4 << 20
_MOST_DEPTH = 1024
_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Storage(MeasureForProfile):
    """What `zslurm bench storage` takes on its command line."""

    path: Annotated[Path, Option(metavar="DIR", help="Directory to measure; on a cluster one that the nodes see.")]
    size: Annotated[str, Option(metavar="SIZE", help="Bytes that each rank reads and writes.")] = "1GiB"
    checkpoint_size: Annotated[str, Option(metavar="SIZE", help="Bytes of each rank's shard.")] = "1GiB"
    depth: Annotated[
        list[int] | None,
        Option(metavar="N", min=1, max=_MOST_DEPTH, help="Random reads at a time on each rank (repeatable)."),
    ] = None
    files: Annotated[int, Option(metavar="N", min=10, max=10**6, help="Empty files that each rank makes.")] = 1000


def _storage(given: Storage) -> None:
    """Measure storage: random and sequential reads, writes, saves of checkpoints, operations on names.

    Example: zslurm bench storage --path /scratch/ada --nodes 8
    """
    most = 1 << 26 if given.quick else 1 << 62
    options = {
        "path": str(given.path.absolute()),
        "work": PREFIX + secrets.token_hex(6),
        "size": min(_size("--size", given.size), most),
        "checkpoint": min(_size("--checkpoint-size", given.checkpoint_size), most),
        "depths": sorted(set(given.depth or ([1, 16] if given.quick else [1, 4, 16, 64]))),
        "files": min(given.files, 200) if given.quick else given.files,
        "seconds": 0.5 if given.quick else 3.0,
        "saves": 1 if given.quick else 3,
    }
    here = given.nodes is None and given.nodelist is None
    if here or given.path.exists():  # else it may be a disk that only the nodes have
        _check(given.path, options, given.ranks or _CPU_RANKS, given.nodes or 1)
    try:
        run_benchmark("storage", options, given)
    finally:
        shutil.rmtree(given.path / str(options["work"]), ignore_errors=True)


storage = command_of(Storage, _storage)


def _check(path: Path, options: dict[str, object], ranks: int, nodes: int) -> None:
    size, checkpoint = options["size"], options["checkpoint"]
    assert isinstance(size, int) and isinstance(checkpoint, int)
    reason = refusal(path, size=size, checkpoint=checkpoint, ranks_per_node=ranks, nodes=nodes)
    if reason is not None:
        raise ConfigError(f"--path {reason}")


def _size(option: str, text: str) -> int:
    """Return a size in bytes, a multiple of the largest block."""
    size = size_of(option, text)
    if size < _LEAST_BYTES:
        raise ConfigError(f"{option} {text}: at least 4MiB")
    return size // _LEAST_BYTES * _LEAST_BYTES
