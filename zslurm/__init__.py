"""zslurm: train on Slurm clusters, and keep the run alive.

From Python, on a login node or in a notebook (paths may be text everywhere):

    import zslurm

    run = zslurm.submit("run.yaml", overrides={"slurm.nodes": 2})     # or command=["python", "train.py"]
    run = zslurm.load_run("my-run")                                   # a name, a path or a job id
    run.status().state, run.wait().state, run.events(), run.metrics().frame(), run.cancel()

    zslurm.classify("slurm-4242.out").root                            # what went wrong in a job's logs
    zslurm.env("mi300x-pollara")                                      # the variables of RCCL on a cluster
    zslurm.Checkpoint.open("my-run").numpy("embedding.weight")

Every error is a `zslurm.Error`. Importing this package imports nothing else, neither torch nor numpy; what is used
is imported then. The commands call the same functions. docs/python.md has examples.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for True; the module `typing` alone would be most of the import
__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Error",
    "NotFound",
    "Run",
    "SlurmRefused",
    "SlurmUnavailable",
    "WaitTimeout",
    "ZslurmError",
    "__version__",
    "classify",
    "env",
    "keep",
    "load_run",
    "progress",
    "recover",
    "restore",
    "runs",
    "submit",
]

if TYPE_CHECKING:
    from typing import Any

    from zslurm import progress
    from zslurm.api.checkpoint import Checkpoint
    from zslurm.api.environment import env
    from zslurm.api.faults import classify
    from zslurm.api.run import Run, WaitTimeout, load_run, runs
    from zslurm.api.submission import submit
    from zslurm.checkpoint_tools.errors import CheckpointError
    from zslurm.core.errors import ConfigError, NotFound, SlurmRefused, SlurmUnavailable, ZslurmError
    from zslurm.error import Error
    from zslurm.keeping import keep, restore
    from zslurm.recovering import recover

_MODULES = {
    "Checkpoint": "zslurm.api.checkpoint",
    "CheckpointError": "zslurm.checkpoint_tools.errors",
    "ConfigError": "zslurm.core.errors",
    "Error": "zslurm.error",
    "NotFound": "zslurm.core.errors",
    "Run": "zslurm.api.run",
    "SlurmRefused": "zslurm.core.errors",
    "SlurmUnavailable": "zslurm.core.errors",
    "WaitTimeout": "zslurm.api.run",
    "ZslurmError": "zslurm.core.errors",
    "classify": "zslurm.api.faults",
    "env": "zslurm.api.environment",
    "keep": "zslurm.keeping",
    "load_run": "zslurm.api.run",
    "progress": "zslurm",
    "recover": "zslurm.recovering",
    "restore": "zslurm.keeping",
    "runs": "zslurm.api.run",
    "submit": "zslurm",  # the package of that name, which can be called
}
"""Where each name is; it is imported when it is used."""


if not TYPE_CHECKING:  # a type checker is to find names that are not there

    def __getattr__(name: str) -> Any:
        """Import a name of the API."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        home = _MODULES[name]
        value = import_module(f"zslurm.{name}") if home == "zslurm" else getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
