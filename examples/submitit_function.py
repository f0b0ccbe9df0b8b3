"""Run functions on the cluster with submitit, where only the word `zslurm` is new.

    python examples/submitit_function.py                   # on a login node, with the profile of `zslurm init`
    python examples/submitit_function.py --cluster local   # on this machine

Functions get the cluster's template, modules and RCCL environment; arrays, `checkpoint()` and logs are submitit's.
"""

from __future__ import annotations

import argparse
import os

import submitit


def work(number: int) -> tuple[int, str]:
    """Return the square of a number, and the node that computed it."""
    return number * number, os.uname().nodename


def main() -> None:
    """Submit one function, then an array."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="zslurm", help="zslurm, slurm, or local for this machine")
    parser.add_argument("--folder", default="submitit-logs", help="for pickles and logs; all nodes share it")
    arguments = parser.parse_args()

    executor = submitit.AutoExecutor(arguments.folder, cluster=arguments.cluster)
    executor.update_parameters(timeout_min=5, slurm_array_parallelism=2)

    job = executor.submit(work, 12)
    print(f"job {job.job_id}: {job.result()}")
    array = executor.map_array(work, range(4))
    print(f"array: {[job.result()[0] for job in array]}")


if __name__ == "__main__":
    main()
