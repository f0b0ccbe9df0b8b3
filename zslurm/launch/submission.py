"""Submit a run: check it, prepare or continue its directory, hand it to a launcher, and remember the job.

A run is its name under runs_dir. Submitting it again continues it from its last checkpoint; the keys that
changed are told; another model or tokenizer is refused; a run that is active is refused.
"""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config import model_fingerprint
from train.data.bundle import Corpus
from train.errors import DataError
from train.jsonl import JsonLinesWriter
from zslurm.config.layers import show_path
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.errors import ConfigError, RunActive, ZslurmError
from zslurm.launch import index
from zslurm.launch.code_version import code_version
from zslurm.launch.render import render
from zslurm.launch.run_dir import RunDir, read_json
from zslurm.launch.run_state import look
from zslurm.launch.submit_lock import submit_lock


@dataclass(frozen=True)
class Submission:
    """A submitted run."""

    job_id: str
    run: RunDir
    continued: bool
    changed: list[str]


def run_dir_of(spec: RunSpec) -> RunDir:
    """Where a run lives: its name under runs_dir."""
    return RunDir(Path(spec.run.runs_dir) / spec.run.name)


def check_data(spec: RunSpec) -> Corpus:
    """Open the run's data as the trainer will.

    Raises:
        ConfigError: there is none, it is damaged, or it does not fit the model.
    """
    if spec.data.path is None:
        raise ConfigError("data.path: required, but not given; make a token bundle with `zslurm data build`")
    try:
        corpus = Corpus.open(spec.data.path)
        corpus.check_fits(spec.model.vocab_size)
        for phase in spec.phases:
            corpus.sequences(phase.context)
    except DataError as error:
        raise ConfigError(f"data.path: {error}") from error
    return corpus


def changed_keys(old: RunSpec, new: RunSpec) -> list[str]:
    """Every key whose value differs, as `key: old -> new`."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return [
        f"{key}: {json.dumps(before.get(key))} -> {json.dumps(after.get(key))}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def _flat(value: Any, path: tuple[str | int, ...] = ()) -> dict[str, Any]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {show_path(path): value}
    return {key: leaf for name, item in items for key, leaf in _flat(item, (*path, name)).items()}


def check_continues(run: RunDir, spec: RunSpec, tokenizer_sha256: str) -> list[str]:
    """What would change if `spec` were submitted to an existing run.

    Raises:
        RunActive: it is being trained right now.
        ConfigError: it is of another model or tokenizer.
    """
    state = look(run)
    if state.active:
        raise RunActive(
            f"{run.name}: the run is {state.state} as job {state.job_id}; `zslurm cancel {run.name}` first, "
            "or give the new run another name"
        )
    old = load_spec(run.config)
    if model_fingerprint(old.model) != model_fingerprint(spec.model):
        differing = [line for line in changed_keys(old, spec) if line.startswith("model.")]
        raise ConfigError(
            f"{run.path}: the run has another model ({'; '.join(differing)}); "
            "set the model back, choose another run.name, or start over with --new"
        )
    data = (read_json(run.code) or {}).get("tokenizer_sha256")
    if data is not None and data != tokenizer_sha256:
        raise ConfigError(
            f"{run.path}: the run was started with another tokenizer than {spec.data.path} has; "
            "set data.path back, choose another run.name, or start over with --new"
        )
    return changed_keys(old, spec)


def _set_aside(run: RunDir) -> Path:
    """Move an existing run out of the way; nothing is deleted."""
    aside = run.path.with_name(f"{run.name}.{time.strftime('%Y%m%dT%H%M%S')}")
    try:
        run.path.rename(aside)
    except OSError as error:
        raise ZslurmError(f"{run.path}: cannot be moved aside: {error.strerror}") from error
    return aside


def submit(spec: RunSpec, *, new: bool = False) -> Submission:
    """Submit a resolved run.

    Args:
        spec: the run.
        new: start over; an existing run of the name is moved aside.

    Raises:
        ConfigError: the data, the template or the run directory is not usable, or it is another run's.
        RunActive: the run is active.
        SlurmUnavailable, SlurmRefused: from the launcher.
    """
    corpus = check_data(spec)
    tokenizer = corpus.header.tokenizer_sha256
    run = run_dir_of(spec)
    # A broken template and a missing Slurm are found before anything is written or moved.
    render(spec, run)
    launch = _launcher(spec)
    with submit_lock(run):
        changed: list[str] = []
        if run.submitted:
            if new:
                check_idle(run)
                _set_aside(run)
            else:
                changed = check_continues(run, spec, tokenizer)
        continued = run.submitted
        run.create(group_readable=spec.run.group_readable)
        with _restored_on_error(run):
            _write_files(run, spec, tokenizer)
            job_id, process = launch(spec, run)
        record_action(run, "submit", job_id, spec, changed=changed, **process)
        index.record(index.new_entry(job_id, run, spec.cluster.name, spec.cluster.launcher))
        return Submission(job_id, run, continued, changed)


def _write_files(run: RunDir, spec: RunSpec, tokenizer_sha256: str) -> None:
    """What the job and the next submission read."""
    body, diff = code_version(Path.cwd())
    run.write_text(run.code, json.dumps({**body, "tokenizer_sha256": tokenizer_sha256}, indent=1) + "\n")
    run.write_text(run.code_diff, diff)
    run.write_text(run.config, json.dumps(spec.model_dump(mode="json"), indent=1) + "\n")
    run.write_text(run.script, render(spec, run))


@contextmanager
def _restored_on_error(run: RunDir) -> Iterator[None]:
    """Put the files of the last accepted submission back where the launcher refuses this one."""
    files = (run.code, run.code_diff, run.config, run.script)
    before = {path: path.read_text(encoding="utf-8") for path in files if path.exists()}
    try:
        yield
    except ZslurmError:
        for path, text in before.items():
            run.write_text(path, text)
        raise


def _launcher(spec: RunSpec) -> Callable[[RunSpec, RunDir], tuple[str, dict[str, Any]]]:
    """What starts the run: returns a job id, and the process that holds a local run."""
    if spec.cluster.launcher == "slurm":
        from zslurm.launch.slurm_launcher import SlurmLauncher

        slurm = SlurmLauncher()
        return lambda spec, run: (slurm.submit(spec, run), {})
    from zslurm.launch.local_launcher import LocalLauncher

    return LocalLauncher().submit


def check_idle(run: RunDir) -> None:
    """Raises RunActive while the run is being trained."""
    state = look(run)
    if state.active:
        raise RunActive(f"{run.name}: the run is {state.state} as job {state.job_id}; `zslurm cancel` it first")


def record_action(run: RunDir, action: str, job_id: str, spec: RunSpec, **fields: Any) -> None:
    """Append to submissions.jsonl.

    Raises:
        ZslurmError: the file cannot be written.
    """
    try:
        with JsonLinesWriter(run.submissions) as lines:
            lines.append(
                {
                    "time": time.time(),
                    "action": action,
                    "job_id": job_id,
                    "launcher": spec.cluster.launcher,
                    "cluster": spec.cluster.name,
                    "user": getpass.getuser(),
                    **fields,
                }
            )
    except OSError as error:
        raise ZslurmError(f"{run.submissions}: cannot be written: {error.strerror}") from error
