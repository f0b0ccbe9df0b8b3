"""`zslurm checkpoint show|verify|diff|reshape`, and torch.distributed.checkpoint both ways."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zslurm.checkpoint_tools import (
    Checkpoint,
    Comparison,
    Listing,
    Manifest,
    ReshapePlan,
    Statistics,
    Verification,
    acquire,
    compare,
    plan_reshape,
    prunable,
    prune,
    reshape,
    statistics,
    verify,
)
from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_count, show_duration
from zslurm.cli.checkpoint_convert import as_user_errors
from zslurm.core.console import print_json, print_table, say
from zslurm.core.errors import CheckFailed, ConfigError, ZslurmError
from zslurm.core.progress_bar import byte_bar
from zslurm.core.units import parse_size
from zslurm.run.checkpoints import find_checkpoint, find_checkpoints, find_newest

if TYPE_CHECKING:
    from zslurm.train.hub.dcp import Converted

_RANKS_SHOWN = 4


def show(reference: str, tensors: list[str], *, as_json: bool) -> None:
    """`zslurm checkpoint show`: the table of tensors, or statistics of some."""
    with as_user_errors(), Checkpoint.open(find_newest(reference), check_files=False) as checkpoint:
        if tensors:
            _show_statistics(checkpoint, tensors, as_json=as_json)
        else:
            _show_table(checkpoint.manifest, checkpoint.path, as_json=as_json)


def _show_table(manifest: Manifest, path: Path, *, as_json: bool) -> None:
    owners = _owners(manifest)
    facts = {
        "path": str(path),
        "step": manifest.step,
        "tokens": manifest.tokens,
        "ranks": manifest.world_size,
        "bytes": sum(file.size for file in manifest.files),
        "parameters": sum(tensor.numel for tensor in manifest.tensors),
        "state": dict(manifest.state),
        "cursor": dict(manifest.cursor),
    }
    if as_json:
        rows = [
            {"name": t.name, "shape": list(t.shape), "states": dict(t.states), "ranks": sorted(owners[t.name])}
            for t in manifest.tensors
        ]
        buffers = [{"name": b.name, "shape": list(b.shape), "dtype": b.dtype} for b in manifest.buffers]
        print_json({**facts, "model": dict(manifest.model), "tensors": rows, "buffers": buffers})
        return
    numel = sum(tensor.numel for tensor in manifest.tensors)
    say(
        f"{path}: step {manifest.step}, {counted(manifest.tokens, 'token', shown=show_count(manifest.tokens))}, "
        f"{counted(manifest.world_size, 'rank')}, {counted(numel, 'parameter', shown=show_count(numel))}, "
        f"{show_bytes(sum(file.size for file in manifest.files))}"
    )
    table = [[t.name, _shape(t.shape), _states(t.states), _ranks(owners[t.name])] for t in manifest.tensors]
    table += [
        [b.name, _shape(b.shape), b.dtype, str(_rank_of(manifest, b.file))]
        for b in manifest.buffers
        if not b.name.startswith("rng")
    ]
    print_table(["tensor", "shape", "states", "ranks"], table)


def _owners(manifest: Manifest) -> dict[str, set[int]]:
    ranks = {file.name: rank for rank, file in enumerate(manifest.files)}
    owners: dict[str, set[int]] = {tensor.name: set() for tensor in manifest.tensors}
    for extent in manifest.extents:
        owners[extent.tensor].add(ranks[extent.file])
    return owners


def _rank_of(manifest: Manifest, file: str) -> int:
    return [row.name for row in manifest.files].index(file)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _states(states: Any) -> str:
    """`master momentum F32`, or with a dtype each where they differ."""
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


def _show_statistics(checkpoint: Checkpoint, tensors: list[str], *, as_json: bool) -> None:
    rows: list[Statistics] = []
    states = {tensor.name: tensor.states for tensor in checkpoint.manifest.tensors}
    for name in tensors:
        if name not in checkpoint.tensors:
            from difflib import get_close_matches

            near = get_close_matches(name, list(checkpoint.tensors), 1)
            hint = f"; did you mean {near[0]}?" if near else "; `zslurm checkpoint show` lists them"
            raise ConfigError(f"--tensor {name}: {checkpoint.path} has no such tensor{hint}")
        rows += [statistics(checkpoint, name, state) for state in states[name]]
    if as_json:
        print_json([_plain(dataclasses.asdict(row)) for row in rows])
        return
    columns = ["tensor", "state", "dtype", "elements", "min", "max", "mean", "std", "rms", "zeros", "nan", "inf"]
    print_table(columns, [_statistics_row(row) for row in rows])


def _statistics_row(row: Statistics) -> list[str]:
    numbers = (row.minimum, row.maximum, row.mean, row.std, row.rms)
    counts = (row.zeros, row.nans, row.infinities)
    return [row.tensor, row.state, row.dtype, str(row.elements), *(f"{n:.4g}" for n in numbers), *map(str, counts)]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }


def verify_it(reference: str, *, threads: int, as_json: bool) -> None:
    """`zslurm checkpoint verify`.

    Raises:
        CheckFailed: something is damaged.
    """
    path = find_newest(reference)
    started = time.monotonic()
    with as_user_errors(), byte_bar(f"verifying {path.name}") as report:
        found = verify(path, threads=threads, report=report)
    seconds = time.monotonic() - started
    if as_json:
        print_json(_verification_json(found, seconds))
    elif found.sound:
        size, rate = show_bytes(found.bytes), show_bytes(found.bytes / max(seconds, 1e-9))
        say(f"{path}: sound; {size} in {counted(found.files, 'file')}, {show_duration(seconds)} ({rate}/s)")
    else:
        for damage in found.damages:
            where = damage.file if damage.block is None else f"{damage.file} block {damage.block}"
            in_it = f" (in {', '.join(damage.tensors[:3])}{' ...' if len(damage.tensors) > 3 else ''})"
            print(f"{where}: {damage.reason}{in_it if damage.tensors else ''}")
    if not found.sound:
        count = len(found.damages)
        raise CheckFailed(f"{path} is damaged in {counted(count, 'place')}; use an older checkpoint")


def _verification_json(found: Verification, seconds: float) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "sound": found.sound,
        "files": found.files,
        "bytes": found.bytes,
        "seconds": seconds,
        "damages": [dataclasses.asdict(damage) for damage in found.damages],
    }


def diff(first: str, second: str, *, as_json: bool) -> None:
    """`zslurm checkpoint diff`.

    Raises:
        CheckFailed: tensors or buffers differ.
    """
    paths = find_checkpoint(first), find_checkpoint(second)
    with (
        as_user_errors(),
        Checkpoint.open(paths[0]) as one,
        Checkpoint.open(paths[1]) as other,
        byte_bar("comparing") as report,
    ):
        found = compare(one, other, report=report)
    if as_json:
        rows = [_plain(dataclasses.asdict(row)) for row in found.differences]
        facts = {name: list(pair) for name, pair in found.facts.items()}
        document = {**dataclasses.asdict(found), "facts": facts, "differences": rows}
        print_json({"first": str(paths[0]), "second": str(paths[1]), "same_values": found.same_values, **document})
    else:
        _print_comparison(found)
    if not found.same_values:
        raise CheckFailed(f"{paths[0]} and {paths[1]} hold different values")
    if not as_json:
        say(f"the same values in {counted(found.compared, 'state or buffer', 'states and buffers')}")


def _print_comparison(found: Comparison) -> None:
    for name, (one, other) in found.facts.items():
        print(f"{name}: {one!r} and {other!r}")
    for where, names in (("first", found.only_first), ("second", found.only_second)):
        for name in names:
            print(f"only in the {where}: {name}")
    for name in found.buffers:
        print(f"buffer {name} differs")
    if found.differences:
        columns = ["tensor", "state", "elements", "differing", "largest", "relative"]
        rows = [
            [d.tensor, d.state, str(d.elements), str(d.differing), f"{d.largest:.3g}", f"{d.relative:.3g}"]
            for d in found.differences
        ]
        print_table(columns, rows)


def reshape_it(
    reference: str,
    destination: Path | None,
    ranks: int,
    *,
    workers: int,
    max_memory: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """`zslurm checkpoint reshape`; prints the new checkpoint's path."""
    memory = parse_size(max_memory)
    source = find_checkpoint(reference)
    destination = destination or source.parent / f"{source.name}-dp{ranks}"
    started = time.monotonic()
    with as_user_errors():
        if dry_run:
            plan = plan_reshape(source, destination, ranks, workers=workers, max_memory=memory)
        else:
            with byte_bar(f"reshaping {source.name}") as report:
                plan = reshape(
                    source,
                    destination,
                    ranks,
                    workers=workers,
                    max_memory=memory,
                    report=lambda stage, done, total: report(done, total, stage),
                )
    seconds = time.monotonic() - started
    if as_json:
        print_json({**_plan_json(plan), "written": not dry_run, "seconds": seconds})
        return
    what = f"{counted(plan.files, 'file')}, {show_bytes(plan.bytes)}, the largest {show_bytes(plan.largest_file)}"
    if dry_run:
        what = f"{what} ({counted(plan.from_ranks, 'rank')} to {plan.to_ranks})"
        say(f"would write {destination}: {what}")
        return
    say(f"{counted(plan.from_ranks, 'rank')} to {plan.to_ranks} in {show_duration(seconds)}, verified: {what}")
    print(destination)


