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

from zslurm.bench.calibration import CalibrationProgress, CalibrationRun, Part, Place
from zslurm.bench.result import BenchResult
from zslurm.bench.results.apply import Found
from zslurm.bench.run.request import BenchProgress
from zslurm.bench.run.work_directory import PREFIX
from zslurm.bench.storage_space import refusal
from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cli.bench.measurements import run_named
from zslurm.cli.bench.run import BenchShown, sizes_between
from zslurm.cli.options import Cluster, Json, complete_recipes
from zslurm.cli.planned_run import trains_on_cpus
from zslurm.cli.values import print_measurements
from zslurm.cluster.profile import LOCAL, default_name, find_profile, measured_path
from zslurm.cluster.rccl.rules import rules
from zslurm.cluster.site import Site, load_site
from zslurm.config.spec import RunSpec
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, Exit
from zslurm.slurm.environment import job_nodes, own_job_id
from zslurm.slurm.hostlist import compress, expand
from zslurm.submit.as_job import JobShape, run_as_job
from zslurm.submit.run_products import measured_products

_CPU_RANKS = 2
_JOB_MARGIN_MIN = 10
_CUBE = 8192
_MOMENTS, _FEW_MOMENTS, _SHORT_MIN = 20, 6, 10.0
"""Moments at which the GPUs are compared, and how many of them in less than ten minutes."""
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
        int | None, Option(metavar="N", min=1, help="Measure so many nodes in one job; default: 2.")
    ] = None,
    nodelist: Annotated[str | None, Option(metavar="LIST", help="Measure exactly these nodes.")] = None,
    local: Annotated[bool, Option("--local", help="Measure this machine, without Slurm.")] = False,
    ranks: Annotated[
        int | None, Option(metavar="R", min=1, help="Ranks on each node; default: one for each GPU, two on CPUs.")
    ] = None,
    minutes: Annotated[
        float, Option("--time", metavar="MIN", min=0.1, help="Time for all parts together, without the queue.")
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
    spec = run_named(run, cluster=name, overrides=[])
    here = not list_parts and (local or own_job_id() is not None)
    has_gpus = _torch_sees_gpus() if here else site.cluster.gpus_per_node > 0
    if here and site.cluster.gpus_per_node and not has_gpus:
        gpus = counted(site.cluster.gpus_per_node, "GPU")
        say(f"note: torch sees none of the {gpus} of this node: CPUs are measured")
    with _storage_parts(path or [], has_gpus=has_gpus) as of_storage:
        parts = _chosen([*_parts(spec, site, run, minutes, has_gpus=has_gpus), *of_storage], only)
        if list_parts:
            _list(parts, minutes, json=json)
            return
        if not here:
            wanted = len(expand(nodelist)) if nodelist is not None else nodes or 2
            shape = JobShape(
                wanted, site.cluster.gpus_per_node, f"{int(minutes) + _JOB_MARGIN_MIN}", nodelist, whole_nodes=True
            )
            raise typer.Exit(run_as_job(sys.argv[1:], workers_option=None, shape=shape, cluster=name))
        in_job = () if local else tuple(job_nodes(os.environ))
        _check_storage(path or [], of_storage, ranks or (site.cluster.gpus_per_node or _CPU_RANKS), len(in_job))
        interruption = _Interruption()
        for signum in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C; the end of the job
            signal.signal(signum, interruption)
        calibration = CalibrationRun(
            (out or measured_path(name)).absolute(),
            name,
            parts,
            Place(site, in_job, has_gpus, ranks),
            minutes=minutes,
            shapes_of=run,
            anew=again,
            stopped=lambda: interruption.came,
        )
        raise typer.Exit(_measure(calibration, json=json))


def _measure(calibration: CalibrationRun, *, json: bool) -> Exit:
    """Measure what is left, report it, and return the exit code."""
    before = len(calibration.parts) - len(calibration.left)
    if before:
        say(
            f"{counted(before, 'part')} of {len(calibration.parts)} measured before "
            f"(began {calibration.calibration.began[:10]}); --again measures everything again"
        )
    shown = _Shown()
    log.set_up()
    try:
        with log.detailed("zslurm.bench"):
            is_over = calibration.measure(shown)
    except KeyboardInterrupt:
        say(f"interrupted; {calibration.path} has what was measured, and the same command continues")
        return Exit.INTERRUPTED
    if json:
        print_json({"file": str(calibration.path), **calibration.measurements.model_dump(mode="json")})
    else:
        print_measurements(calibration.measurements.values)
    slow = sorted({name for part in calibration.calibration.parts.values() for name in part.slow})
    exclude = sorted({name for part in calibration.calibration.parts.values() for name in part.exclude})
    if slow:
        say(f"slower than their peers: {', '.join(slow)}")
    if exclude:
        say(f"to leave the slow nodes out: zslurm submit --exclude {compress(exclude)}")
    say(f"wrote {calibration.path}; results with all figures: {calibration.results}")
    if is_over:
        return Exit.DONE
    remaining = ", ".join(part.name for part in calibration.left)
    say(f"not measured: {remaining}; the same command continues")
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
        self.failures += "no time is left" not in reason
        say(f"{part.name}: not measured: {reason}")

    def ended(self, part: Part, result: BenchResult | None, found: Found | None) -> None:
        if result is None:
            return
        if result.skipped:
            say(f"{part.name}: {counted(len(result.skipped), 'point')} left out; the result gives the reasons")
        if result.lost_nodes:
            say(f"{part.name}: lost {compress(result.lost_nodes)}; the others are measured on")
        for line in [*result.findings, *(found.lines if found is not None and found.values else ())]:
            say(f"{part.name}: {line}")

    def of_points(self) -> BenchProgress:
        return BenchShown()


def _torch_sees_gpus() -> bool:
    """Return whether torch sees GPUs on this machine; another process is asked, which has torch."""
    question = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-P", "-c", question], capture_output=True, check=False).returncode == 0


def _parts(spec: RunSpec, site: Site, run: str, minutes: float, *, has_gpus: bool) -> list[Part]:
    """Return what is measured on these nodes within so many minutes, in order, without storage."""
    on_cpu = trains_on_cpus(spec) or not has_gpus
    products = measured_products(spec, on_cpu=on_cpu)
    if has_gpus:
        sizes = {"m": _CUBE, "n": _CUBE, "k": _CUBE, "batch": 1, "group": 1}
        products.append(
            {"product": "", "pass": "forward", "kind": "dense", **sizes, "flops": 2.0 * _CUBE**3, "dtype": "bf16"}
        )
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
        "scopes": ["all" if site.cluster.launcher == "slurm" else "node"],
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
    ]
    return [
        Part(
            "nodes", "all GPUs compute at once, to find slow ones", 1.0, "mlp",
            {"moments": _MOMENTS if minutes >= _SHORT_MIN else _FEW_MOMENTS}, keeps_values=False,
        ),
        Part(
            "memory", "memory bandwidth of each GPU", 1.0, "hbm",
            {
                "patterns": ["copy", "triad"],
                "sizes": [1 << 30, 4 << 30] if has_gpus else [16 << 20, 64 << 20],
                "dtype": "fp64",
            },
        ),
        Part(
            "products", f"matrix products and parts of {run}", 4.0, "gemm",
            {"run": run, "products": products, "m": None, "n": None, "k": None, "dtype": spec.parallel.dtype},
        ),
        Part("kernels", "kernels of one GPU", 3.0, command=("dev", "kernels", "bench"), needs_gpu=True),
        Part(
            "tuned-products", f"TunableOp's solutions for {run}", 4.0, needs_gpu=True,
            command=("dev", "tune", "gemm", run, "--cluster", spec.cluster.name, "--minutes", "{minutes}"),
        ),
        Part("collectives", "inside nodes, along rails, over all nodes, pairs", 4.0, "collectives", collectives),
        *variables,
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


def _check_storage(paths: list[Path], parts: list[Part], ranks: int, nodes: int) -> None:
    """Raise ConfigError if a directory cannot be measured, before anything is."""
    for path, part in zip(paths, parts, strict=True):
        size = part.options["size"]
        if reason := refusal(path, size=size, checkpoint=size, ranks_per_node=ranks, nodes=max(1, nodes)):
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
    rows = [[part.name, part.about, f"{minutes * part.share / shares:.1f}"] for part in parts]
    if json:
        print_json([dict(zip(("name", "about", "minutes"), row, strict=True)) for row in rows])
    else:
        print_table(["part", "what", "minutes at most"], rows)
