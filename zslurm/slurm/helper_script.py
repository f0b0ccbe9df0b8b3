"""The script of a helper job: it asks for what the script of the run's job does, for a shorter time."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from zslurm.core.quoting import quote

_DIRECTIVE = re.compile(r"#SBATCH\s+--([a-z-]+)")
_OF_THE_RUN = frozenset(
    "array begin comment deadline dependency error exclude job-name no-kill no-requeue nodelist nodes open-mode "
    "output requeue signal switches time time-min wait".split()
)
"""Options of the run's job that a helper job does not have, or has with another value."""


def helper_script(
    script: str,
    *,
    name: str,
    nodes: int,
    exclude: str,
    output: str,
    left_s: float | None,
    now: float,
    command: str,
    python_path: str = "",
) -> str:
    """Return the script of a helper job.

    Args:
        script: of the run's job: account, partition, constraint, GPUs and cores are asked for as there.
        name: of the helper job.
        nodes: how many it asks for.
        exclude: nodes that it must not get.
        output: file of its output.
        left_s: seconds until the time limit of the run's job, which is the last moment of the helper job as well:
            if it has not started by then, Slurm takes it out of the queue. None: there is no limit.
        now: UNIX seconds.
        command: of the batch script.
        python_path: PYTHONPATH of the command.
    """
    lines = [line.strip() for line in script.splitlines() if line.startswith("#SBATCH")]
    kept = [line for line in lines if (match := _DIRECTIVE.match(line)) and match[1] not in _OF_THE_RUN]
    changed = {"job-name": name, "nodes": str(nodes), "exclude": exclude, "output": output}
    if left_s is not None:
        ends_at = datetime.fromtimestamp(now + left_s, UTC)
        changed |= {"time": str(max(1, math.floor(left_s / 60))), "time-min": "1"}
        changed |= {"deadline": ends_at.strftime("%Y-%m-%dT%H:%M:%S")}
    directives = [f'#SBATCH --{option}="{value}"' for option, value in changed.items() if value]
    exports = [f"export PYTHONPATH={quote(python_path)}"] if python_path else []
    return "\n".join(
        [
            "#!/bin/bash",
            "# Nodes for a run of zslurm that has lost some of its own: they join it, and this job ends with it.",
            *kept,
            *directives,
            "#SBATCH --no-requeue",
            "#SBATCH --no-kill",
            *exports,
            f"exec {command}",
            "",
        ]
    )
