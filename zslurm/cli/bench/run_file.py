"""The run whose shapes are measured: a run file, or a recipe by its name."""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zslurm.cluster.profile import LOCAL
from zslurm.config.load import recipes
from zslurm.config.spec import RunSpec
from zslurm.core.errors import NotFound
from zslurm.hardware.gpus import read_gpus
from zslurm.hardware.sysfs import sysroot
from zslurm.submit.resolve import resolve_run


def run_named(name: str, *, cluster: str | None, overrides: Sequence[str]) -> RunSpec:
    """Return a run: of a file, or a recipe's.

    Raises:
        NotFound: neither a file nor a recipe has this name, or there is no such profile.
        ConfigError: the run is not valid.
    """
    path = Path(name)
    if path.is_file():
        return resolve_run(path, cluster=cluster, overrides=overrides).spec
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(known)}"
        raise NotFound(f"--run {name}: no file and no recipe has this name; {hint}")
    cluster = cluster or LOCAL
    body: dict[str, object] = {"extends": name, "data": {"path": "tokens.h5"}}
    if cluster == LOCAL and read_gpus(sysroot()):
        body["parallel"] = {"device": "cuda"}
    with tempfile.TemporaryDirectory(prefix="zslurm-bench-") as folder:
        file = Path(folder, f"{name}.yaml")
        file.write_text(json.dumps(body))
        return resolve_run(file, cluster=cluster, overrides=overrides).spec
