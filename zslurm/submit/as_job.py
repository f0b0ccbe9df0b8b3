"""Run a command of zslurm as a Slurm job and follow it: what `--slurm` does with heavy commands.

The job runs the same command line in the same directory. Its output comes back through files in the user's state
directory, which all nodes must share as they share the home; its exit code is the command's.
"""

from __future__ import annotations

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
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.run.index import state_dir
from zslurm.run.secrets import split_secrets, write_secrets
from zslurm.slurm.client import SlurmClient
from zslurm.submit.script.render import job_environment, job_python
from zslurm.submit.script.sample_run import sample_run
from zslurm.submit.script.templates import TemplateEnvironment, find_template

_POLL_S = 1.0
_ASK_SLURM_EVERY_S = 10.0
_MOST_CORES = 32


@dataclass(frozen=True)
class ToolDir:
    """Files of one command that runs as a job."""

    path: Path

    @property
    def script(self) -> Path:
        """The script of the job."""
        return self.path / "script.sh"

    @property
    def output(self) -> Path:
        """What the command prints."""
        return self.path / "output"

    @property
    def messages(self) -> Path:
        """What the command prints on stderr."""
        return self.path / "messages"

    @property
    def exit_code(self) -> Path:
        """The exit code of the command, once it has ended."""
        return self.path / "exit-code"

    @property
    def secrets(self) -> Path:
        """The secret variables of the job, for its owner alone."""
        return self.path / "secrets.env"


def run_as_job(argv: Sequence[str], *, workers_option: str | None = "--workers") -> int:
    """Submit `zslurm ARGV` as a job of one node, follow it, and return its exit code. Ctrl-C cancels the job.

    Args:
        argv: the command line without the program's name; `--slurm` in it is left out.
        workers_option: option for the number of threads, which gets the job's cores where it is not given.

    Raises:
        ConfigError: there is no Slurm here, or no profile of a cluster.
        SlurmUnavailable, SlurmRefused: from Slurm.
        ZslurmError: the job ended without leaving an exit code.
    """
    client = SlurmClient()
    if not client.available():
        raise ConfigError("--slurm: there is no Slurm on this machine; leave --slurm out to run the command here")
    profile = default_name()
    if profile == LOCAL:
        raise ConfigError("--slurm: the profile `local` is this machine; name a cluster's in $ZSLURM_CLUSTER")
    spec = sample_run(profile, local=False).spec
    words = [word for word in argv if word != "--slurm"]
    cores = min(spec.cluster.cpus_per_node or 1, _MOST_CORES)
    if workers_option is not None and not any(word.startswith(workers_option) for word in words):
        words += [workers_option, str(cores)]
    name = f"zslurm-{'-'.join(words[:2])}"
    files = ToolDir(state_dir() / "tools" / f"{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns() % 10**6:06d}")
    try:
        files.path.mkdir(parents=True, mode=0o700)
        write_secrets(files.secrets, split_secrets(job_environment(spec))[1])
        files.script.write_text(_script(spec, files, words, name, cores), encoding="utf-8")
    except OSError as error:
        raise ZslurmError(f"{files.path}: cannot be written: {error.strerror}; set XDG_STATE_HOME") from error
    job_id = client.submit(files.script)
    say(f"{shlex.join(['zslurm', *words])} runs as job {job_id}; Ctrl-C cancels it")
    try:
        code = _follow(client, files, job_id)
    except KeyboardInterrupt:
        client.cancel(job_id)
        say(f"cancelled job {job_id}")
        raise
    shutil.rmtree(files.path, ignore_errors=True)
    return code


def _script(spec: RunSpec, files: ToolDir, words: Sequence[str], name: str, cores: int) -> str:
    slurm = spec.slurm
    options: list[tuple[str, str | bool | None]] = [
        ("job-name", name),
        ("nodes", "1"),
        ("ntasks", "1"),
        ("cpus-per-task", str(cores)),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("exclude", slurm.exclude),
        ("output", str(files.output)),
        ("error", str(files.messages)),
        ("no-requeue", True),
        ("export", slurm.export),
    ]
    env, secrets = split_secrets(job_environment(spec))
    template = find_template("_tool")
    return (
        TemplateEnvironment(template)
        .get_template(template.place)
        .render(
            job_name=name,
            directives=[(flag, value) for flag, value in options if value is not None],
            modules=spec.cluster.modules,
            env=env,
            secrets=list(secrets),
            secrets_file=str(files.secrets),
            setup=spec.cluster.setup,
            venv=spec.cluster.venv,
            code=None,
            command=shlex.join([job_python(spec), "-m", "zslurm", *words]),
            exit_file=str(files.exit_code),
            spec=spec,
        )
    )


def _follow(client: SlurmClient, files: ToolDir, job_id: str) -> int:
    """Pass the job's output on until it is over; returns its exit code.

    Raises:
        ZslurmError: it ended without one.
    """
    read = {files.output: 0, files.messages: 0}
    streams = {files.output: sys.stdout, files.messages: sys.stderr}
    asked = time.monotonic()
    over = False
    while True:
        ended = over or files.exit_code.exists()
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
        if time.monotonic() - asked > _ASK_SLURM_EVERY_S:
            asked = time.monotonic()
            record = client.job(job_id)
            over = record is None or record.state.is_over
        time.sleep(_POLL_S)
    text = files.exit_code.read_text().strip() if files.exit_code.exists() else ""
    if not text.isdigit():
        raise ZslurmError(f"job {job_id} ended without a result; its output is in {files.path}")
    return int(text)
