"""The nodes that a run's group excludes, as they are known when the run is submitted."""

from __future__ import annotations

import time
from pathlib import Path

from zslurm.checkpoint_tools.quantities import counted
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.run.events import NodesExcluded
from zslurm.run.events.event import select
from zslurm.run.events.event_text import node_names
from zslurm.run.exclusion_store import ExclusionStore, StoreContents
from zslurm.run.run_dir import RunDir
from zslurm.run.shared_exclusions import EXCLUSION_EVENTS, take_over
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.settings import read_settings
from zslurm.train.jsonl import read_jsonl


def exclusion_store(spec: RunSpec) -> ExclusionStore | None:
    """Return the store of a run's group on Slurm's cluster; None if the run shares nothing.

    Raises:
        SlurmUnavailable, SlurmRefused: Slurm does not give the name of its cluster.
    """
    if spec.cluster.exclusions is None or spec.cluster.launcher != "slurm":
        return None
    return ExclusionStore(Path(spec.cluster.exclusions), read_settings(SlurmClient().scontrol_config()).cluster)


def excluded_by_group(spec: RunSpec, run: RunDir, *, start_over: bool = False) -> set[str]:
    """Return the nodes that the group excludes and this run does not yet; none if the store cannot be read.

    With `start_over` nothing is known that an earlier run in the directory was allowed to use again.
    """
    contents = _read(spec)[0]
    rows = [] if start_over else [*read_jsonl(run.events), *read_jsonl(run.submissions)]
    news = take_over(select(rows, *EXCLUSION_EVENTS), contents.exclusions, run.path, time.time())
    return {node for event in news if isinstance(event, NodesExcluded) for node in node_names(event.nodes)}


def about_group(spec: RunSpec, run: RunDir) -> list[str]:
    """Return a line for the nodes that are left out because of other runs, and for each problem of the store."""
    problems = _read(spec)[1]
    if not (nodes := excluded_by_group(spec, run)):
        return problems
    count = counted(len(nodes), "node")
    return [f"{count} left out, which other runs of the group exclude: {compress(nodes)}", *problems]


def readmit_for_group(run: RunDir, nodes: str) -> list[str]:
    """Let every run of a run's group use nodes again; returns those that one of them had excluded.

    Raises:
        ConfigError: `nodes` is no hostlist, the run shares nothing, or the directory cannot be changed.
        SlurmUnavailable, SlurmRefused: Slurm does not give the name of its cluster.
    """
    spec, named = load_spec(run.config), expand(nodes)
    if (store := exclusion_store(spec)) is None:
        raise ConfigError(f"{run.name}: it shares no exclusions; cluster.exclusions is not set")
    try:
        return store.remove(named)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or store.directory}: {error.strerror or error}; ask its owner to remove it"
        ) from None


def _read(spec: RunSpec) -> tuple[StoreContents, list[str]]:
    """Return what the store of a run's group has, and its problems, a line each."""
    where = f"cluster.exclusions: {spec.cluster.exclusions}"
    try:
        if (store := exclusion_store(spec)) is None:
            return StoreContents(), []
        contents = store.read()
    except OSError as error:
        return StoreContents(), [f"{where}: {error.strerror or error}; no run of the group can share there"]
    except ZslurmError as error:
        return StoreContents(), [f"{where}: not used: {error}"]
    return contents, list(contents.problems)
