"""`zslurm bench train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from zslurm.cli.bench.options import Measure
from zslurm.cli.bench.run import run_benchmark
from zslurm.cli.bench.run_file import run_named
from zslurm.cli.options import Set, command_of
from zslurm.core.errors import ConfigError
from zslurm.submit.size import most_sequences

_SECTIONS = {"model", "optim", "parallel", "metrics"}


@dataclass(frozen=True, kw_only=True)
class Train(Measure):
    """What `zslurm bench train` takes on its command line."""

    run: Annotated[str, Option(metavar="RUN", help="A run file or a recipe.")]
    phase: Annotated[
        list[str] | None, Option(metavar="NAME", help="A phase of the run (repeatable); default: its first.")
    ] = None
    steps: Annotated[int, Option(metavar="N", min=1, max=10_000, help="Steps that are measured.")] = 20
    microbatches: Annotated[
        int, Option(metavar="N", min=1, max=10_000, help="Microbatches of a rank in a step, at most.")
    ] = 4
    overrides: Set = None


def _train(given: Train) -> None:
    """Measure a run's training step with its parts, on synthetic tokens.

    Example: zslurm bench train --run zaya1-1b --ranks 8
    """
    spec = run_named(given.run, cluster=given.cluster, overrides=given.overrides or [])
    known = [each.name for each in spec.phases]
    if unknown := [name for name in given.phase or [] if name not in known]:
        raise ConfigError(f"--phase {unknown[0]}: the run's phases are {', '.join(known)}")
    wanted = [each for each in spec.phases if each.name in (given.phase or known[:1])]
    has = {each.name: -(-most_sequences(spec, each) // each.micro_batch) for each in wanted}
    run_benchmark(
        "train",
        {
            "run": given.run,
            "sections": spec.model_dump(mode="json", include=_SECTIONS),
            "phases": [each.model_dump(mode="json") for each in wanted],
            "steps": min(given.steps, 5) if given.quick else given.steps,
            "microbatches": {name: min(count, given.microbatches) for name, count in has.items()},
        },
        given,
    )


train = command_of(Train, _train)
