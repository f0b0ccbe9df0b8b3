"""`zslurm calibrate`: measure a cluster in one job, and keep what runs, plans and the doctor take from it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from zslurm.bench.calibration import NO_TIME, CalibrationProgress, CalibrationRun, Part, Place, check_writable
from zslurm.bench.result import BenchResult
from zslurm.bench.results.apply import Found
from zslurm.bench.run.request import BenchProgress
from zslurm.bench.run.work_directory import PREFIX
from zslurm.bench.storage_space import refusal
from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cli.bench.measurements import run_named, tuning_options
from zslurm.cli.bench.run import BenchShown, Measure, sizes_between
from zslurm.cli.options import Cluster, Json, complete_recipes
from zslurm.cli.planned_run import trains_on_cpus
from zslurm.cli.values import print_measurements
from zslurm.cluster.measurements import CPU, read_measurements
from zslurm.cluster.profile import LOCAL, default_name, find_profile, measured_path
from zslurm.cluster.rccl.rules import rules
from zslurm.cluster.site import Site, load_site
from zslurm.config.spec import RunSpec
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, Exit
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import sysroot
from zslurm.slurm.environment import job_nodes, own_job_id
from zslurm.slurm.hostlist import compress, expand
from zslurm.submit.as_job import JobShape, run_as_job
from zslurm.submit.run_products import measured_products

_CPU_RANKS = 2
_JOB_MARGIN_MIN = 10
_LONGEST_MIN = 10_080.0
"""A week."""
_MOMENTS, _FEW_MOMENTS, _SHORT_MIN = 60, 30, 5.0
"""Moments at which the GPUs are compared, and how many in less than five minutes: fewer show no slow one."""
_FULL_MIN, _FEW_TOKENS = 30.0, 2048
"""In less than half an hour each moment is shorter: a step of fewer tokens."""
_FLAGSHIP = "zaya1-8b"

Only = Annotated[
    list[str] | None, Option("--only", metavar="PART", help="Measure only this part (repeatable); see --list.")
]


def calibrate(
    run: Annotated[
        str,
        Argument(
            metavar="[RUN]",
            help="Run file or recipe whose matrix products are measured.",
            autocompletion=complete_recipes,
        ),
    ] = _FLAGSHIP,
    cluster: Cluster = None,
    nodes: Annotated[
        int | None, Option(metavar="N", min=1, help="Number of nodes to measure, in one job; default: 2.")
    ] = None,
    nodelist: Annotated[str | None, Option(metavar="LIST", help="Measure exactly these nodes.")] = None,
    local: Annotated[bool, Option("--local", help="Measure this machine, without Slurm.")] = False,
    ranks: Annotated[
        int | None, Option(metavar="R", min=1, help="Ranks on each node; default: one for each GPU, two on CPUs.")
    ] = None,
    minutes: Annotated[
        float,
        Option("--time", metavar="MIN", min=0.1, max=_LONGEST_MIN, help="Time for all parts, without the queue."),
    ] = 60.0,
    path: Annotated[
        list[Path] | None,
        Option(metavar="DIR", help="Directory whose storage is measured: of data, of checkpoints (repeatable)."),
    ] = None,
    only: Only = None,
    again: Annotated[bool, Option("--again", help="Measure again what was measured before.")] = False,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the measurements here; default: next to the profile.")
    ] = None,
    list_parts: Annotated[bool, Option("--list", help="List the parts, and measure nothing.")] = False,
    json: Json = False,
) -> None:
    """Measure a cluster in one job, for runs, plans and the doctor.

    GPUs, memory, matrix products, collectives and storage are measured; the results go into `NAME.measured.json`
    next to the profile. If the job ends early, or after Ctrl-C, the same command continues.

    Example: zslurm calibrate --nodes 4 --path /scratch/ada
    """
    name = cluster or (LOCAL if local else default_name())
    find_profile(name)
    site = load_site(name)
    if local and (nodes is not None or nodelist is not None):
        raise ConfigError("--local measures this machine: leave out --nodes and --nodelist")
    if nodes is not None and nodelist is not None:
        raise ConfigError("--nodes and --nodelist exclude each other")
    if site.cluster.launcher == "local" and not local:
        raise ConfigError(f"the profile {name} is of this machine: give --local, or a cluster's with --cluster")
    spec = run_named(run, Measure(cluster=name))
    file = (out or measured_path(name)).absolute()
    if not list_parts:
        before = read_measurements(file, name)
        check_writable(file)
    measures_here = not list_parts and (local or own_job_id() is not None)
    in_job = _nodes_in_job(nodes, nodelist) if measures_here and not local else ()
    has_gpus = (
        bool(read_gpus(sysroot())) and _torch_sees_gpus() if measures_here else site.cluster.gpus_per_node > 0
    )
    if measures_here and site.cluster.gpus_per_node and not has_gpus:
        gpus = counted(site.cluster.gpus_per_node, "GPU")
        if before is not None and any(value.device != CPU for value in before.values.values()):
            raise ConfigError(
                f"torch sees none of the {gpus} of this node, and {file} is of GPUs: load ROCm in "
                "cluster.setup, or name another file with --out"
            )
        say(f"note: torch sees none of the {gpus} of this node: CPUs are measured")
    wanted = len(in_job) or (len(expand(nodelist)) if nodelist is not None else 1 if local else nodes or 2)
    with _storage_parts(path or [], has_gpus=has_gpus) as of_storage:
        of_nodes = _parts(spec, site, run, minutes, has_gpus=has_gpus, nodes=wanted)
        parts = _chosen([*of_nodes, *of_storage], only)
        if list_parts:
            _list(parts, minutes, json=json)
            return
        chosen = [
            (directory, part) for directory, part in zip(path or [], of_storage, strict=True) if part in parts
        ]
        _check_storage(chosen, ranks or (site.cluster.gpus_per_node or _CPU_RANKS), wanted, here=measures_here)
        if not measures_here:
            shape = JobShape(
                wanted, site.cluster.gpus_per_node, f"{int(minutes) + _JOB_MARGIN_MIN}", nodelist, whole_nodes=True
            )
            words = [*sys.argv[1:], *([] if cluster else ["--cluster", name])]
            raise typer.Exit(run_as_job(words, workers_option=None, shape=shape, cluster=name))
        interruption = _Interruption()
        for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C; the end of the job
            signal.signal(signum, interruption)
        calibration = CalibrationRun(
            file,
            name,
            parts,
            Place(site, in_job, has_gpus, ranks),
            minutes=minutes,
            anew=again,
            stopped=lambda: interruption.came,
        )
        raise typer.Exit(_measure(calibration, again=again, json=json))


def _nodes_in_job(count: int | None, nodelist: str | None) -> tuple[str, ...]:
    """Return the nodes to measure of the job that this process runs in.

    Raises:
        ConfigError: the job does not have them.
    """
    of_job = job_nodes(os.environ)
    if nodelist is not None:
        named = list(dict.fromkeys(expand(nodelist)))
        if foreign := [node for node in named if node not in of_job]:
            raise ConfigError(f"--nodelist: {compress(foreign)} is not in this job, which has {compress(of_job)}")
        return tuple(named)
    if count is not None and count > len(of_job):
        raise ConfigError(f"--nodes {count}: this job has {counted(len(of_job), 'node')}: {compress(of_job)}")
    return tuple(of_job[:count])


def _measure(calibration: CalibrationRun, *, again: bool, json: bool) -> Exit:
    """Measure what is left, report it, and return the exit code."""
    before = len(calibration.parts) - len(calibration.left)
    if before and (measured := [part.name for part in calibration.parts if calibration.is_measured(part)]):
        say(f"measured before: {', '.join(measured)}; --again measures everything again")
    shown, continues = _Shown(), f"the same command continues{', without --again' if again else ''}"
    log.set_up()
    try:
        with log.detailed("zslurm.bench"):
            is_over = calibration.measure(shown)
    except KeyboardInterrupt:
        say(f"interrupted; {calibration.path} has what was measured, and {continues}")
        return Exit.INTERRUPTED
    measurements = calibration.measurements
    if json:
        print_json({"file": str(calibration.path), **measurements.model_dump(mode="json")})
    else:
        print_measurements(measurements.values)
    slow = sorted({name for part in measurements.parts.values() for name in part.slow})
    exclude = sorted({name for part in measurements.parts.values() for name in part.exclude})
    if slow:
        say(f"slower than their peers: {', '.join(slow)}")
    if exclude:
        say(f"to leave the slow nodes out: zslurm submit --exclude {compress(exclude)}")
    say(f"wrote {calibration.path}; results with all figures: {calibration.results}")
    if is_over:
        return Exit.DONE
    say(f"not measured: {', '.join(part.name for part in calibration.left)}; {continues}")
    return Exit.FAILED if shown.failures else Exit.INTERRUPTED


class _Interruption:
    """Handles signals that end the command in order."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, signum: int, frame: object) -> None:
        self.came = True
        raise KeyboardInterrupt


