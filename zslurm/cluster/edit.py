"""Edit a cluster profile on a copy; it replaces the profile only when it is valid. No text is ever lost."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from zslurm.checkpoint_tools.plain import reason_of
from zslurm.cluster.profile import Profile, config_dir, find_profile, profile_path
from zslurm.cluster.site import resolve_text
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.files import write_atomically

_LOG = logging.getLogger(__name__)


def edit_profile(name: str, editor: Callable[[Path], None]) -> Path | None:
    """Let a person edit the user's own profile `name`; if there is none yet, one that extends what it hides.

    A copy that was refused is kept, and the next call continues with it.

    Args:
        name: name of the profile.
        editor: edits a file, and returns when that is done.

    Returns:
        The profile's file; None if nothing was changed.

    Raises:
        NotFound: there is no such profile.
        ConfigError: the new text is not valid; the old one stays.
        ZslurmError: the editor failed, or another process changed the profile during the edit.
    """
    current = find_profile(name)
    profile = Profile(name, "user", profile_path(name))
    before = current.read() if current.place == "user" else None
    start = before if before is not None else f"cluster:\n  extends: {name}\n"
    copy = config_dir() / "editing" / f"{name}.yaml"
    target = profile_path(name)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():
            write_atomically(copy, start)
        elif copy.read_text(encoding="utf-8") != start:
            _LOG.info("continuing with the text that was not accepted the last time: %s", copy)
        editor(copy)
        text = copy.read_text(encoding="utf-8")
        if text == start:
            copy.unlink()
            return None
        _check(profile, text, copy)
        if (target.read_text(encoding="utf-8") if target.exists() else None) != before:
            raise ZslurmError(f"{target}: it was changed meanwhile; your text is kept in {copy}")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
        copy.unlink()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{copy}: not a text file in UTF-8; {target.name} is as it was") from error
    except OSError as error:
        raise ZslurmError(f"{error.filename or copy}: {error.strerror}") from error
    return target


def _check(profile: Profile, text: str, copy: Path) -> None:
    try:
        resolve_text(profile, text)
    except ConfigError as error:
        again = f"`zslurm cluster edit {profile.name}` continues there"
        raise ConfigError(f"{error}\nnothing was replaced; your text is kept in {copy}: {again}") from error


def run_editor(path: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Run $VISUAL, else $EDITOR, else vi.

    Raises:
        ZslurmError: it is not there, or ended with a code other than zero.
    """
    command = environ.get("VISUAL") or environ.get("EDITOR") or "vi"
    try:
        done = subprocess.run([*shlex.split(command), str(path)], check=False)
    except (OSError, ValueError) as error:
        raise ZslurmError(
            f"{command}: the editor cannot be run ({reason_of(error)}); set VISUAL or EDITOR"
        ) from error
    if done.returncode:
        raise ZslurmError(f"{command}: ended with {done.returncode}; nothing was replaced, your text is in {path}")
