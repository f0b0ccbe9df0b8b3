"""`zslurm dev tune gemm`: tune a run's matrix products once, offline, for every rank to use."""

from __future__ import annotations

import errno
import json as json_format
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer import Option

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Cluster, Json, RunFile, Set, Slurm, run_locally_or_as_job
from zslurm.cli.terminal.table import print_table
from zslurm.cluster.gemm_tables import own_table_path
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.submit.checks.gemm_tuning import calls_of
from zslurm.submit.resolve import resolve_run
from zslurm.train.errors import ConfigError as TrainConfigError
from zslurm.train.plan.gemm_table import SCHEMA, GemmTable, TunedProduct, load_table
from zslurm.train.plan.tunable import LinearCall

_WORKER = "zslurm.bench.gemm_tuning"
_NO_GPU = 3
_COLUMNS = ["product", "pass", "rows", "outputs", "inputs", "TFLOPS", "tuned", "gain"]

app = typer.Typer(help="Tune once, offline, what runs then only look up.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `gemm` a command of its group, which has one only."""


@app.command()
def gemm(
    run_file: RunFile,
    cluster: Cluster = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the table here; default: next to the cluster's profile.")
    ] = None,
    minutes: Annotated[float, Option(metavar="N", min=0.1, help="Begin no product after this long.")] = 60.0,
    solution_ms: Annotated[int, Option(metavar="MS", min=1, help="Longest time to measure one solution.")] = 30,
    list_products: Annotated[bool, Option("--list", help="List what would be tuned, and tune nothing.")] = False,
    slurm: Slurm = False,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Tune a run's matrix products on one GPU. torch's TunableOp does it; `submit` gives every rank the table.

    Example: zslurm dev tune gemm run.yaml --slurm
    """
    spec = resolve_run(run_file, cluster=cluster, overrides=overrides or []).spec
    calls = calls_of(spec)
    if list_products:
        _list(calls, as_json=json)
        return
    path = out or own_table_path(spec.cluster.name)
    _check_writable(path)
    run_locally_or_as_job(slurm, workers_option=None, gpus=1)
    elsewhere = "--slurm tunes on a GPU of the cluster's nodes"
    if spec.cluster.launcher == "local":
        elsewhere = "name the cluster whose GPUs train with --cluster, and --slurm"
    table, skipped = _tune(calls, minutes, solution_ms, elsewhere)
    try:
        older = load_table(path)
        if not older.differences(table.device, table.validators):
            table = table.merged(older)
        else:
            say(f"note: {path} was of another card or version, and is replaced")
    except TrainConfigError as error:
        if path.exists():
            say(f"note: replaced: {error}")
    try:
        write_atomically(path, table.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ZslurmError(f"{path}: cannot be written: {error.strerror}; name another file with --out") from error
    if json:
        print_json({"file": str(path), **table.model_dump(mode="json")})
    else:
        print_table(_COLUMNS, [_row(product) for product in table.products])
    for line in skipped:
        say(f"note: {line}")
    if not table.candidates:
        say(f"note: {_nothing_gained(table)}")
    say(f"wrote {path}: {counted(len(table.results), 'result')} for {table.device}, {table.runtime}")


def _list(calls: list[LinearCall], *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(call) for call in calls])
        return
    rows = [
        [call.name, ", ".join(call.passes), f"{call.rows:,}", f"{call.outputs:,}", f"{call.inputs:,}", call.dtype]
        for call in calls
    ]
    print_table(["product", "passes", "rows", "outputs", "inputs", "format"], rows)
    say("note: experts, attention and convolutions have kernels that TunableOp does not know (docs/tune.md)")


def _check_writable(path: Path) -> None:
    """Raise ZslurmError if the table could not be written, before minutes of tuning."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ZslurmError(
            f"{path}: cannot be written: {error.strerror}; name another file with --out, and set "
            "cluster.gemm_table to it"
        ) from error


def _tune(
    calls: list[LinearCall], minutes: float, solution_ms: int, elsewhere: str
) -> tuple[GemmTable, list[str]]:
    """Tune in another process, which has torch; returns the table, and a line for each product that was left out.

    `elsewhere` is the advice if this machine has no GPU.

    Raises:
        ConfigError: this machine has no GPU.
        ZslurmError: the process failed.
    """
    request = {"calls": [asdict(call) for call in calls], "seconds": 60 * minutes, "solution_ms": solution_ms}
    command = [sys.executable, "-P", "-m", _WORKER]
    lines: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryFile("w+") as messages,  # a pipe could fill while stdout is read
        subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json_format.dumps(request))
        process.stdin.close()
        for text in process.stdout:
            if not text.startswith("{"):  # a library's own message
                continue
            lines.append(json_format.loads(text))
            if "figures" in lines[-1]:
                say(f"{len(lines)} of {len(calls)}: {calls[lines[-1]['call']].name}")
        process.wait()
        messages.seek(0)
        errors = messages.read().strip().splitlines()
    if process.returncode == _NO_GPU:
        raise ConfigError(f"torch sees no GPU on this machine; {elsewhere}")
    if process.returncode or not lines or "results" not in lines[-1]:
        raise ZslurmError(f"tuning failed: {errors[-1] if errors else f'exit code {process.returncode}'}")
    return table_from(calls, lines), _skipped(calls, lines)


def table_from(calls: list[LinearCall], lines: list[dict[str, Any]]) -> GemmTable:
    """Return the table that the lines of the tuning process give.

    Raises:
        ZslurmError: they are not such lines.
    """
    end = lines[-1]
    products = [
        TunedProduct(
            name=call.name,
            pass_name=direction,
            dtype=call.dtype,
            m=call.rows,
            n=call.outputs,
            k=call.inputs,
            default_tflops=call.flops / figures[f"default.{direction}"] / 1e12,
            tuned_tflops=call.flops / figures[f"tuned.{direction}"] / 1e12,
        )
        for call, figures in ((calls[line["call"]], line["figures"]) for line in lines if "figures" in line)
        for direction in call.passes
    ]
    try:
        return GemmTable(
            schema_number=SCHEMA,
            device=end["device"],
            torch=end["torch"],
            runtime=end["runtime"],
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            validators=end["validators"],
            products=tuple(products),
            results=end["results"],
            candidates=sum(row[2] != "Default" for row in end["results"]),
        )
    except ValidationError as error:
        raise ZslurmError(f"tuning failed: torch's results are unexpected: {error.errors()[0]['msg']}") from error


def _skipped(calls: list[LinearCall], lines: list[dict[str, Any]]) -> list[str]:
    return [f"{calls[line['call']].name}: {line['skipped']}" for line in lines if "skipped" in line]


def _row(product: TunedProduct) -> list[str]:
    gain = product.tuned_tflops / product.default_tflops
    sizes = [f"{size:,}" for size in (product.m, product.n, product.k)]
    rates = [f"{product.default_tflops:.4g}", f"{product.tuned_tflops:.4g}", f"{gain:.2f}x"]
    return [product.name, product.pass_name, *sizes, *rates]


def _nothing_gained(table: GemmTable) -> str:
    if table.runtime.startswith("ROCm"):
        return "torch's default is the fastest solution of every product"
    return f"on {table.runtime} TunableOp knows torch's default alone: this table changes nothing; it is for ROCm"
