"""`python -m zslurm.job.in_memory.warm_rank RUN_DIR ATTEMPT`: a process that waits for a lost rank's place.

It has torch imported, the configuration read and the model made, and waits at the attempt's store for a generation
that names it (train/recovery). From then on it is that rank: it writes to the rank's log, keeps the rank's
progress, and ends as a rank does. ZSLURM_MEMBER is its name among the members, NODE/SLOT; by default NODE/w0.

In a helper job SIGTERM ends it at once: Slurm ends that job, and the run loses its node. It ends with 0 when it is
asked to stop, or when the store is gone, for then there is no place left to take. On a GPU node it holds no GPU
before it has a place: which one it gets depends on the rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from zslurm.job.in_memory.warm_step import HELPER_VARIABLE
from zslurm.job.rank import log_as, rendezvous, run_rank
from zslurm.job.rank_setup import leave
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.environment import task_node
from zslurm.train.errors import TrainError
from zslurm.train.recovery.generation import MEMBER_VARIABLE, RECOVERY_VARIABLE, member_name
from zslurm.train.stop import StopRequest

_CONNECTIONS = 5
"""Connections to the store that a process opens when it takes a place."""


def main(argv: list[str]) -> int:
    """Wait, and train if there is a place to take; returns the exit code."""
    if len(argv) != 2 or not argv[1].isdigit():
        print("usage: python -m zslurm.job.in_memory.warm_rank RUN_DIR ATTEMPT", file=sys.stderr)
        return 2
    stop, environ = StopRequest(), os.environ
    if environ.get(HELPER_VARIABLE):  # a signal is meant for the helper job, and not for the run
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    else:
        stop.install()
    node = task_node(environ) or socket.gethostname()
    environ.setdefault(MEMBER_VARIABLE, member_name(node, "w0"))
    environ.setdefault(RECOVERY_VARIABLE, "memory")
    environ["RANK"] = "-1"  # none yet: the store is another process's in any case
    run = RunDir(Path(argv[0]))
    attempt = run.attempt(int(argv[1]))
    try:
        identity = _wait(run, attempt, stop)
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except RuntimeError as error:  # DistStoreError, DistNetworkError, or no address was published
        line = str(error).partition("\n")[0]
        print(f"warm rank: the store is gone ({line}): there is no place to take", flush=True)
        return 0
    if identity is None:
        return 0
    rank = int(environ["RANK"])
    print(f"{environ[MEMBER_VARIABLE]} takes the place of rank {rank}", flush=True)
    log_as(attempt, rank)
    return run_rank(run, attempt, stop, lambda: identity)


def _wait(run: RunDir, attempt: AttemptDir, stop: StopRequest) -> tuple[Any, Any] | None:
    """Return the generation to join, and the model; None if the process was asked to stop."""
    import torch
    from torch.distributed import TCPStore

    import zslurm.train.main  # noqa: F401  # imported now, not when there is a place to take
    from zslurm.train.assembly import initial_model, warm_up
    from zslurm.train.config import load_train_config
    from zslurm.train.parallel.store_connections import CONNECTIONS
    from zslurm.train.parallel.world import cpu_threads
    from zslurm.train.recovery.warm import take_place, wait_to_join, with_secret

    environ = os.environ
    config = load_train_config(run.config)
    torch.set_num_threads(cpu_threads(config.parallel.threads))
    model = initial_model(config, torch.device("cpu"))
    warm_up(model, config)
    rendezvous(attempt, environ)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    served = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    store = with_secret(served)
    CONNECTIONS.keep(host, port, _CONNECTIONS)
    generation = wait_to_join(store, environ[MEMBER_VARIABLE], over=lambda: stop.asked)
    if generation is None:
        return None
    take_place(store, environ[MEMBER_VARIABLE], generation)
    return generation, model


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
