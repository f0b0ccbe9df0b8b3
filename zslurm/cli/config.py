"""The shipped recipes: what a run file can extend."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.quantities import show_count
from zslurm.cli.options import Cluster, Json, RunFile, Set
from zslurm.config import yaml12
from zslurm.config.layers import show_path
from zslurm.config.load import recipes as all_recipes
from zslurm.config.load import resolve
from zslurm.config.schema import run_file_schema
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, print_table
from zslurm.core.errors import NotFound
from zslurm.core.redact import redact_mapping, redact_value
from zslurm.core.units import show_value
from zslurm.submit.resolve import resolve_run
from zslurm.train.shapes import parameter_counts

app = typer.Typer(help="Show a run's configuration, its schema, and the recipes.", no_args_is_help=True)


@app.command()
def show(
    run_file: RunFile,
    cluster: Cluster = None,
    overrides: Set = None,
    origin: Annotated[bool, typer.Option("--origin", help="Add where each value came from.")] = False,
    json: Json = False,
) -> None:
    """Print every value of a run as it would be submitted.

    Example: zslurm config show run.yaml --origin
    """
    resolved = resolve_run(run_file, cluster=cluster, overrides=overrides or [])
    rows = [(path, redact_value(str(path[-1]), value), source) for path, value, source in resolved.rows()]
    if json and origin:
        print_json({show_path(path): {"value": value, "origin": str(source)} for path, value, source in rows})
    elif json:
        print_json(redact_mapping(resolved.spec.model_dump(mode="json")))
    elif origin:
        print_table(
            ["key", "value", "origin"],
            [[show_path(path), show_value(value), str(source)] for path, value, source in rows],
        )
    else:
        for path, value, _ in rows:
            print(f"{show_path(path)} = {show_value(value)}")


@app.command()
def schema() -> None:
    """Print the JSON schema of run files, for editors.

    Example: zslurm config schema > zslurm.schema.json
    """
    print_json(run_file_schema())


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this recipe's file, comments and all.")
    ] = None,
    json: Json = False,
) -> None:
    """List the recipes that a run file can extend, with the sizes of their models.

    Example: zslurm config recipes zaya1-8b
    """
    if name is None:
        list_recipes(as_json=json)
    else:
        show_recipe(name, as_json=json)


def list_recipes(*, as_json: bool) -> None:
    """`zslurm config recipes`."""
    facts = sorted((_facts(name, _spec_of(name)) for name in all_recipes()), key=lambda fact: fact["parameters"])
    if as_json:
        print_json(facts)
        return
    print_table(
        "recipe parameters without-embedding active layers hidden experts contexts tokens".split(),
        [
            [
                fact["name"],
                *(show_count(fact[key]) for key in ("parameters", "without_embedding", "active")),
                *(str(fact[key]) for key in ("layers", "hidden_size", "experts")),
                ", ".join(map(str, fact["contexts"])),
                show_count(fact["tokens"]),
            ]
            for fact in facts
        ],
    )


def show_recipe(name: str, *, as_json: bool) -> None:
    """`zslurm config recipes NAME`.

    Raises:
        NotFound: there is no such recipe.
    """
    known = all_recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(known)}"
        raise NotFound(f"no recipe is called `{name}`; {hint}")
    if as_json:
        print_json(_facts(name, _spec_of(name)) | {"text": known[name]})
    else:
        sys.stdout.write(known[name])


def _spec_of(name: str) -> RunSpec:
    return resolve(Path("-"), document=yaml12.parse(f"extends: {name}\n", "recipe")).spec


def _facts(name: str, spec: RunSpec) -> dict[str, Any]:
    """Sizes in parameters; `active` is what one token passes through, without the embedding."""
    counts = parameter_counts(spec.model)
    return {
        "name": name,
        "parameters": counts.total,
        "without_embedding": counts.without_embedding,
        "active": counts.active,
        "layers": spec.model.layers,
        "hidden_size": spec.model.hidden_size,
        "experts": spec.model.experts,
        "vocab_size": spec.model.vocab_size,
        "contexts": [phase.context for phase in spec.phases],
        "tokens": sum(phase.tokens for phase in spec.phases),
    }
