"""Processes of runs that need not wait for their imports: `python -m MODULE` becomes a fork of one that has them.

The seam is the environment: `environment()` puts `hook/` on PYTHONPATH, whose sitecustomize passes the named
modules, and nothing else, to a `CommandServer`. They run the product's code unchanged, and their parent sees the
same exit codes, signals and open files. It does not see the process that does the work: a test that reads that
process's command line, or stops it by SIGSTOP, starts it as users do.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import bench, command_server, end_of_tests
from tests.command_server import Commands, CommandServer

HOOK = Path(__file__).resolve().parent / "hook"

RANKS = ("zslurm.job.rank", "zslurm.bench.run.rank", "zslurm.job.evaluation_rank", "zslurm.job.generation_rank")
"""They import torch; the server has imported `WITH_TORCH` then."""

BESIDE_RANKS = (
    "zslurm.aegis.supervisor.gpu_test",
    "zslurm.job.in_memory.store_server",
    "zslurm.job.in_memory.warm_rank",
    "zslurm.train.plan.tokens_per_second",
)
"""They do as well."""

OTHERS = (
    "submitit.core._submit",
    "zslurm.aegis.agent.main",
    "zslurm.bench.run.node",
    "zslurm.doctor.node",
    "zslurm.hardware.facts",
)
"""They do not; the server has imported `WITHOUT_TORCH`."""

PROGRAM_RANKS = ("zslurm.job.program.rank",)
"""Ranks of a run whose trainer is another program: they do not either."""

WITHOUT_TORCH = (
    *OTHERS,
    *PROGRAM_RANKS,
    "zslurm.aegis.supervisor.job",
    "zslurm.aegis.supervisor.supervisor",
    "zslurm.submit.plugin.job_environment",
)
WITH_TORCH = (
    *WITHOUT_TORCH,
    *RANKS,
    *BESIDE_RANKS,
    "zslurm.train.main",
    *(f"zslurm.bench.{name}" for name in ("collectives", "gemm", "hbm", "mlp", "train")),
    *(["zslurm.train.evaluation.harness"] if importlib.util.find_spec("lm_eval") else []),
)


def environment(
    server: Commands,
    modules: Sequence[str],
    env: Mapping[str, str] | None = None,
    hook: Path = HOOK,
    *,
    customized: bool = False,
) -> dict[str, str]:
    """Variables with which these modules are forked from a server.

    Args:
        server: it has imported what they need.
        modules: of the groups above.
        env: other variables. A process that finds a sitecustomize on their PYTHONPATH is not forked.
        hook: where the processes find HOOK.
        customized: it is all the same, and imports the sitecustomize, with the server's modules behind it.
    """
    paths = [*filter(None, [(env or {}).get("PYTHONPATH")])]
    paths.insert(0 if customized else len(paths), str(hook))
    return {
        **(env or {}),
        "PYTHONPATH": os.pathsep.join(paths),
        "ZSLURM_TEST_SERVER": str(server.path),
        "ZSLURM_TEST_FORKED": ",".join(modules),
    }


@functools.cache
def place() -> Path:
    """Where the servers of this run of the tests are; all of its processes share them."""
    directory = Path(tempfile.gettempdir(), f"zslurm-servers-{os.environ[end_of_tests.VARIABLE]}")
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


@functools.cache
def server(*, torch: bool = False) -> Commands:
    """The server of this run of the tests, as its own user; started on first use.

    Args:
        torch: whether it has imported torch, and can fork ranks; those of benchmarks measure every point shortly.
    """
    path = place() / ("with-torch" if torch else "without-torch")
    with (place() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return Commands(path)
        variables = os.environ | ({"PYTHONPATH": str(bench.IN_RANKS)} if torch else {})
        modules = WITH_TORCH if torch else WITHOUT_TORCH
        script = Path(command_server.__file__)
        ends = os.pidfd_open(end_of_tests.whose())
        try:
            return CommandServer(Path(sys.executable), script, path, variables, modules=modules, ends=ends)
        finally:
            os.close(ends)
