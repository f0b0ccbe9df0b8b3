"""`zslurm rails`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from zslurm.cli.options import Cluster, Json

if TYPE_CHECKING:
    from zslurm.cluster.rails.read_nodes import RailSurvey
    from zslurm.cluster.site import Site


def rails(
    cluster: Cluster = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, help="Ask so many nodes of Slurm's choice.")
    ] = None,
    nodelist: Annotated[
        str | None, typer.Option("--nodelist", metavar="HOSTLIST", help="Ask exactly these nodes.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Look at this machine, without Slurm.")] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="Wait no longer for nodes, the queue included."),
    ] = 300,
    json: Json = False,
) -> None:
    """Draw which GPU sends through which NIC, and say where the rails are incomplete or differ.

    A short job on one node, unless --nodes or --nodelist name more. Exit code 5 where a rail is incomplete or a
    node does not answer.

    Example: zslurm rails --nodes 4
    """
    from zslurm.cluster.site import load_site
    from zslurm.core.console import print_json, print_styled
    from zslurm.core.errors import CheckFailed, ConfigError
    from zslurm.report.rails import as_json, draw
    from zslurm.slurm.hostlist import compress, expand

    if sum((nodes is not None, nodelist is not None, here)) > 1:
        raise ConfigError("--nodes, --nodelist and --here exclude each other")
    names = None if nodelist is None else expand(nodelist)
    if names == []:
        raise ConfigError("--nodelist: names no node")
    site = load_site(cluster)
    if here or site.cluster.launcher == "local":
        found = _here(site)
    else:
        found = _on_nodes(site, nodes or 1, names or (), timeout)
    if json:
        print_json(as_json(found))
    else:
        print_styled(draw(found))
    if faulty := [*found.incomplete, *found.silent]:
        raise CheckFailed(f"rails are incomplete or unknown on {compress(faulty)}")


def _here(site: Site) -> RailSurvey:
    from zslurm.cluster.rails.read_nodes import judge_answers
    from zslurm.hardware.facts import read_facts, to_json
    from zslurm.slurm.run_on_nodes import NodeAnswer

    facts = read_facts()
    return judge_answers([NodeAnswer(facts.node, to_json(facts))], site.cluster)


def _on_nodes(site: Site, count: int, names: Sequence[str], timeout: float) -> RailSurvey:
    from zslurm.cluster.rails.read_nodes import survey_rails

    return survey_rails(
        site.cluster,
        nodes=names,
        count=count,
        options=[*site.submit_options(), "--time=5"],
        timeout_s=timeout,
    )
