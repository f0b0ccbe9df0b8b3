"""`zslurm config show|schema|recipes`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Cluster, Json, RunFile, Set

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
    from zslurm.config.layers import show_path
    from zslurm.core.console import print_json, print_table
    from zslurm.core.redact import redact_mapping, redact_value
    from zslurm.core.units import show_value
    from zslurm.submit.resolve import resolve_run

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
    from zslurm.config.schema import run_file_schema
    from zslurm.core.console import print_json

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
    from zslurm.report.recipes import list_recipes, show_recipe

    if name is None:
        list_recipes(as_json=json)
    else:
        show_recipe(name, as_json=json)
