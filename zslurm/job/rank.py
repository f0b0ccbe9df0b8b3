"""`python -m zslurm.job.rank RUN_DIR ATTEMPT`: one rank, started by srun or by the local launcher.

Maps Slurm's variables to torchrun's (the only ones the trainer knows), opens or finds rank 0's store, trains,
and leaves in the attempt's directory why the rank ended. Rank 0 opens the store on port 0 and keeps it; its
address is published by rename, so there is no port to choose and none to lose between bind and use. With
`aegis.recovery: memory` the supervisor has a store server publish that address, and no rank hosts anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from zslurm.core.files import read_json, write_atomically
from zslurm.core.redact import redact
from zslurm.job.numa_bind import bind
from zslurm.job.own_address import rendezvous_host
from zslurm.job.rank_setup import close_progress, leave, open_progress, set_up
from zslurm.job.stop_request import StopListener, address_of, publish
from zslurm.kernels.prepared import use_prepared
from zslurm.run.log_times import keep_times
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.slurm.environment import task_node
from zslurm.train.allocator import set_allocator
from zslurm.train.errors import Diverged, MovedOff, TrainError
from zslurm.train.progress import last_step
from zslurm.train.recovery.generation import (
    MEMBER_VARIABLE,
    RECOVERING,
    RECOVERY_VARIABLE,
    SECRET_VARIABLE,
    member_name,
)
from zslurm.train.stop import StopRequest

RENDEZVOUS_TIMEOUT_S = 900.0
_FLIGHT_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""What precedes the rank in the name of a flight recorder's dump, by its name from torch 2.10 on."""
_OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    _FLIGHT_FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Variables of the flight recorder by their present names; torch 2.10 and later warn of an old one."""


def rendezvous(attempt: AttemptDir, environ: MutableMapping[str, str]) -> Any:
    """Set MASTER_ADDR and MASTER_PORT; returns rank 0's store, which must live as long as the process.

    Raises:
        RuntimeError: neither rank 0 nor a store server published an address in time.
    """
    store: Any = None
    served = environ.get(RECOVERY_VARIABLE) in RECOVERING
    if environ["RANK"] == "0" and not served:
        from torch.distributed import TCPStore

        host = rendezvous_host(environ)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        publish(attempt.rendezvous, address_of(host, store.port))
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    address = read_json(attempt.rendezvous)
    while address is None:
        if time.monotonic() > deadline:
            host = "the store server" if served else "rank 0"
            raise RuntimeError(f"{attempt.rendezvous}: {host} published no address in {RENDEZVOUS_TIMEOUT_S:g} s")
        time.sleep(0.05)
        list(attempt.path.iterdir())  # makes an NFS client look again, instead of remembering "no such file"
        address = read_json(attempt.rendezvous)
    environ["MASTER_ADDR"] = address["host"]
    environ["MASTER_PORT"] = str(address["port"])
    environ[SECRET_VARIABLE] = str(address.get("secret", ""))
    # torchrun's own way to say that the store is already there and every rank is a client of it.
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return store


def name_recorder_variables(environ: MutableMapping[str, str], dump: str, torch: str | None = None) -> None:
    """Set the flight recorder's variables by the names that this rank's torch has for them.

    Args:
        environ: of the rank; what it has by either name stays.
        dump: what precedes the rank in the name of a dump.
        torch: its version; default: the installed package's.
    """
    major, minor = (torch or version("torch")).split(".")[:2]
    renamed = (int(major), int(minor)) >= (2, 10)
    if _OLD_NAMES[_FLIGHT_FILE] not in environ:
        environ.setdefault(_FLIGHT_FILE, dump)
    for present, old in _OLD_NAMES.items():
        wanted_name, other_name = (present, old) if renamed else (old, present)
        if other_name in environ:
            value = environ.pop(other_name)
            environ.setdefault(wanted_name, value)


def _listen_for_stop(environ: MutableMapping[str, str], stop: StopRequest) -> StopListener:
    """On rank 0: look into the store for the supervisor's request to save and stop."""
    from torch.distributed import TCPStore

    client = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    return StopListener(client, environ[SECRET_VARIABLE], stop.ask)


