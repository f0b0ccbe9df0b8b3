"""Configuration keys that have a new name: the old one is accepted for one version, with a line on stderr."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from zslurm.config.yaml12 import KeyPath
from zslurm.core.console import say
from zslurm.core.errors import ConfigError

RENAMED: Mapping[KeyPath, str] = {
    ("aegis", "silent_s"): "heartbeat_timeout_s",
    ("aegis", "deputy_s"): "standby_s",
}
"""The new names of keys, by section and old name."""


def present_path(path: KeyPath, place: str) -> KeyPath:
    """Return a key path with the present name of its key; report an old name, which is given at `place`."""
    new = RENAMED.get(path[:2])
    if new is None:
        return path
    report(place, f"{path[0]}.{path[1]}", f"{path[0]}.{new}")
    return (path[0], new, *path[2:])


def present_names(data: Mapping[str, Any], places: Mapping[KeyPath, str] | None = None) -> dict[str, Any]:
    """Return sections with the present names of their keys.

    Report old names at the `places` where they are given, by section and old name; without `places` report none.

    Raises:
        ConfigError: a key is given by both names.
    """
    found = dict(data)
    for path, new in RENAMED.items():
        section, old = str(path[0]), path[1]
        given = found.get(section)
        if not isinstance(given, dict) or old not in given:
            continue
        place = (places or {}).get(path, section)
        if new in given:
            raise ConfigError(
                f"{place}: {section}.{old} is the old name of {section}.{new}; give only the new one"
            )
        if places is not None:
            report(place, f"{section}.{old}", f"{section}.{new}")
        found[section] = {new if key == old else key: value for key, value in given.items()}
    return found


@functools.cache  # a run file may be read more than once
def report(place: str, old: str, new: str) -> None:
    """Report an old name, in one line for each place."""
    say(f"{place}: {old} is called {new} now; a later version will refuse the old name")
