"""Submit a run again: which keys change, and when it is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools import Checkpoint, CheckpointError, Manifest, list_checkpoints
from zslurm.config.layers import show_path
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, RunActive, RunCompleted, ZslurmError
from zslurm.core.files import read_json
from zslurm.core.redact import redact_value
from zslurm.run.run_dir import RunDir
from zslurm.run.secrets import with_secrets
from zslurm.run.state.run_state import look
from zslurm.train.config import RESUMED_FROM, model_differences


def changed_keys(old: RunSpec, new: RunSpec) -> list[str]:
    """Return every key whose value differs, as `key: old -> new`."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))

    def shown(key: str, value: Any) -> str:
        return json.dumps(redact_value(key.rpartition(".")[2], value))

    return [
        f"{key}: {shown(key, before.get(key))} -> {shown(key, after.get(key))}"
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


def last_spec(run: RunDir) -> RunSpec:
    """Return the run as it was submitted last, its secrets included as far as they are still there."""
    old = load_spec(run.config)
    try:
        return with_secrets(old, run.secrets)
    except ConfigError:
        return old


def refuse_active(run: RunDir) -> None:
    """Raise RunActive while the run is being trained."""
    state = look(run)
    if state.active:
        raise RunActive(
            f"{run.name}: the run is {state.state} as job {state.job_id}; `zslurm cancel {run.name} --wait` "
            "first, or give the new run another name"
        )


def check_continues(run: RunDir, spec: RunSpec, tokenizer_sha256: str | None) -> list[str]:
    """Return what would change if `spec` were submitted to an existing run.

    Raises:
        ConfigError: it is of another model or tokenizer, or one of the two is another program.
    """
    old = last_spec(run)
    if (old.trainer is None) != (spec.trainer is None):
        kinds = ["zslurm's trainer" if run_spec.trainer is None else "trainer.command" for run_spec in (old, spec)]
        raise ConfigError(
            f"{run.path}: the run was started with {kinds[0]}, and this is {kinds[1]}; choose another run.name, "
            "or start over with --new"
        )
    if spec.trainer is not None:
        return changed_keys(old, spec)
    if model_differences(spec.model, old.model.model_dump(mode="json")):
        differing = [line for line in changed_keys(old, spec) if line.startswith("model.")]
        raise ConfigError(
            f"{run.path}: the run has another model ({'; '.join(differing)}); "
            "set the model back, choose another run.name, or start over with --new"
        )
    data = (read_json(run.code) or {}).get("tokenizer_sha256")
    if data is not None and data != tokenizer_sha256:
        raise ConfigError(
            f"{run.path}: the run was started with another tokenizer than {spec.data.path or 'data.sources'} has; "
            "set data.path back, choose another run.name, or start over with --new"
        )
    return changed_keys(old, spec)


def options_to_repeat(run: RunDir, spec: RunSpec) -> str:
    """Return the `--set` options that give `spec` the phases of the last submission; empty if none are enough."""
    before, after = last_spec(run).phases, spec.phases
    if len(before) != len(after):
        return ""
    options = []
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        values = old.model_dump(mode="json")
        differing = [key for key, value in new.model_dump(mode="json").items() if value != values[key]]
        options += [f"--set {shlex.quote(f'phases.{index}.{key}={json.dumps(values[key])}')}" for key in differing]
    return " ".join(options)


def refuse_completed(spec: RunSpec, run: RunDir) -> None:
    """Refuse to start a run whose checkpoint to resume from belongs to its last step.

    Raises:
        RunCompleted: nothing is left to train; the message names how to train further, or to start over.
        ZslurmError: the directory of checkpoints cannot be listed.
    """
    try:
        step, total = _resumes_at(spec, run), spec.total_steps
    except CheckpointError as error:
        raise ZslurmError(str(error)) from error
    if step is None or step < total:
        return
    last = len(spec.phases) - 1
    more = 2 * spec.phases[last].tokens
    raise RunCompleted(
        f"{run.name}: the run is complete: step {step} of {total} is saved, and there is nothing left to train; "
        f"give it more tokens to continue (now phases[{last}].tokens={spec.phases[last].tokens}; for example "
        f"`zslurm submit RUN_FILE --set phases.{last}.tokens={more}`), or start over with --new"
    )


def _resumes_at(spec: RunSpec, run: RunDir) -> int | None:
    """Return the step that the trainer would resume at; None if it would start from the beginning."""
    asked = spec.checkpoint.resume_from
    for listing in list_checkpoints(run.checkpoints):
        if listing.complete and (asked is None or _manifest(listing.path).cursor.get(RESUMED_FROM) == asked):
            return listing.step
    try:
        return _manifest(Path(asked)).step if asked is not None else None
    except CheckpointError:  # the trainer names what is wrong with it
        return None


def _manifest(path: Path) -> Manifest:
    with Checkpoint.open(path, check_files=False) as checkpoint:
        return checkpoint.manifest