def _plan_json(plan: ReshapePlan) -> dict[str, Any]:
    return {
        "source": str(plan.source),
        "path": str(plan.destination),
        "from_ranks": plan.from_ranks,
        "ranks": plan.to_ranks,
        "files": plan.files,
        "bytes": plan.bytes,
        "largest_file": plan.largest_file,
        "workers": plan.workers,
    }


def prune_them(
    reference: str, keep_last: int, keep_every: int, *, keep_best: bool, dry_run: bool, as_json: bool
) -> None:
    """`zslurm checkpoint prune`; prints what went.

    Raises:
        ZslurmError: a run that is being trained writes there.
    """
    root, found = find_checkpoints(reference)
    with as_user_errors():
        keep = _best(found) if keep_best else set()
        going = prunable(root, keep_last, keep_every=keep_every, keep=keep)
        size = sum(file.stat().st_size for listing in going for file in listing.path.iterdir())
        if not dry_run and going:
            lock = acquire(root, job=os.environ.get("SLURM_JOB_ID", ""))
            try:
                prune(root, keep_last, keep_every=keep_every, keep=keep)
            finally:
                lock.release()
    if as_json:
        print_json({"removed": not dry_run, "bytes": size, "paths": [str(listing.path) for listing in going]})
        return
    say(f"{'would remove' if dry_run else 'removed'} {counted(len(going), 'checkpoint')}, {show_bytes(size)}")
    for listing in going:
        print(listing.path)


