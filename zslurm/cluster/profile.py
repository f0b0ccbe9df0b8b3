"""Cluster profiles: YAML files with the sections `cluster` and `slurm`, laid under every run file.

They are in ~/.config/zslurm/clusters/NAME.yaml ($XDG_CONFIG_HOME is honoured), for everybody in
/etc/zslurm/clusters, and in this package: those that ship describe kinds of machines, for others to extend with
`cluster: {extends: NAME}`. A profile hides profiles of its name that are further out, and may extend them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from zslurm.cluster.measurements import SUFFIX, Measurements, StoredValue, read_measurements
from zslurm.config import yaml12
from zslurm.core.errors import ConfigError, NoProfile, NotFound, ZslurmError
from zslurm.core.files import read_text, write_atomically
from zslurm.core.paths import LONGEST_NAME, home

LOCAL = "local"
LAYER = "cluster profile"
_OF_MEASUREMENTS = f"{LAYER}'s measurements of "
SITE_PROFILES = Path("/etc/zslurm/clusters")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Place = Literal["user", "site", "shipped"]


@dataclass(frozen=True)
class Profile:
    """A profile and its location.

    Attributes:
        path: its file; None for one that ships with zslurm.
    """

    name: str
    place: Place
    path: Path | None

    @property
    def file(self) -> str:
        """What messages and origins call it."""
        return f"{LAYER} {self.name}" if self.path is None else str(self.path)

    def read(self) -> str:
        """Its text.

        Raises:
            ConfigError: it cannot be read, or is not UTF-8.
        """
        if self.path is None:
            return str(_shipped_folder().joinpath(f"{self.name}.yaml").read_text(encoding="utf-8"))
        try:
            return self.path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}: not a text file in UTF-8") from error
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error


def config_dir() -> Path:
    """Return the directory of this user's zslurm configuration."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else home() / ".config") / "zslurm"


def _shipped_folder() -> Any:
    return resources.files("zslurm").joinpath("cluster").joinpath("profiles")


def profiles() -> list[Profile]:
    """Return every profile: the user's own, the site's, those that ship.

    Hidden ones too, after those that hide them.
    """
    available: list[Profile] = []
    folders: tuple[tuple[Place, Path], ...] = (("user", config_dir() / "clusters"), ("site", SITE_PROFILES))
    for directory_kind, folder in folders:
        available += [Profile(path.stem, directory_kind, path) for path in sorted(folder.glob("*.yaml"))]
    names = sorted(entry.name for entry in _shipped_folder().iterdir() if entry.name.endswith(".yaml"))
    return available + [Profile(name.removesuffix(".yaml"), "shipped", None) for name in names]


def profile_files() -> dict[str, Path]:
    """Return the profiles of the user and the site, by name; a user's hides the site's of the same name."""
    paths: dict[str, Path] = {}
    for profile in profiles():
        if profile.path is not None:
            paths.setdefault(profile.name, profile.path)
    return paths


