"""`zslurm checkpoint ls|show|verify|diff`: read checkpoints, change nothing."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from zslurm import checkpoint_tools
from zslurm.checkpoint_tools import Comparison, Manifest, Statistics, compare, statistics
from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.cli.checkpoint.checkpoint_options import Checkpoint, Checkpoints, Threads
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json, Slurm, complete_tensors, run_locally_or_as_job
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ConfigError
from zslurm.core.progress_bar import byte_bar
from zslurm.run.checkpoints import find_checkpoint, find_checkpoints, find_newest

_RANKS_SHOWN = 4


def list_(run: Checkpoints, json: Json = False) -> None:
    """List a run's checkpoints, and what is wrong with any.

    Example: zslurm checkpoint ls my-run
    """
    root, listings = find_checkpoints(run)
    facts = [
        {
            "path": str(listing.path),
            "step": listing.step,
            "tokens": listing.tokens,
            "ranks": listing.world_size,
            **_size_and_age(listing.path),
            "complete": listing.complete,
            "reason": listing.reason,
        }
        for listing in listings
    ]
    if json:
        print_json(facts)
    elif facts:
        rows = [
            [
                str(fact["step"]),
                show_count(fact["tokens"]) if fact["tokens"] is not None else "-",
                str(fact["ranks"] or "-"),
                show_bytes(fact["bytes"]),
                show_duration(fact["age_s"]),
                fact["reason"] or "complete",
            ]
            for fact in facts
        ]
        columns = (
            Column("step"),
            Column("tokens", drop=3),
            Column("ranks", drop=2),
            Column("size", drop=1),
            Column("age", drop=1),
            Column("state", "text"),
        )
        print_table(columns, rows)
    else:
        say(f"no checkpoints in {root}")


def _size_and_age(path: Path) -> dict[str, Any]:
    """Return the bytes and the age of a checkpoint; zeros if it cannot be read."""
    try:
        size = sum(file.stat().st_size for file in path.iterdir())
        return {"bytes": size, "age_s": max(0.0, time.time() - path.stat().st_mtime)}
    except OSError:
        return {"bytes": 0, "age_s": 0.0}


def show(
    checkpoint: Checkpoint,
    tensor: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Statistics of this tensor's values instead (repeatable).",
            autocompletion=complete_tensors,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the tensors of a checkpoint. Shape, what is kept of each, and which ranks wrote it.

    Example: zslurm checkpoint show my-run --tensor embedding.weight
    """
    if tensor:  # reads their values
        run_locally_or_as_job(False)
    with as_user_errors(), checkpoint_tools.Checkpoint.open(find_newest(checkpoint), check_files=False) as opened:
        if tensor:
            _show_statistics(opened, tensor, as_json=json)
        else:
            _show_tensors(opened.manifest, opened.path, as_json=json)


def _show_tensors(manifest: Manifest, path: Path, *, as_json: bool) -> None:
    rank_of = {file.name: rank for rank, file in enumerate(manifest.files)}
    owners: dict[str, set[int]] = {tensor.name: set() for tensor in manifest.tensors}
    for extent in manifest.extents:
        owners[extent.tensor].add(rank_of[extent.file])
    size = sum(file.size for file in manifest.files)
    numel = sum(tensor.numel for tensor in manifest.tensors)
    if as_json:
        print_json(
            {
                "path": str(path),
                "step": manifest.step,
                "tokens": manifest.tokens,
                "ranks": manifest.world_size,
                "bytes": size,
                "parameters": numel,
                "state": dict(manifest.state),
                "cursor": dict(manifest.cursor),
                "model": dict(manifest.model),
                "tensors": [
                    {"name": t.name, "shape": t.shape, "states": dict(t.states), "ranks": sorted(owners[t.name])}
                    for t in manifest.tensors
                ],
                "buffers": [{"name": b.name, "shape": b.shape, "dtype": b.dtype} for b in manifest.buffers],
            }
        )
        return
    say(
        f"{path}: step {manifest.step}, {counted(manifest.tokens, 'token', shown=show_count(manifest.tokens))}, "
        f"{counted(manifest.world_size, 'rank')}, {counted(numel, 'parameter', shown=show_count(numel))}, "
        f"{show_bytes(size)}"
    )
    rows = [[t.name, _shape(t.shape), _states(t.states), _ranks(owners[t.name])] for t in manifest.tensors]
    rows += [
        [buffer.name, _shape(buffer.shape), buffer.dtype, str(rank_of[buffer.file])]
        for buffer in manifest.buffers
        if not buffer.name.startswith("rng")
    ]
    print_table(["tensor", "shape", Column("states", drop=1), Column("ranks", drop=2)], rows)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _states(states: Any) -> str:
    """Return `master momentum F32`, or each with its dtype if they differ."""
    names = sorted(states, key=lambda state: (state != "master", state))
    if len(set(states.values())) == 1:
        return " ".join([*names, states[names[0]]])
    return " ".join(f"{state} {states[state]}" for state in names)


