"""`zslurm dev kernels`: build and check the kernels on this machine; `zslurm bench kernels` measures them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Json
from zslurm.cli.terminal.table import Column, print_table
from zslurm.core import log
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ConfigError, ZslurmError

if TYPE_CHECKING:  # torch is imported by the commands that need it, not to show their help
    import torch

    from zslurm.kernels.arch import Arch
    from zslurm.kernels.harness.builds import Built

app = typer.Typer(help="Kernels on this machine: build and check.", no_args_is_help=True)

Device = Annotated[
    Literal["auto", "cpu", "gpu"], typer.Option(help="Where to run; auto is the GPU, if there is one.")
]

Only = Annotated[
    list[str] | None, typer.Option(metavar="OPERATION", help="Take only this operation (repeatable).")
]


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(metavar="ARCH", help="gfx942, gfx90a, sm_90 or cpu (repeatable); default: this machine's."),
    ] = None,
    json: Json = False,
) -> None:
    """Compile all kernels into the cache.

    They are compiled for this machine, or for another architecture. Exit code 1 on failures.

    Example: zslurm dev kernels build --arch gfx942
    """
    log.set_up()
    architectures = [_architecture(name) for name in arch or []] or [_own_architecture()]
    from zslurm.kernels.cache import CACHE_VARIABLE
    from zslurm.kernels.harness.builds import build_all, cache_problem

    if problem := cache_problem():
        raise ZslurmError(f"{problem}: set {CACHE_VARIABLE} to a directory that can")
    builds = [
        (architecture.name, built)
        for architecture in dict.fromkeys(architectures)
        for built in build_all(architecture)
    ]
    if json:
        print_json([_build_facts(name, built) for name, built in builds])
    else:
        columns: list[str | Column] = [
            "kernel",
            *(Column(name, drop=2) for name in ("language", "architecture")),
            *(Column(name, drop=1) for name in ("registers", "LDS", "occupancy")),
            Column("result", "text"),
        ]
        print_table(columns, [_build_row(name, built) for name, built in builds])
    # One compiler is missing for all sources of an architecture: that is one line.
    problems = dict.fromkeys(f"{name}: {built.problem}" for name, built in builds if built.problem)
    if problems:
        raise ZslurmError("\n".join(problems))


@app.command()
def check(device: Device = "auto", only: Only = None, json: Json = False) -> None:
    """Compare every implementation with its reference on this machine. Exit code 5 if one is wrong.

    Example: zslurm dev kernels check
    """
    log.set_up()
    _known_operations(only or [])
    where = device_of(device)
    from zslurm.kernels.harness.comparison import NO_CASES, UNAVAILABLE, check_all

    checks_done = list(check_all(where, only=only or ()))
    if json:
        print_json([asdict(result) for result in checks_done])
    else:
        rows = [
            [
                result.operation,
                result.case,
                result.implementation,
                result.status,
                "" if result.error is None else f"{result.error:.1e}",
                result.message,
            ]
            for result in checks_done
        ]
        columns: list[str | Column] = [
            "operation",
            Column("operands", drop=1),
            "implementation",
            Column("status", "state"),
            Column("error", drop=2),
            Column("why", "text"),
        ]
        print_table(columns, rows)
    causes = {result.message for result in checks_done if result.status == UNAVAILABLE}
    for line in sorted(causes):
        say(f"note: could not run: {line}")
    if bare := [result.operation for result in checks_done if result.status == NO_CASES]:
        say(f"note: no cases to check: {', '.join(bare)}")
    if wrong := [result for result in checks_done if result.bad]:
        lines = (
            f"{result.operation}: {result.implementation} on {result.case}: {result.message}" for result in wrong
        )
        raise CheckFailed("\n".join(lines))
    say(f"{counted(len(checks_done), 'result')}, none of them wrong")


def _architecture(name: str) -> Arch:
    from zslurm.kernels.arch import KNOWN

    own_architecture = _own_architecture()
    architectures = {**KNOWN, own_architecture.name: own_architecture}
    if name not in architectures:
        raise ConfigError(f"--arch {name}: unknown, expected one of {', '.join(architectures)}")
    return architectures[name]


def _own_architecture() -> Arch:
    from zslurm.kernels.arch import arch_of

    return arch_of(device_of("auto"))


def device_of(wanted: str) -> torch.device:
    """Return the device to run on.

    Raises:
        ZslurmError: a GPU is asked for, and torch finds none.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if wanted == "gpu" and not has_gpu:
        raise ZslurmError("--device gpu: torch finds no GPU on this machine (torch.cuda.is_available() is False)")
    return (
        torch.device("cuda", torch.cuda.current_device()) if has_gpu and wanted != "cpu" else torch.device("cpu")
    )


def _known_operations(names: list[str]) -> None:
    from zslurm.kernels.dispatch import operations

    operation_names = dict.fromkeys(name.partition(".")[0] for name in operations())
    if unknown := [name for name in names if name not in operation_names]:
        raise ConfigError(f"--only {unknown[0]}: no such operation, expected one of {', '.join(operation_names)}")


def _build_facts(arch: str, built: Built) -> dict[str, Any]:
    return {
        "kernel": built.kernel,
        "language": built.language,
        "architecture": arch,
        "file": None if built.file is None else str(built.file),
        "code": None if built.code is None else asdict(built.code),
        "problem": built.problem,
    }


def _build_row(arch: str, built: Built) -> list[str]:
    code = built.code
    numbers = ["", "", ""] if code is None else [str(n) for n in (code.registers, code.lds_bytes, code.occupancy)]
    return [
        built.kernel,
        built.language,
        arch,
        *numbers,
        "failed" if built.problem else str(built.file or "built"),
    ]
