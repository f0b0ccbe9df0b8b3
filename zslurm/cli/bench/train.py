"""`zslurm bench train`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from zslurm.cli.bench.options import Minutes, Nodelist, Nodes, Out, Plot, Quick, Ranks
from zslurm.cli.bench.run import Common, run_benchmark
from zslurm.cli.bench.run_file import run_named
from zslurm.cli.options import Cluster, Json, Set
from zslurm.core.errors import ConfigError
from zslurm.submit.size import most_sequences

_SECTIONS = {"model", "optim", "parallel", "metrics"}


def train(
    run: Annotated[str, Option(metavar="RUN", help="A run file or a recipe.")],
    cluster: Cluster = None,
    nodes: Nodes = None,
    nodelist: Nodelist = None,
    ranks: Ranks = None,
    phase: Annotated[
        list[str] | None, Option(metavar="NAME", help="A phase of the run (repeatable); default: its first.")
    ] = None,
    steps: Annotated[int, Option(metavar="N", min=1, max=10_000, help="Steps that are measured.")] = 20,
    microbatches: Annotated[
        int, Option(metavar="N", min=1, max=10_000, help="Microbatches of a rank in a step, at most.")
    ] = 4,
    overrides: Set = None,
    quick: Quick = False,
    minutes: Minutes = None,
    out: Out = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Measure a run's training step with its parts, on synthetic tokens.

    Example: zslurm bench train --run zaya1-1b --ranks 8
    """
    spec = run_named(run, cluster=cluster, overrides=overrides or [])
    known = [each.name for each in spec.phases]
    if unknown := [name for name in phase or [] if name not in known]:
        raise ConfigError(f"--phase {unknown[0]}: the run's phases are {', '.join(known)}")
    wanted = [each for each in spec.phases if each.name in (phase or known[:1])]
    has = {each.name: -(-most_sequences(spec, each) // each.micro_batch) for each in wanted}
    run_benchmark(
        "train",
        {
            "run": run,
            "sections": spec.model_dump(mode="json", include=_SECTIONS),
            "phases": [each.model_dump(mode="json") for each in wanted],
            "steps": min(steps, 5) if quick else steps,
            "microbatches": {name: min(count, microbatches) for name, count in has.items()},
        },
        Common(cluster, nodes, nodelist, ranks, minutes, out, plot, json),
    )