class _Shown(CalibrationProgress):
    """A line for each part, and the progress of its points."""

    def __init__(self) -> None:
        self.failures = 0

    def began(self, number: int, parts: int, part: Part, minutes: float) -> None:
        say(f"[{number}/{parts}] {part.name}: {part.about}; {show_duration(60 * minutes)} at most")

    def skipped(self, part: Part, reason: str) -> None:
        say(f"{part.name}: left out: {reason}")

    def failed(self, part: Part, reason: str) -> None:
        self.failures += reason != NO_TIME
        say(f"{part.name}: not measured: {reason}")

    def ended(self, part: Part, result: BenchResult, found: Found | None) -> None:
        if result.skipped:
            say(f"{part.name}: {counted(len(result.skipped), 'point')} left out; the result gives the reasons")
        if result.lost_nodes:
            say(f"{part.name}: lost {compress(result.lost_nodes)}; the others are measured on")
        gives_values = found is not None and (found.values or result.machine.device != "cpu")
        for line in [*result.findings, *(found.lines if found is not None and gives_values else ())]:
            say(f"{part.name}: {line}")

    def of_points(self) -> BenchProgress:
        return BenchShown()


def _torch_sees_gpus() -> bool:
    """Return whether torch sees GPUs on this machine; another process is asked, which has torch."""
    question = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-P", "-c", question], capture_output=True, check=False).returncode == 0