def _record_end(
    attempt: AttemptDir,
    environ: MutableMapping[str, str],
    code: int,
    error: BaseException | None,
    stop: StopRequest,
) -> None:
    body: dict[str, Any] = {
        "rank": int(environ["RANK"]),
        "node": (node := task_node(environ) or socket.gethostname()),
        "member": environ.get(MEMBER_VARIABLE) or member_name(node, environ.get("LOCAL_RANK", "0")),
        "exit_code": code,
        "time": time.time(),
        "step": last_step(),
        "usage": own_usage(),
    }
    if stop.signal_name is not None:
        body["signal"] = stop.signal_name
    if error is not None:
        body["error"] = type(error).__name__
        body["message"] = redact(" ".join(_message(error).split()))[:2000]
        body["traceback"] = redact("".join(traceback.format_exception(error)))[-20000:]
    if isinstance(error, Diverged):
        body["fingerprint"] = error.fingerprint
    write_atomically(attempt.rank_end(body["rank"]), json.dumps(body) + "\n")


def own_usage() -> dict[str, float]:
    """Return what this process and its ended children used: seconds of processors and of the clock, and memory."""
    own_use, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "cpu_s": round(own_use.ru_utime + own_use.ru_stime + children.ru_utime + children.ru_stime, 3),
        "wall_s": round(time.time() - psutil.Process().create_time(), 3),
        "max_rss_bytes": own_use.ru_maxrss * 1024,  # of this process; that of the largest child is not added
        "cores": len(os.sched_getaffinity(0)),
    }


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({'' if error.code is None else repr(error.code)}) before the end of the run"
    return str(error)


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python gives to a process that ends by this error."""
    if isinstance(error, SystemExit):
        return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, TrainError) else 1


def log_as(attempt: AttemptDir, rank: int) -> None:
    """Write to a rank's log from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(attempt.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def run_rank(
    run: RunDir, attempt: AttemptDir, stop: StopRequest, join: Callable[[], tuple[Any, Any]] | None = None
) -> int:
    """Train one rank, whose variables are set; returns its exit code.

    Code that runs inside the trainer may call `sys.exit`. It is recorded like any other error, and the process
    never ends with 0 by it: to srun that would look like a rank that is done.

    Args:
        run: the run.
        attempt: its attempt.
        stop: a request to stop that listens.
        join: in a warm process, returns the generation to join and the model that was made before.
    """
    environ = os.environ
    progress = attempt.progress(environ)
    environ["ZSLURM_PROGRESS_DIR"] = str(progress)
    environ["ZSLURM_ATTEMPT"] = str(attempt.number)
    error: BaseException | None = None
    store: Any = None
    listener: StopListener | None = None
    try:
        rank = int(environ["RANK"])
        open_progress(progress, rank)
        keep_times(attempt.rank_log(rank), attempt.rank_log_times(rank))
        if bound := bind(environ):
            print(bound, flush=True)
        set_allocator(environ)
        use_prepared(environ)
        name_recorder_variables(environ, str(attempt.flight / "rank-"))
        from zslurm.train.main import train

        store = rendezvous(attempt, environ)
        if rank == 0:
            listener = _listen_for_stop(environ, stop)
        generation, model = join() if join is not None else (None, None)

        def become(rank: int) -> None:
            nonlocal listener
            log_as(attempt, rank)
            keep_times(attempt.rank_log(rank), attempt.rank_log_times(rank))
            if rank == 0 and listener is None:
                listener = _listen_for_stop(environ, stop)

        code = int(train(run.path, stop, generation, model, become))
    except BaseException as raised:
        error, code = raised, _exit_code(raised)
        if isinstance(raised, MovedOff):
            print(raised, flush=True)
        elif isinstance(raised, TrainError):
            print(f"error: {raised}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
    if not isinstance(error, MovedOff):  # then its end is that of the process which continues as this rank
        with contextlib.suppress(OSError):  # the run directory is away, or was moved: the log has the reason
            _record_end(attempt, environ, code, error, stop)
    close_progress(progress, int(environ["RANK"]))
    sys.stdout.flush()
    sys.stderr.flush()
    if error is not None:
        # Threads of a broken process group may wait for dead peers forever: leave without asking them.
        os._exit(code if isinstance(error, MovedOff) else code or 1)
    if listener is not None:
        listener.close()
    del store
    return code


def main(argv: list[str]) -> int:
    """Train one rank; returns its exit code."""
    if len(argv) != 2 or not argv[1].isdigit():
        print("usage: python -m zslurm.job.rank RUN_DIR ATTEMPT", file=sys.stderr)
        return 2
    stop = StopRequest()  # listens before torch is imported: a request in that long time must not kill the rank
    stop.install()
    run = RunDir(Path(argv[0]))
    set_up(os.environ)
    return run_rank(run, run.attempt(int(argv[1])), stop)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
