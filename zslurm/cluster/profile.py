"""Cluster profiles: YAML files with the sections `cluster` and `slurm`, laid under every run file.

They lie in ~/.config/zslurm/clusters/NAME.yaml ($XDG_CONFIG_HOME is honoured), or for everybody in
/etc/zslurm/clusters. The profile `local`, this machine without Slurm, needs no file.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from zslurm.config import yaml12
from zslurm.errors import ConfigError, NotFound, SlurmUnavailable, ZslurmError
from zslurm.launch.run_dir import write_atomically

LOCAL = "local"
SITE_PROFILES = Path("/etc/zslurm/clusters")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def config_dir() -> Path:
    """Where this user's zslurm configuration lies."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "zslurm"


def profile_files() -> dict[str, Path]:
    """Every profile that has a file, by name; a user's own hides the site's of the same name."""
    found: dict[str, Path] = {}
    for folder in (config_dir() / "clusters", SITE_PROFILES):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def profile_path(name: str) -> Path:
    """Where this user's profile `name` lies or would lie.

    Raises:
        ConfigError: not a name for a file.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: a profile's name is letters, digits, '.', '_' and '-'")
    return config_dir() / "clusters" / f"{name}.yaml"


def default_name() -> str:
    """The profile that is used when none is named: $ZSLURM_CLUSTER, the one chosen by init, or the only one.

    Raises:
        ConfigError: there are several and none is the default.
        SlurmUnavailable: there is none, nor is there a Slurm to make one from.
    """
    chosen = os.environ.get("ZSLURM_CLUSTER")
    if chosen:
        return chosen
    try:
        chosen = (config_dir() / "default-cluster").read_text().strip()
    except OSError:
        chosen = ""
    if chosen:
        return chosen
    files = profile_files()
    if len(files) == 1:
        return next(iter(files))
    if files:
        raise ConfigError(f"several cluster profiles ({', '.join(files)}) and no default; name one with --cluster")
    raise SlurmUnavailable(
        "no cluster profile yet: run `zslurm init` on a login node, or train on this machine with --cluster local"
    )


def load_profile(name: str) -> tuple[yaml12.Document, str]:
    """The parsed profile `name`, and the file that error messages call it.

    Raises:
        NotFound: there is none; the nearest name is suggested.
        ConfigError: it is not valid YAML, or its section `cluster` is none.
    """
    files = profile_files()
    if name in files:
        document = yaml12.read(files[name])
        data = {} if document.data is None else document.data
        if isinstance(data, dict):
            section = data["cluster"] = {} if data.get("cluster") is None else data["cluster"]
            if not isinstance(section, dict):
                place = f"{files[name]}:{document.lines[('cluster',)]}"
                raise ConfigError(f"{place}: cluster: expected a mapping of keys to values, got {section!r}")
            section.setdefault("name", name)
            # A profile that is written down is a cluster's, unless it says otherwise.
            section.setdefault("launcher", "slurm")
        return yaml12.Document(data, document.lines), str(files[name])
    if name == LOCAL:
        return yaml12.parse(
            "cluster: {name: local, launcher: local}", "cluster profile local"
        ), "cluster profile local"
    near = difflib.get_close_matches(name, [*files, LOCAL], n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"profiles: {', '.join([*files, LOCAL])}"
    raise NotFound(f"{name}: no cluster profile has this name; {hint}; `zslurm init` makes one")


def save_profile(name: str, text: str, *, make_default: bool) -> Path:
    """Write a profile of this user's.

    Raises:
        ZslurmError: the configuration directory cannot be written.
    """
    path = profile_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        if make_default:
            write_atomically(config_dir() / "default-cluster", name + "\n")
    except OSError as error:
        raise ZslurmError(f"{path}: cannot be written: {error.strerror}") from error
    return path
