"""`python -m zslurm.job.program.rank RUN_DIR ATTEMPT`: one rank of a run whose trainer is another program.

Sets torchrun's variables, agrees with the other ranks on an address for their rendezvous, starts the command,
follows its progress, passes a request to save and stop on as the signal that the program wants, and ends as the
program ended. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path

from zslurm.config.load import load_spec
from zslurm.core.errors import Exit, ZslurmError
from zslurm.job.numa_bind import bind
from zslurm.job.program.ending import record_end, write_end
from zslurm.job.program.environment import filled, program_environment
from zslurm.job.program.process import Program, adopt_orphans
from zslurm.job.program.progress import ProgramProgress
from zslurm.job.program.recovery import ProgramRecovery
from zslurm.job.program.rendezvous import rendezvous
from zslurm.job.program.stop_channel import join, pass_on
from zslurm.job.rank_setup import close_progress, open_progress, set_up
from zslurm.run.log_times import keep_times
from zslurm.run.run_dir import AttemptDir, RunDir
from zslurm.train.stop import StopRequest


def run_program(run: RunDir, attempt: AttemptDir, stop: StopRequest, environ: MutableMapping[str, str]) -> int:
    """Run the program of one rank; returns the exit code, negative for a signal.

    Raises:
        ZslurmError: the run's configuration cannot be read.
        OSError: the program cannot be started.
        RuntimeError: the ranks cannot agree on an address.
    """
    spec = load_spec(run.config)
    trainer = spec.trainer
    if trainer is None:
        raise ZslurmError(f"{run.config}: it has no trainer.command any more; was it overwritten?")
    rank, records = int(environ["RANK"]), attempt.progress(environ)
    if bound := bind(environ):
        print(bound, flush=True)
    keep_times(attempt.rank_log(rank), attempt.rank_log_times(rank))
    open_progress(records, rank)
    shown = records / f"shown-{rank:05d}"
    address, _server = rendezvous(attempt, environ)
    recovery = ProgramRecovery(address, shown, int(environ["WORLD_SIZE"]))
    join(address, stop.ask, recovery.take)
    variables = program_environment(spec, trainer, run, attempt, environ, shown)
    with contextlib.suppress(OSError):
        run.output.mkdir(exist_ok=True)
    adopt_orphans()
    watch = ProgramProgress(trainer, run, attempt, rank, int(environ["WORLD_SIZE"]), shown)
    program = Program(trainer, stop, lambda: pass_on(address), run.warm_socket(environ) if trainer.warm else None)
    try:
        while True:
            if trainer.launcher == "rank":
                variables |= recovery.start()
            code = program.run(filled(trainer.command, variables), variables, watch, records, recovery)
            for line in program.notes(code):
                print(f"zslurm: {line}", flush=True)
            if code == 0 or stop.asked or trainer.launcher == "node":
                break
            watch.begin(records, os.getpid())  # an agent reports a rank whose record names a process that is gone
            if not recovery.again(watch.step):
                break
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            print(f"zslurm: the program ended {how}; it is started again while the other ranks wait", flush=True)
    finally:
        with contextlib.suppress(OSError):
            shown.unlink(missing_ok=True)
        recovery.close()
        close_progress(records, rank)
    return record_end(attempt, environ, code, watch.step, stop)


def main(argv: list[str]) -> int:
    """Run one rank; returns its exit code."""
    if len(argv) != 2 or not argv[1].isdigit():
        print("usage: python -m zslurm.job.program.rank RUN_DIR ATTEMPT", file=sys.stderr)
        return 2
    stop = StopRequest()
    stop.install()
    run = RunDir(Path(argv[0]))
    attempt = run.attempt(int(argv[1]))
    set_up(os.environ)
    try:
        code = run_program(run, attempt, stop, os.environ)
    except (OSError, RuntimeError, ZslurmError) as error:
        code, message = Exit.USAGE, f"trainer.command cannot be started: {error}"
        print(f"error: {message}", file=sys.stderr, flush=True)
        write_end(attempt, os.environ, code, -1, error=type(error).__name__, message=message)
    sys.stdout.flush()
    if code < 0:  # end by the same signal: srun reports it, as it would of the program itself
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
