"""`zslurm env`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Cluster, Json, Set


def env(
    cluster: Cluster = None,
    overrides: Set = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each variable is set, who says so, and where it came from.")
    ] = False,
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="OTHER", help="Only what differs from another profile.")
    ] = None,
    lint: Annotated[
        bool,
        typer.Option("--lint", help="Judge the profile's variables and this shell's; exit code 5 on faults."),
    ] = False,
    json: Json = False,
) -> None:
    """Print the environment of RCCL or NCCL on a cluster, for `eval "$(zslurm env)"`.

    Example: zslurm env --cluster mi300x-pollara --explain
    """
    import os

    from zslurm.cluster.profile import default_name
    from zslurm.cluster.rccl.environment import environment, left_out
    from zslurm.cluster.resolved import resolve_profile
    from zslurm.report.env import show_difference, show_environment, show_lint

    name = cluster or default_name()
    resolved = resolve_profile(name, overrides or [])
    settings = environment(resolved.spec.cluster, resolved.origin_of_variable)
    if lint:
        show_lint(settings, os.environ, resolved.spec.cluster, as_json=json)
    elif diff is not None:
        other = resolve_profile(diff, overrides or [])
        others = environment(other.spec.cluster, other.origin_of_variable)
        show_difference(name, settings, diff, others, as_json=json)
    else:
        show_environment(settings, left_out(resolved.spec.cluster), explain=explain, as_json=json)
