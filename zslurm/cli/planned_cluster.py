"""The cluster that a plan is made for: a plan needs no cluster of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zslurm.core.console import say
from zslurm.core.errors import NoProfile
from zslurm.submit.resolve import resolve_run

PUBLISHED = "mi300x-pollara"
"""The shipped profile of the cluster on which ZAYA1 was trained."""


def planned_cluster(run_file: Path, cluster: str | None, overrides: Sequence[str]) -> str | None:
    """Return the profile to plan for: the one that applies, or the published one if the user has none yet.

    Raises:
        ConfigError, NotFound: see `resolve_run`.
    """
    try:
        resolve_run(run_file, cluster=cluster, overrides=overrides)
    except NoProfile:
        say(f"note: planned for the profile {PUBLISHED}, as there is none of yours yet; --cluster names another")
        return PUBLISHED
    return cluster