def _parts(spec: RunSpec, site: Site, run: str, minutes: float, *, has_gpus: bool, nodes: int) -> list[Part]:
    """Return what is measured on so many nodes within so many minutes, in order, without storage."""
    on_cpu = trains_on_cpus(spec) or not has_gpus
    collectives: dict[str, Any] = {
        "operations": ["all_reduce", "reduce_scatter", "all_gather"],
        "scopes": ["node", "all", "rail", "gpu_pair", "node_pair"],
        "levels": ["flat", "two_level"],
        "sizes": sizes_between("64KiB", "4GiB" if has_gpus else "16MiB", factor=4),
        "quick": False,
    }
    compared = {
        **collectives,
        "operations": ["reduce_scatter", "all_gather"],
        "scopes": ["all" if nodes > 1 else "node"],
        "levels": ["flat"],
        "sizes": sizes_between("8MiB", "512MiB", factor=8),
    }
    variables = [
        Part(
            f"variable-{candidate.variable}",
            f"{candidate.variable} unset and {candidate.values[1]}",
            1.0,
            "collectives",
            compared,
            tuple({candidate.variable: candidate.values[index]} for index in (0, 1, 1, 0)),
            needs_gpu=True,
        )
        for candidate in rules().candidates_on(site.cluster)
        if nodes > 1 or not candidate.when.network
    ]
    return [
        Part(
            "nodes", "all GPUs compute at once, to find slow ones", 2.0, "mlp",
            {
                "moments": _MOMENTS if minutes >= _SHORT_MIN else _FEW_MOMENTS,
                "tokens": _FEW_TOKENS if has_gpus and minutes < _FULL_MIN else None,
            },
            keeps_values=False,
        ),
        Part(
            "memory", "memory bandwidth of each GPU", 1.0, "hbm",
            {
                "patterns": ["copy", "triad"],
                "sizes": [1 << 30, 4 << 30] if has_gpus else [16 << 20, 64 << 20],
                "dtype": "fp64",
            },
            keeps_values=False,
        ),
        Part("speed", "what the doctor compares nodes by", 1.0, "speed", {}),
        Part(
            "products", f"matrix products and parts of {run}", 4.0, "gemm",
            {
                "m": None, "n": None, "k": None, "run": run, "dtype": spec.parallel.dtype,
                "products": measured_products(spec, on_cpu=on_cpu),
            },
            keeps_values=False,
        ),
        Part("collectives", "inside nodes, along rails, over all nodes, pairs", 4.0, "collectives", collectives),
        *variables,
        Part(
            "tuned-products", f"TunableOp's solutions for {run}", 4.0, "tuning", tuning_options(spec),
            needs_gpu=True, least_minutes=0.5, on_one_gpu=True,
        ),
        Part(
            "kernels", "kernels of one GPU", 3.0, "kernels", {"only": []},
            needs_gpu=True, least_minutes=1.0, on_one_gpu=True,
        ),
    ]  # fmt: skip