def profile_path(name: str) -> Path:
    """Return the path of this user's profile `name`, which may not exist.

    Raises:
        ConfigError: not a name for a file.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: a profile's name is letters, digits, '.', '_' and '-'")
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name[:20]}...: a profile's name has at most {LONGEST_NAME} characters, not {len(name)}"
        )
    return config_dir() / "clusters" / f"{name}.yaml"


def measured_path(name: str) -> Path:
    """Return the path of this user's measurements for the profile `name`, which may not exist.

    Raises:
        ConfigError: not a name for a file.
    """
    return profile_path(name).with_name(f"{name}{SUFFIX}")


def measurements_of(name: str) -> list[tuple[Path, Measurements]]:
    """Return what was measured with the profile `name`: this user's own, then the site's.

    Raises:
        ConfigError: see `read_measurements`.
    """
    paths = [folder / f"{name}{SUFFIX}" for folder in (config_dir() / "clusters", SITE_PROFILES)]
    return [(path, stored) for path in paths if (stored := read_measurements(path, name)) is not None]


def measured_values(name: str) -> dict[str, StoredValue]:
    """Return the values that were measured with the profile `name`; a user's own win over the site's.

    Raises:
        ConfigError: see `read_measurements`.
    """
    merged = Measurements(profile=name)
    for _, stored in reversed(measurements_of(name)):
        merged = merged.with_values(stored.values)
    return merged.values


def is_measurement(file: str) -> bool:
    """Return whether the origin of a value, as messages call its file, is a measurement."""
    return file.startswith(_OF_MEASUREMENTS)


def default_name() -> str:
    """Return the profile that is used if none is named: $ZSLURM_CLUSTER, the one chosen by init, or the only one.

    Raises:
        NoProfile: there is none.
        ConfigError: there are several and none is the default.
    """
    chosen = os.environ.get("ZSLURM_CLUSTER") or read_text(config_dir() / "default-cluster")
    if chosen:
        return chosen
    files = profile_files()
    if len(files) == 1:
        return next(iter(files))
    if files:
        raise ConfigError(f"several cluster profiles ({', '.join(files)}) and no default; name one with --cluster")
    raise NoProfile(
        "no cluster profile yet: run `zslurm init` on a login node, or train on this machine with --cluster local"
    )


def find_profile(name: str, *, below: Profile | None = None) -> Profile:
    """Return the profile that `name` means: the user's own, else the site's, else the one that ships.

    With `below` only the profiles that this one hides count.

    Raises:
        NotFound: there is none; the nearest name is suggested.
    """
    available = profiles()
    # One that is only about to be written is not among them yet: it will hide all of its name.
    start = available.index(below) + 1 if below in available else 0
    for profile in available[start:]:
        if profile.name == name:
            return profile
    names = list(dict.fromkeys(profile.name for profile in available))
    near = [] if below is not None else difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"profiles: {', '.join(names)}"
    raise NotFound(f"{name}: no cluster profile has this name; {hint}; `zslurm init` makes one")


def profile_layers(name: str) -> list[tuple[yaml12.YamlDocument, str]]:
    """Return a profile, what was measured below it, and all that it extends; each with the name for messages.

    Raises:
        NotFound: there is no profile of this name; the nearest is suggested.
        ConfigError: one of them is not valid YAML, its section `cluster` is none, or it extends what is not there
            or itself; or the measurements cannot be used.
    """
    top = find_profile(name)
    return layers_of(top, top.read())


def layers_of(top: Profile, text: str) -> list[tuple[yaml12.YamlDocument, str]]:
    """As `profile_layers`, for a profile whose text is not, or not yet, in its file.

    Raises:
        ConfigError: see `profile_layers`.
    """
    stack: list[tuple[yaml12.YamlDocument, str]] = []
    seen = [top]
    while True:
        profile = seen[-1]
        document = yaml12.parse(profile.read() if stack else text, profile.file)
        section, extends = _open_section(document, profile.file)
        stack.insert(0, (yaml12.YamlDocument(section, document.lines), profile.file))
        if extends is None:
            break
        location = f"{profile.file}:{document.lines[('cluster', 'extends')]}: cluster.extends"
        base = _base(extends, profile, location)
        if base in seen:
            chain = " -> ".join([*(profile.name for profile in seen), base.name])
            raise ConfigError(f"{location}: profiles extend each other in a circle: {chain}")
        seen.append(base)
    _fill_in(top.name, [document.data for document, _ in stack])
    own = [document.data.get("cluster", {}) for document, _ in stack if isinstance(document.data, dict)]
    cards = [section[key] for key in ("gpu_type", "gpu_family") for section in own if section.get(key)]
    measured = Measurements(profile=top.name, values=measured_values(top.name))
    paths = ", ".join(str(path) for path, _ in measurements_of(top.name))
    stack[-1:-1] = [
        (document, f"{_OF_MEASUREMENTS}{day}, {paths}")
        for document, day in measured.documents(str(cards[-1]) if cards else None)
    ]
    return stack


def _open_section(document: yaml12.YamlDocument, file: str) -> tuple[Any, Any]:
    """Return a profile's data with a section `cluster` in it, and what that section extends."""
    data: Any = {} if document.data is None else document.data
    if not isinstance(data, dict):
        return data, None  # refused with the other layers
    if "extends" in data:
        location = f"{file}:{document.lines[('extends',)]}"
        raise ConfigError(
            f"{location}: extends: in a profile it belongs into the section cluster: `cluster: {{extends: NAME}}`"
        )
    section = data["cluster"] = {} if data.get("cluster") is None else data["cluster"]
    if not isinstance(section, dict):
        location = f"{file}:{document.lines[('cluster',)]}"
        raise ConfigError(f"{location}: cluster: expected a mapping of keys to values, got {section!r}")
    if "measured" in section:
        location = f"{file}:{document.lines[('cluster', 'measured')]}"
        raise ConfigError(
            f"{location}: cluster.measured: measurements are not part of a profile: remove the section, and let "
            "`zslurm bench apply` write them next to it"
        )
    return data, section.pop("extends", None)


def _base(extends: Any, heir: Profile, place: str) -> Profile:
    if not isinstance(extends, str):
        raise ConfigError(f"{place}: expected the name of a cluster profile, got {json.dumps(extends)}")
    try:
        return find_profile(extends, below=heir if extends == heir.name else None)
    except NotFound as error:
        if extends == heir.name:
            raise ConfigError(f"{place}: this is the profile itself; no other is called `{extends}`") from None
        raise ConfigError(f"{place}: {str(error).removesuffix('; `zslurm init` makes one')}") from None


def _fill_in(name: str, stack: list[Any]) -> None:
    """Set name and launcher: the file's name, and slurm, unless the profile states otherwise."""
    top = stack[-1]
    if isinstance(top, dict):
        top["cluster"].setdefault("name", name)
        if not any("launcher" in data["cluster"] for data in stack if isinstance(data, dict)):
            top["cluster"]["launcher"] = "slurm"


def save_profile(name: str, text: str, *, make_default: bool) -> Path:
    """Write a profile of this user's.

    Raises:
        ZslurmError: the configuration directory cannot be written.
    """
    path = profile_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise ZslurmError(f"{path}: cannot be written: {error.strerror}") from error
    if make_default:
        set_default(name)
    return path


def keep_before(path: Path, text: str) -> Path | None:
    """Copy a profile that is about to change; returns the path of the copy, or None if nothing would be lost.

    Raises:
        ZslurmError: it cannot be read, or not be written.
    """
    kept = path.with_name(f"{path.name}~")
    try:
        if not path.exists() or path.read_bytes() == text.encode():
            return None
        kept.write_bytes(path.read_bytes())
    except OSError as error:
        raise ZslurmError(f"{error.filename or path}: {error.strerror}") from error
    return kept


def set_default(name: str) -> None:
    """Make a profile the one that is used when none is named.

    Raises:
        NotFound: there is no such profile.
        ZslurmError: the configuration directory cannot be written.
    """
    find_profile(name)
    path = config_dir() / "default-cluster"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, name + "\n")
    except OSError as error:
        raise ZslurmError(f"{path}: cannot be written: {error.strerror}") from error
