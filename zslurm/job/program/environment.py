"""The variables and the command of one rank's program."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from zslurm import progress as protocol
from zslurm.config.spec import RunSpec
from zslurm.config.trainer import PLACEHOLDERS, TrainerSection
from zslurm.run.run_dir import AttemptDir, RunDir

SAFE_PATH = "PYTHONSAFEPATH"


def program_environment(
    spec: RunSpec,
    trainer: TrainerSection,
    run: RunDir,
    attempt: AttemptDir,
    environ: Mapping[str, str],
    progress_file: Path,
) -> dict[str, str]:
    """Return the variables of the program: torchrun's, zslurm's, and its own (`trainer.env`)."""
    nodes = int(environ["WORLD_SIZE"]) // int(environ["LOCAL_WORLD_SIZE"])
    path = environ.get("PATH", os.defpath)
    own_bin = str(Path(sys.executable).parent)
    # The Python of cluster.venv comes first where one is named; else what is active where the run was submitted.
    path = f"{own_bin}:{path}" if spec.cluster.venv is not None else f"{path}:{own_bin}"
    # Ours keep a user's files out of Python's path; a program finds the modules next to it.
    kept = {name: value for name, value in environ.items() if name != SAFE_PATH or name in spec.cluster.env}
    variables = {
        **kept,
        "PATH": path,
        "NNODES": str(nodes),
        "NODE_RANK": environ["GROUP_RANK"],
        "ZSLURM_RANKS_PER_NODE": str(spec.processes_per_node),
        "ZSLURM_RUN_DIR": str(run.path),
        "ZSLURM_OUTPUT_DIR": str(run.output),
        "ZSLURM_ATTEMPT": str(attempt.number),
        protocol.VARIABLE: str(progress_file),
    }
    if trainer.warm:
        variables[protocol.MODULES_VARIABLE] = str(run.warm_modules(environ))
    values = _values(variables)
    return variables | {name: _filled(value, values) for name, value in trainer.env.items()}


def filled(command: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    """Return the command with its placeholders replaced."""
    values = _values(environ)
    return [_filled(word, values) for word in command]


def _values(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        "nodes": environ["NNODES"],
        "node_rank": environ["NODE_RANK"],
        "ranks_per_node": environ["ZSLURM_RANKS_PER_NODE"],
        "world_size": environ["WORLD_SIZE"],
        "rank": environ["RANK"],
        "local_rank": environ["LOCAL_RANK"],
        "master_addr": environ["MASTER_ADDR"],
        "master_port": environ["MASTER_PORT"],
        "run_dir": environ["ZSLURM_RUN_DIR"],
        "output_dir": environ["ZSLURM_OUTPUT_DIR"],
        "attempt": environ["ZSLURM_ATTEMPT"],
    }


_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


def _filled(word: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], word)
