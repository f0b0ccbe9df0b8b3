"""Secrets of a run: they reach the job through one file that only its owner can read, and nothing else.

`cluster.env` may hold tokens and passwords. Slurm keeps every script, others may be let into the run directory,
and a dry run is pasted into tickets: so a secret is in RUN_DIR/secrets.env (0600), which the script reads,
and config.json has a placeholder in its place. In any other key a secret is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zslurm.config.layers import show_path
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.core.redact import REDACTED, redact_value, shape_of_secret


def split_secrets(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that a script may show, and those that it may not."""
    secret = {name: value for name, value in environment.items() if redact_value(name, value) != value}
    return {name: value for name, value in environment.items() if name not in secret}, secret


def secrets_of(spec: RunSpec) -> dict[str, str]:
    """Return the secrets that a run gives its job."""
    return split_secrets({name: value for name, value in spec.cluster.env.items() if value is not None})[1]


def without_secrets(spec: RunSpec) -> RunSpec:
    """Return the run as it may be written down: each secret replaced by a placeholder."""
    return _with_env(spec, dict.fromkeys(secrets_of(spec), REDACTED))


def with_secrets(spec: RunSpec, file: Path) -> RunSpec:
    """Return the run with the secrets that `without_secrets` took out, read back from RUN_DIR/secrets.env.

    Raises:
        ConfigError: one is not there any more.
    """
    hidden = [name for name, value in spec.cluster.env.items() if value == REDACTED]
    if not hidden:
        return spec
    secrets = read_secrets(file)
    if missing := [name for name in hidden if name not in secrets]:
        raise ConfigError(
            f"{file}: the value of {', '.join(missing)} is not there any more; "
            "submit the run again from its run file"
        )
    return _with_env(spec, {name: secrets[name] for name in hidden})


def _with_env(spec: RunSpec, values: Mapping[str, str]) -> RunSpec:
    if not values:
        return spec
    cluster = spec.cluster.model_copy(update={"env": {**spec.cluster.env, **values}})
    return spec.model_copy(update={"cluster": cluster})


def write_secrets(file: Path, secrets: Mapping[str, str]) -> None:
    """Write the file, closed to everybody else from its first byte; remove it if there are none.

    Raises:
        ZslurmError: the file system refused.
    """
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items())
    try:
        if not secrets:
            file.unlink(missing_ok=True)
            return
        write_atomically(file, text, private=True)
    except OSError as error:
        raise ZslurmError(f"{file}: cannot be written: {error.strerror}") from error


def read_secrets(file: Path) -> dict[str, str]:
    """Return the secrets of a run; none if there is no file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    words = [shlex.split(line)[1] for line in lines if line.startswith("export ")]
    return dict(word.split("=", 1) for word in words)


def refuse_misplaced_secrets(spec: RunSpec) -> None:
    """Raise ConfigError if another key than cluster.env holds what looks like a secret."""
    for path, text in _texts(spec.model_dump(mode="json"), ()):
        if path[:2] == ("cluster", "env"):
            continue
        what = shape_of_secret(text)
        if what is None and path[:2] == ("cluster", "setup") and redact_value("", text) != text:
            what = "a secret, by the name of the variable"
        if what is not None:
            raise ConfigError(
                f"{show_path(path)}: holds {what}, and would be written into scripts and Slurm's records; "
                "put it into cluster.env, which keeps it out of them, or let the job read a file"
            )


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield every text in a dump, with its key path."""
    if isinstance(value, str):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _texts(item, (*path, key))
