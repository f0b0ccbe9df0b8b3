"""Run a command of zslurm as a Slurm job and follow it: what `--slurm` does with heavy commands.

The job runs the same command line in the same directory. Its output comes back through files in the user's state
directory, which all nodes must share as they share the home; its exit code is the command's.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zslurm.cluster.profile import LOCAL, default_name
from zslurm.config.spec import RunSpec
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, SlurmUnavailable, ZslurmError
from zslurm.run.index import state_dir
from zslurm.run.secrets import split_secrets, write_secrets
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.sbatch_options import carried_by
from zslurm.slurm.states import JobState
from zslurm.submit.script.render import environment_variables, job_environment, job_python
from zslurm.submit.script.sample_run import sample_run
from zslurm.submit.script.templates import TemplateEnvironment, find_template

POLL_S = 1.0
ASK_SLURM_EVERY_S = 10.0
_MOST_CORES = 32
_REASONS = {
    JobState.TIMEOUT: "its time limit was reached",
    JobState.CANCELLED: "it was cancelled",
    JobState.NODE_FAIL: "a node failed",
    JobState.OUT_OF_MEMORY: "it had too little memory",
    JobState.PREEMPTED: "it was preempted",
}
# The files of one command, in a directory of its user.
_SCRIPT, _SECRETS, _OUTPUT, _MESSAGES, _EXIT_CODE = "script.sh", "secrets.env", "output", "messages", "exit-code"


@dataclass(frozen=True)
class JobShape:
    """What a command's job asks Slurm for.

    Attributes:
        nodes: it has; the command runs on the first of them.
        gpus: of each node, if the profile's nodes have any.
        time: its limit, as sbatch takes it; None: the partition's.
        nodelist: exactly these nodes, if given.
        whole_nodes: nobody else gets its nodes, and it continues if one of them fails.
    """

    nodes: int = 1
    gpus: int = 0
    time: str | None = None
    nodelist: str | None = None
    whole_nodes: bool = False


def run_as_job(
    argv: Sequence[str],
    *,
    workers_option: str | None = "--workers",
    shape: JobShape | None = None,
    cluster: str | None = None,
) -> int:
    """Submit `zslurm ARGV` as a job, follow it, and return its exit code. Ctrl-C cancels the job.

    `--slurm` in `argv` is left out. `workers_option`, for the number of threads, gets the job's cores where it is
    not given. `cluster` is the profile; default: the one that is used if none is named.

    Raises:
        ConfigError: there is no Slurm here, or no profile of a cluster.
        SlurmUnavailable, SlurmRefused: from Slurm.
        ZslurmError: the job ended without leaving an exit code.
    """
    client = SlurmClient()
    if not client.available():
        raise ConfigError("--slurm: there is no Slurm on this machine; leave --slurm out to run the command here")
    profile = cluster or default_name()
    if profile == LOCAL:
        raise ConfigError("--slurm: the profile `local` is this machine; name a cluster's in $ZSLURM_CLUSTER")
    spec = sample_run(profile, local=False).spec
    words = [word for word in argv if word != "--slurm"]
    cores = min(spec.cluster.cpus_per_node or 1, _MOST_CORES)
    if workers_option is not None and not any(word.startswith(workers_option) for word in words):
        words += [workers_option, str(cores)]
    folder = state_dir() / "tools" / f"{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
    try:
        folder.mkdir(parents=True, mode=0o700)
        write_secrets(folder / _SECRETS, split_secrets(job_environment(spec))[1])
        (folder / _SCRIPT).write_text(_script(spec, folder, words, cores, shape or JobShape()), encoding="utf-8")
    except OSError as error:
        raise ZslurmError(f"{folder}: cannot be written: {error.strerror}; set XDG_STATE_HOME") from error
    job_id = client.submit(folder / _SCRIPT)
    say(f"{shlex.join(['zslurm', *words])} runs as job {job_id}; Ctrl-C cancels it")
    try:
        code = _follow(client, folder, job_id)
    except KeyboardInterrupt:
        client.cancel(job_id)
        say(f"cancelled job {job_id}")
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return code


def _script(spec: RunSpec, folder: Path, words: Sequence[str], cores: int, shape: JobShape) -> str:
    slurm, plain = spec.slurm, [word for word in words[:2] if not word.startswith("-")]
    name = f"zslurm-{'-'.join(plain)}"
    options: list[tuple[str, str | bool | None]] = [
        ("job-name", name),
        ("nodes", str(shape.nodes)),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", str(cores)),
        spec.cluster.gpu_flag(spec.cluster.gpu_request_of(shape.gpus)),
        ("time", shape.time),
        ("nodelist", shape.nodelist),
        ("reservation", slurm.flags.get("reservation")),
        *((("exclusive", True), ("mem", "0"), ("no-kill", True)) if shape.whole_nodes else ()),
        *((option.name, getattr(slurm, option.key)) for option in carried_by("command")),
        ("output", str(folder / _OUTPUT)),
        ("error", str(folder / _MESSAGES)),
        ("no-requeue", True),
        ("export", slurm.export),
    ]
    template = find_template("_tool")
    return (
        TemplateEnvironment(template)
        .get_template(template.place)
        .render(
            environment_variables(spec, folder / _SECRETS),
            job_name=name,
            directives=[(flag, value) for flag, value in options if value is not None],
            code=None,
            command=shlex.join([job_python(spec), "-m", "zslurm", *words]),
            exit_file=str(folder / _EXIT_CODE),
        )
    )


def _follow(client: SlurmClient, folder: Path, job_id: str) -> int:
    """Pass the job's output on until it is over; returns its exit code.

    Raises:
        ZslurmError: it ended without one.
    """
    exit_code, state = folder / _EXIT_CODE, JobState.UNKNOWN
    streams = {folder / _OUTPUT: sys.stdout, folder / _MESSAGES: sys.stderr}
    read = dict.fromkeys(streams, 0)
    asked, waits = time.monotonic(), ""
    over = False
    while True:
        ended = over or exit_code.exists()
        for path, stream in streams.items():
            try:
                with path.open("rb") as file:
                    file.seek(read[path])
                    new = file.read()
            except FileNotFoundError:
                continue
            read[path] += len(new)
            stream.write(new.decode(errors="replace"))
            stream.flush()
        if ended:
            break
        if time.monotonic() - asked > ASK_SLURM_EVERY_S:
            asked = time.monotonic()
            with contextlib.suppress(SlurmUnavailable):  # the job goes on
                record = client.job(job_id)
                over = record is None or record.state.is_over
                state = JobState.UNKNOWN if record is None else record.state
                if record is not None and state.is_waiting and (why := record.reason or "no reason yet") != waits:
                    waits = why
                    say(f"job {job_id} waits in the queue ({why})")
        time.sleep(POLL_S)
    text = exit_code.read_text().strip() if exit_code.exists() else ""
    if not text.isdigit():
        reason = f" ({_REASONS[state]})" if state in _REASONS else ""
        raise ZslurmError(f"job {job_id} ended without a result{reason}; its output is in {folder}")
    return int(text)
