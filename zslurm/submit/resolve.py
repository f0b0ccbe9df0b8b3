"""From a run file and options to a resolved run, over the cluster profile that applies."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zslurm.cluster.profile import default_name, profile_layers
from zslurm.config import yaml12
from zslurm.config.layers import Override
from zslurm.config.load import Resolved, recipes, resolve
from zslurm.core.errors import ConfigError, NotFound


def _named_in(document: yaml12.YamlDocument) -> str | None:
    """cluster.name of the run file itself, if it gives one."""
    data: Any = document.data
    section = data.get("cluster") if isinstance(data, dict) else None
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else None


def _named_by(overrides: Sequence[Override]) -> str | None:
    """Return cluster.name as the last `--set cluster.name=NAME` gives it."""
    names = [str(override.value) for override in overrides if override.path == ("cluster", "name")]
    if names and not names[-1].isprintable():
        raise ConfigError(f"--set cluster.name: cannot hold control characters: {names[-1]!a}")
    return names[-1] if names else None


def _is_recipe(run_file: Path) -> bool:
    """Return whether a word means a shipped recipe, and no file."""
    return str(run_file) in recipes() and not run_file.is_file()


def _name_of(program: Sequence[str]) -> str:
    """Return a name for a run: the name of its first Python script, else of its program."""
    script = next((word for word in program if word.endswith(".py")), program[0])
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-._")
    return name or "run"


def resolve_run(
    run_file: Path | None,
    *,
    cluster: str | None = None,
    overrides: Sequence[Override] = (),
    program: Sequence[str] = (),
    document: yaml12.YamlDocument | None = None,
) -> Resolved:
    """Resolve a run file over the profile `cluster`, else the one that it or --set names, else the default.

    Args:
        run_file: the run file, or the name of a recipe if there is no file of that name; None: there is none, the
            run is a program and has its name.
        cluster: name of the profile.
        overrides: values that win over the files.
        program: a command that trains in the place of zslurm's own trainer; it wins over the run file's.
        document: what the run file would hold, if there is no file.

    Raises:
        ConfigError: anything in the files or overrides is wrong; or no profile was named, and there is none.
        NotFound: the run file or the profile does not exist.
    """
    if program:
        unnamed = run_file is None and document is None
        named = [Override.of("run.name", _name_of(program))] if unnamed else []
        overrides = [*named, Override.of("trainer.command", list(program)), *overrides]
    file = run_file or (yaml12.STDIN if document is None else Path("run"))
    if document is None and run_file is not None and _is_recipe(run_file):
        document = yaml12.parse(f"extends: {run_file}\nrun: {{name: {run_file}}}\n", f"recipe {run_file}")
    if run_file is not None and document is None and run_file != yaml12.STDIN and not run_file.exists():
        files = {str(file): "" for file in run_file.parent.glob("*.y*ml")}
        candidates = dict.fromkeys(recipes(), "the recipe ") | files
        near = difflib.get_close_matches(str(run_file), candidates, n=1)
        raise NotFound(
            f"{run_file}: no such file"
            + "".join(f"; did you mean {candidates[candidate]}{candidate}?" for candidate in near)
        )
    if document is None:
        document = yaml12.read(run_file) if run_file is not None else yaml12.YamlDocument({}, {})
    name = cluster or _named_by(overrides) or _named_in(document) or default_name()
    if cluster is not None:
        # The option wins over a run file that names another profile.
        overrides = [*overrides, Override.of("cluster.name", name)]
    return resolve(
        file,
        document=document,
        profile=profile_layers(name),
        overrides=overrides,
    )
