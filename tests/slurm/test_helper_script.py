"""The script of a helper job, made of the script of its run's job."""

from __future__ import annotations

from typing import Any

from zslurm.slurm.helper_script import helper_script

_SCRIPT = """#!/bin/bash
# first: a training run
#SBATCH --job-name="first"
#SBATCH --nodes="4"
#SBATCH --ntasks-per-node="8"
#SBATCH --gpus-per-node="mi300x:8"
#SBATCH --time="24:00:00"
#SBATCH --partition="batch"
#SBATCH --account="lab"
#SBATCH --constraint="mi300x"
#SBATCH --nodelist="node[1-4]"
#SBATCH --exclude="node9"
#SBATCH --output="/runs/first/logs/job-%j.log"
#SBATCH --open-mode="append"
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal="B:USR2@300"

echo '#SBATCH is no option here'
"""


def _options(**changes: Any) -> dict[str, str]:
    given: dict[str, Any] = {
        "name": "first-helper", "nodes": 1, "exclude": "node[1-4,9]", "output": "/runs/first/logs/helper-%j.log",
        "left_s": 7260.0, "now": 1_800_000_000.0, "command": "python -m zslurm.job.helper /runs/first 12 v",
    }  # fmt: skip
    script = helper_script(_SCRIPT, **given | changes)
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}


def test_a_helper_job_asks_for_the_same_kind_of_node() -> None:
    options = _options()
    same = {name: options[name] for name in ("partition", "account", "constraint", "gpus-per-node")}
    assert same == {
        "partition": "batch", "account": "lab", "constraint": "mi300x", "gpus-per-node": "mi300x:8",
    }  # fmt: skip
    assert (options["nodes"], options["exclude"], options["job-name"]) == ("1", "node[1-4,9]", "first-helper")
    assert "nodelist" not in options and "signal" not in options and "requeue" not in options
    assert "no-requeue" in options, "a helper job whose node dies does not come back"


def test_it_leaves_the_queue_when_the_run_s_job_reaches_its_limit() -> None:
    options = _options()
    assert (options["time"], options["time-min"], options["deadline"]) == ("121", "1", "2027-01-15T10:01:00")
    without = _options(left_s=None)
    assert not {"time", "time-min", "deadline"} & without.keys()


def test_the_python_path_of_a_copied_program_is_passed_on() -> None:
    script = helper_script(
        _SCRIPT, name="n", nodes=1, exclude="", output="o", left_s=None, now=0.0, command="run", python_path="/a b"
    )
    assert script.splitlines()[-2:] == ["export PYTHONPATH='/a b'", "exec run"]
    assert "--exclude" not in script