def _ranks(ranks: set[int]) -> str:
    shown = sorted(ranks)
    if len(shown) <= _RANKS_SHOWN:
        return " ".join(map(str, shown))
    if shown == list(range(shown[0], shown[-1] + 1)):
        return f"{shown[0]}-{shown[-1]}"
    return f"{shown[0]} .. {shown[-1]} ({len(shown)})"


def _show_statistics(checkpoint: checkpoint_tools.Checkpoint, tensors: list[str], *, as_json: bool) -> None:
    all_statistics: list[Statistics] = []
    states = {tensor.name: tensor.states for tensor in checkpoint.manifest.tensors}
    for name in tensors:
        if name not in states:
            near = get_close_matches(name, states, 1)
            hint = f"; did you mean {near[0]}?" if near else "; `zslurm checkpoint show` lists them"
            raise ConfigError(f"--tensor {name}: {checkpoint.path} has no such tensor{hint}")
        all_statistics += [statistics(checkpoint, name, state) for state in states[name]]
    if as_json:
        print_json([_without_nan(asdict(state_statistics)) for state_statistics in all_statistics])
        return
    columns = ["tensor", "state", "dtype", "elements", "min", "max", "mean", "std", "rms", "zeros", "nan", "inf"]
    shown = (
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in asdict(state_statistics).values()]
        for state_statistics in all_statistics
    )
    print_table(columns, [*shown])


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON does not have, by null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }


def verify(checkpoint: Checkpoint, workers: Threads = 2, slurm: Slurm = False, json: Json = False) -> None:
    """Read a checkpoint and compare it with its checksums. Exit code 5 if something is damaged.

    Example: zslurm checkpoint verify my-run
    """
    run_locally_or_as_job(slurm)
    path = find_newest(checkpoint)
    started = time.monotonic()
    with as_user_errors(), byte_bar(f"verifying {path.name}") as report:
        verification = checkpoint_tools.verify(path, threads=workers, report=report)
    seconds = time.monotonic() - started
    if json:
        print_json(
            {
                **asdict(verification),
                "path": str(verification.path),
                "sound": verification.sound,
                "seconds": seconds,
            }
        )
    elif verification.sound:
        size, rate = show_bytes(verification.bytes), show_bytes(verification.bytes / max(seconds, 1e-9))
        say(f"{path}: sound; {size} in {counted(verification.files, 'file')}, {show_duration(seconds)} ({rate}/s)")
    else:
        for damage in verification.damages:
            where = damage.file if damage.block is None else f"{damage.file} block {damage.block}"
            in_it = f" (in {', '.join(damage.tensors[:3])}{' ...' if len(damage.tensors) > 3 else ''})"
            print(f"{where}: {damage.reason}{in_it if damage.tensors else ''}")
    if not verification.sound:
        raise CheckFailed(
            f"{path} is damaged in {counted(len(verification.damages), 'place')}; use an older checkpoint"
        )


def diff(
    first: Checkpoint,
    second: Annotated[str, Argument(metavar="OTHER", help="Another one, or another run.")],
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Print in what two checkpoints differ. Their numbers of ranks may differ. Exit code 5 if their values do.

    Example: zslurm checkpoint diff runs/a/checkpoints/step-00000400 runs/b/checkpoints/step-00000400
    """
    run_locally_or_as_job(slurm, workers_option=None)
    paths = find_checkpoint(first), find_checkpoint(second)
    with (
        as_user_errors(),
        checkpoint_tools.Checkpoint.open(paths[0]) as first_checkpoint,
        checkpoint_tools.Checkpoint.open(paths[1]) as second_checkpoint,
        byte_bar("comparing") as report,
    ):
        comparison = compare(first_checkpoint, second_checkpoint, report=report)
    if json:
        head = {"first": str(paths[0]), "second": str(paths[1]), "same_values": comparison.same_values}
        differences = [_without_nan(asdict(row)) for row in comparison.differences]
        print_json({**head, **asdict(comparison), "differences": differences})
    else:
        _print_comparison(comparison)
    if not comparison.same_values:
        raise CheckFailed(f"{paths[0]} and {paths[1]} hold different values")
    if not json:
        say(f"the same values in {counted(comparison.compared, 'state or buffer', 'states and buffers')}")


def _print_comparison(found: Comparison) -> None:
    for name, (first_value, second_value) in found.facts.items():
        print(f"{name}: {first_value!r} and {second_value!r}")
    for where, names in (("first", found.only_first), ("second", found.only_second)):
        for name in names:
            print(f"only in the {where}: {name}")
    for name in found.buffers:
        print(f"buffer {name} differs")
    if found.differences:
        rows = [
            [d.tensor, d.state, str(d.elements), str(d.differing), f"{d.largest:.3g}", f"{d.relative:.3g}"]
            for d in found.differences
        ]
        print_table(["tensor", "state", "elements", "differing", "largest", "relative"], rows)