def _best(found: list[Listing]) -> set[int]:
    """The step that the newest complete checkpoint takes for the best."""
    for listing in found:
        if listing.complete:
            with Checkpoint.open(listing.path, check_files=False) as checkpoint:
                best = checkpoint.manifest.cursor.get("best")
            if not best:
                return set()
            if not isinstance(best, dict) or not isinstance(best.get("step"), int):
                raise ZslurmError(
                    f"{listing.path}: cannot tell which checkpoint is the best: its cursor is damaged; give "
                    "--drop-best to prune without it"
                )
            return {best["step"]}
    return set()


def is_dcp(folder: Path) -> bool:
    """Whether `folder` is one of torch.distributed.checkpoint."""
    return (folder / ".metadata").is_file()


def export_state(reference: str, out: Path, *, as_json: bool) -> None:
    """`zslurm checkpoint export --to dcp`; prints the new directory."""
    path = find_checkpoint(reference)
    with as_user_errors(), Checkpoint.open(path) as checkpoint, byte_bar(f"exporting {path.name}") as report:
        from zslurm.train.hub.dcp import export_dcp

        done = export_dcp(checkpoint, out, report=report)
    _say_converted("exported", str(path), done, as_json=as_json)


def import_state(folder: Path, root: Path, *, like: str | None, as_json: bool) -> None:
    """`zslurm checkpoint import` of a DCP directory; prints the new checkpoint's path."""
    with as_user_errors(), byte_bar(f"importing {folder.name}") as report:
        from zslurm.train.hub.dcp import import_dcp

        manifest = None
        if like is not None:
            with Checkpoint.open(find_checkpoint(like), check_files=False) as model:
                manifest = model.manifest
        done = import_dcp(folder, root, like=manifest, report=report)
    _say_converted("imported", str(folder), done, as_json=as_json)


def _say_converted(what: str, source: str, done: Converted, *, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(done.path), "source": source, "tensors": done.tensors, "bytes": done.bytes})
        return
    say(f"{what} {source}: {counted(done.tensors, 'tensor')}, {show_bytes(done.bytes)}")
    print(done.path)
