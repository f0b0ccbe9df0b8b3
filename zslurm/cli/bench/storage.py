"""`zslurm bench storage`."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Annotated

from typer import Option

from zslurm.bench.run.work_directory import PREFIX
from zslurm.bench.storage_space import refusal
from zslurm.cli.bench.choices import size_of
from zslurm.cli.bench.options import Apply, Minutes, Nodelist, Nodes, Out, Plot, Quick, Ranks
from zslurm.cli.bench.run import Common, run_benchmark
from zslurm.cli.options import Cluster, Json
from zslurm.core.errors import ConfigError

_LEAST_BYTES = 4 << 20
_MOST_DEPTH = 1024
_CPU_RANKS = 2


def storage(
    path: Annotated[
        Path, Option(metavar="DIR", help="Directory to measure; on a cluster one that the nodes see.")
    ],
    cluster: Cluster = None,
    nodes: Nodes = None,
    nodelist: Nodelist = None,
    ranks: Ranks = None,
    size: Annotated[str, Option(metavar="SIZE", help="Bytes that each rank reads and writes.")] = "1GiB",
    checkpoint_size: Annotated[str, Option(metavar="SIZE", help="Bytes of each rank's shard.")] = "1GiB",
    depth: Annotated[
        list[int] | None,
        Option(metavar="N", min=1, max=_MOST_DEPTH, help="Random reads at a time on each rank (repeatable)."),
    ] = None,
    files: Annotated[int, Option(metavar="N", min=10, max=10**6, help="Empty files that each rank makes.")] = 1000,
    quick: Quick = False,
    minutes: Minutes = None,
    out: Out = None,
    plot: Plot = None,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Measure storage: random and sequential reads, writes, saves of checkpoints, operations on names.

    Example: zslurm bench storage --path /scratch/ada --nodes 8
    """
    most = 1 << 26 if quick else 1 << 62
    options = {
        "path": str(path.absolute()),
        "work": PREFIX + secrets.token_hex(6),
        "size": min(_size("--size", size), most),
        "checkpoint": min(_size("--checkpoint-size", checkpoint_size), most),
        "depths": sorted(set(depth or ([1, 16] if quick else [1, 4, 16, 64]))),
        "files": min(files, 200) if quick else files,
        "seconds": 0.5 if quick else 3.0,
        "saves": 1 if quick else 3,
    }
    if (nodes is None and nodelist is None) or path.exists():  # else it may be a disk that only the nodes have
        _check(path, options, ranks or _CPU_RANKS, nodes or 1)
    try:
        run_benchmark("storage", options, Common(cluster, nodes, nodelist, ranks, minutes, out, plot, json, apply))
    finally:
        shutil.rmtree(path / str(options["work"]), ignore_errors=True)


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