@contextmanager
def _storage_parts(paths: list[Path], *, has_gpus: bool) -> Iterator[list[Part]]:
    """Yield a part for each directory; what it leaves there is removed at the end."""
    size = (1 << 30) if has_gpus else (1 << 26)
    works = [PREFIX + secrets.token_hex(6) for _ in paths]
    try:
        yield [
            Part(
                "storage" if len(paths) == 1 else f"storage-{number}",
                f"storage of {path}",
                2.0,
                "storage",
                {
                    "path": str(path.absolute()), "work": work, "size": size, "checkpoint": size,
                    "depths": [1, 16, 64], "files": 1000 if has_gpus else 200, "seconds": 3.0 if has_gpus else 0.5,
                    "saves": 3 if has_gpus else 1,
                },
                keeps_values=number == 1,
            )
            for number, (path, work) in enumerate(zip(paths, works, strict=True), 1)
        ]  # fmt: skip
    finally:
        for path, work in zip(paths, works, strict=True):
            shutil.rmtree(path / work, ignore_errors=True)


def _check_storage(chosen: list[tuple[Path, Part]], ranks: int, nodes: int, *, here: bool) -> None:
    """Raise ConfigError if a directory cannot be measured, as far as this machine sees it.

    A directory that is missing on the login node may be a disk that only the nodes have.
    """
    for path, part in chosen:
        if not here and not path.exists():
            continue
        size = part.options["size"]
        if reason := refusal(path, size=size, checkpoint=size, ranks_per_node=ranks, nodes=nodes):
            raise ConfigError(f"--path {reason}")


def _chosen(parts: list[Part], only: list[str] | None) -> list[Part]:
    """Return the parts that are wanted.

    Raises:
        ConfigError: one is not known.
    """
    names = [part.name for part in parts]
    if unknown := [name for name in only or [] if name not in names]:
        raise ConfigError(f"--only {unknown[0]}: expected one of {', '.join(names)}")
    return [part for part in parts if not only or part.name in only]


def _list(parts: list[Part], minutes: float, *, json: bool) -> None:
    from zslurm.cli.terminal.table import print_table

    shares = sum(part.share for part in parts)
    times = [minutes * part.share / shares for part in parts]
    if json:
        print_json(
            [
                {"name": part.name, "about": part.about, "minutes": round(time, 2)}
                for part, time in zip(parts, times, strict=True)
            ]
        )
    else:
        rows = [[part.name, part.about, f"{time:.1f}"] for part, time in zip(parts, times, strict=True)]
        print_table(["part", "what", "minutes"], rows)
