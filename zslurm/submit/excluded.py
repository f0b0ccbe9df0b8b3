"""The nodes that a submission must not get: those that the user excludes, and those that Aegis found broken."""

from __future__ import annotations

import time

from zslurm.aegis.policy.history import active_exclusions, history_of
from zslurm.aegis.types import History
from zslurm.config.spec import RunSpec
from zslurm.run.run_dir import RunDir
from zslurm.slurm.hostlist import compress, expand
from zslurm.train.jsonl import read_jsonl


def excluded_nodes(spec: RunSpec, run: RunDir) -> str | None:
    """Both as one hostlist; None where there are none. A node that the run asks for by name is not among them."""
    try:
        history = history_of(read_jsonl(run.events))
    except OSError:  # whoever writes there will say so
        history = History()
    found = active_exclusions(history, time.time(), spec.aegis)
    broken = set(found) - set(expand(spec.slurm.nodelist or ""))
    if not broken:
        return spec.slurm.exclude
    return compress([*expand(spec.slurm.exclude or ""), *broken])
