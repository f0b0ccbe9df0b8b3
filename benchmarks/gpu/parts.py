"""The parts that `make gpu` runs, in two groups, most valuable first. Each part yields rows, kept as they come."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import ROOT

if TYPE_CHECKING:  # each part runs in a separate process, and only these import torch
    import torch

Rows = Iterator[dict[str, Any]]

KERNELS, TRAINING = "kernels", "training"
GROUPS = (KERNELS, TRAINING)
"""In the order in which they run."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        what: it does.
        run: yields its rows, on a device, with small sizes if it is a CPU.
        share: the largest share of its group's time that it may take, so that later parts get theirs.
        group: "kernels" or "training".
    """

    what: str
    run: Callable[[torch.device], Rows]
    share: float
    group: str


def build(device: torch.device) -> Rows:
    """Yield what was compiled for this device; a kernel that cannot be built fails the part."""
    from zslurm.kernels.arch import arch_of
    from zslurm.kernels.harness.builds import build_all

    failed = []
    for built in build_all(arch_of(device)):
        if built.problem:
            failed.append(f"{built.kernel}: {built.problem}")
        code = None if built.code is None else asdict(built.code)
        yield {"kernel": built.kernel, "language": built.language, "code": code, "problem": built.problem}
    if failed:
        sys.exit("\n".join(failed))


def check(device: torch.device) -> Rows:
    """Yield how each implementation compares with its reference; a wrong one fails the part."""
    from zslurm.kernels.harness.comparison import check_all

    wrong = []
    for each in check_all(device):
        if each.bad:
            wrong.append(f"{each.operation}: {each.implementation} on {each.case}: {each.message}")
        yield asdict(each)
    if wrong:
        sys.exit("\n".join(wrong))


def figures(device: torch.device) -> Rows:
    """Yield the comparisons of kernels with a dense product, torch.compile, a triad and fp32."""
    from benchmarks.gpu.figures import GROUPS
    from zslurm.kernels.harness.timing import triad

    failed = []
    yield {"what": "triad", "bytes_per_s": triad(device)}
    for name, group in GROUPS.items():
        try:
            for each in group(device, small=device.type == "cpu"):
                yield {**asdict(each), "ratio": each.ratio}
        except Exception as error:  # of whatever kind: the other comparisons are made all the same
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.append(f"{name}: {problem}")
            yield {"what": name, "problem": problem}
    if failed:
        sys.exit("\n".join(failed))


def products(device: torch.device) -> Rows:
    """Yield the times of grouped and symmetric products, and the tables that follow, which later parts use."""
    yield from _timed(device, _PRODUCTS)


def crossovers(device: torch.device) -> Rows:
    """Yield the times of every other operation, and the tables that follow."""
    from zslurm.kernels.dispatch import operations

    folders = dict.fromkeys(name.partition(".")[0] for name in operations())
    yield from _timed(device, [folder for folder in folders if folder not in _PRODUCTS])


_PRODUCTS = ("grouped_gemm", "symmetric_product")


def _timed(device: torch.device, folders: Iterable[str]) -> Rows:
    """Yield the times of some operations, one folder after the other, each with its table."""
    from zslurm.bench.kernels import measure
    from zslurm.bench.results.tables import kernel_tables
    from zslurm.kernels.arch import arch_of
    from zslurm.kernels.case import benchmarks_of
    from zslurm.kernels.dispatch import operations

    for folder in folders:
        measured = []
        for name, operation in operations().items():
            if name.partition(".")[0] == folder:
                for case in benchmarks_of(name, small=device.type == "cpu"):
                    row = measure(operation, case, device)
                    measured.append(row)
                    yield {**row, "seconds": row["seconds_of"], "bytes": case.bytes, "flops": case.flops}
        yield {"tables": kernel_tables(measured), "architecture": arch_of(device).name}


def muon_step(device: torch.device) -> Rows:
    """Yield a Muon step against torch's and a compiled batched one."""
    from benchmarks.gpu import muon_step as step

    yield from step.rows(device)


def train_step(device: torch.device) -> Rows:
    """Yield forward and backward against transformers', and the memory of both."""
    from benchmarks.gpu import train_step as step

    yield from step.rows(device)


def profile(device: torch.device) -> Rows:
    """Yield the share of each part in a training step."""
    from benchmarks.gpu import profile as profiled

    yield from profiled.rows(device)


def memory(device: torch.device) -> Rows:
    """Yield the peak memory of a step of each recipe, and the plan's."""
    from benchmarks.gpu import step_memory

    yield from step_memory.rows(device)


def tests(device: torch.device) -> Rows:
    """Yield each test marked gpu that failed or was skipped, and how many passed; a failure fails the part.

    Only files that have the mark are collected: others may need packages that are not here.
    """
    files = files_of_tests() if device.type != "cpu" else ["tests/kernels"]
    with tempfile.TemporaryDirectory(prefix="zslurm-gpu-tests-") as folder:
        report = Path(folder, "report.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-m", "gpu", "-q"),
            *("-p", "no:xdist", "-p", "no:cacheprovider", "--continue-on-collection-errors"),
            f"--junitxml={report}",
            *files,
        ]
        done = subprocess.run(command, cwd=ROOT, check=False)
        yield from rows_of_report(report)
    # 5: no test was selected, as without a GPU, whose variants are not there
    if done.returncode not in ((0, 5) if device.type == "cpu" else (0,)):
        sys.exit(f"pytest ended with status {done.returncode}")


def files_of_tests() -> list[str]:
    """Return the files with tests marked gpu, by name or by the fixture of implementations; kernels first."""
    found = {file for file in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in file.read_text()}
    found |= set(ROOT.glob("tests/kernels/**/test_*.py"))
    return sorted(str(file.relative_to(ROOT)) for file in found)


def rows_of_report(report: Path) -> Rows:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ET.parse(report).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        status = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        counts[status] += 1
        if bad is not None:
            name = f"{case.get('classname')}::{case.get('name')}"
            yield {"test": name, "status": status, "message": str(bad.get("message"))[:300]}
    yield counts


PARTS = {
    "build": Part("compile every kernel for this GPU", build, 0.25, KERNELS),
    "check": Part("compare every implementation with its reference", check, 0.2, KERNELS),
    "products": Part(
        "time grouped and symmetric products, for the tables of the dispatch", products, 0.3, KERNELS
    ),
    "figures": Part("kernels against a dense product, torch.compile, a triad and fp32", figures, 0.3, KERNELS),
    "crossovers": Part("time every other operation, for the tables of the dispatch", crossovers, 1.0, KERNELS),
    "profile": Part("the share of each part in a training step of zaya1-1b", profile, 0.2, TRAINING),
    "train_step": Part("forward and backward of zaya1-1b against transformers", train_step, 0.3, TRAINING),
    "muon_step": Part("a Muon step of zaya1-8b's share at 64 ranks against torch's", muon_step, 0.2, TRAINING),
    "memory": Part("peak memory of a step of each recipe and the plan's", memory, 0.15, TRAINING),
    "tests": Part("the tests marked gpu", tests, 0.4, TRAINING),
}
"""By name. The first call on a new GPU runs the kernels', whose tables the training's parts use."""
