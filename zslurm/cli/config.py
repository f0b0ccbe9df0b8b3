"""`zslurm config`: a run's configuration, its schema, the recipes that a run file can extend, and templates."""

from __future__ import annotations

import difflib
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.quantities import show_count
from zslurm.cli import template
from zslurm.cli.options import Cluster, Json, RunFile, Set, complete_recipes
from zslurm.cli.terminal.table import Column, print_table
from zslurm.cli.values import print_values, without_secrets
from zslurm.config import load, yaml12
from zslurm.config.layers import Origin
from zslurm.config.spec import OWN_SECTIONS, RunSpec
from zslurm.config.yaml12 import KeyPath
from zslurm.core.console import print_json
from zslurm.core.errors import ConfigError, NotFound
from zslurm.core.redact import redact_mapping
from zslurm.core.units import show_value
from zslurm.submit.resolve import resolve_run
from zslurm.train.shapes import parameter_counts

app = typer.Typer(help="A run's configuration, recipes, and templates of job scripts.", no_args_is_help=True)
app.add_typer(template.app, name="template")


@app.command()
def show(
    run_file: RunFile,
    cluster: Cluster = None,
    overrides: Set = None,
    origin: Annotated[bool, typer.Option("--origin", help="Add where each value came from.")] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what is no default, as YAML that is a run file again.")
    ] = False,
    json: Json = False,
) -> None:
    """Print every value of a run as it would be submitted.

    Example: zslurm config show run.yaml --origin
    """
    resolved = resolve_run(run_file, cluster=cluster, overrides=overrides or [])
    rows = [row for row in resolved.rows() if not _is_of_no_use(resolved.spec, row[0], row[2])]
    if changed:
        if origin:
            raise ConfigError("--changed prints YAML; leave --origin out")
        changed_only = redact_mapping(changed_values(resolved))
        if json:
            print_json(changed_only)
        else:
            sys.stdout.write(yaml12.dump(changed_only))
    elif origin:
        print_values(rows, as_json=json)
    elif json:
        body = resolved.spec.model_dump(mode="json")
        used = {str(path[0]) for path, _, _ in rows}
        print_json(redact_mapping({name: section for name, section in body.items() if name in used}))
    else:
        for key, value, _ in without_secrets(rows):
            print(f"{key} = {show_value(value)}")


def _is_of_no_use(spec: RunSpec, path: KeyPath, origin: Origin) -> bool:
    """Return whether a value is a default of zslurm's own trainer in a run of another program."""
    only_own_trainer = path[0] in (*OWN_SECTIONS, "parallel")
    return spec.trainer is not None and only_own_trainer and origin.layer == "default"


def changed_values(resolved: load.Resolved) -> dict[str, Any]:
    """Return the values of a run that are not defaults, as sections of a run file; a list of values is whole."""
    body = resolved.spec.model_dump(mode="json")
    values: dict[str, Any] = {}
    for path, _, origin in resolved.rows():
        if origin.layer == "default":
            continue
        source: Any = body
        target: Any = values
        for key, following in zip_longest(path, path[1:]):
            source = source[key]
            inner: Any = [] if isinstance(following, int) else {}
            if following is None or (
                isinstance(source, list) and not all(isinstance(item, dict) for item in source)
            ):
                inner = source
            target = _entered(target, key, inner)
            if inner is source:
                break
    return values


def _entered(container: Any, key: str | int, inner: Any) -> Any:
    """Return the value at a key of a mapping, or at the index of a list, which is `inner` if there is none yet."""
    if isinstance(key, int):
        container.extend({} for _ in range(key + 1 - len(container)))
        return container[key]
    return container.setdefault(key, inner)


@app.command()
def schema() -> None:
    """Print the JSON schema of run files, for editors.

    Example: zslurm config schema > zslurm.schema.json
    """
    print_json(load.run_file_schema())


@app.command()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Print this recipe's file, comments and all.", autocompletion=complete_recipes
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the recipes that a run file can extend. The sizes of their models are shown.

    Example: zslurm config recipes zaya1-8b
    """
    recipe_names = load.recipes()
    if name is None:
        _list_recipes(sorted(map(_facts, recipe_names), key=lambda fact: fact["parameters"]), as_json=json)
    elif name not in recipe_names:
        near = difflib.get_close_matches(name, recipe_names, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(recipe_names)}"
        raise NotFound(f"no recipe is called `{name}`; {hint}")
    elif json:
        print_json(_facts(name) | {"text": recipe_names[name]})
    else:
        sys.stdout.write(recipe_names[name])


def _list_recipes(facts: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    rows = [
        [
            fact["name"],
            *(show_count(fact[key]) for key in ("parameters", "without_embedding", "active")),
            *(str(fact[key]) for key in ("layers", "hidden_size", "experts")),
            ", ".join(map(str, fact["contexts"])),
            show_count(fact["tokens"]),
        ]
        for fact in facts
    ]
    print_table(_RECIPE_COLUMNS, rows)


_RECIPE_COLUMNS = (
    Column("recipe"),
    Column("parameters"),
    Column("without-embedding", drop=6),
    Column("active", drop=1),
    Column("layers", drop=3),
    Column("hidden", drop=4),
    Column("experts", drop=2),
    Column("contexts", drop=7),
    Column("tokens", drop=5),
)


def _facts(name: str) -> dict[str, Any]:
    """Return a recipe's sizes in parameters; `active` is what one token passes through, without the embedding."""
    spec = load.resolve(Path("-"), document=yaml12.parse(f"extends: {name}\n", "recipe")).spec
    counts = parameter_counts(spec.model)
    return {
        "name": name,
        "parameters": counts.total,
        "without_embedding": counts.without_embedding,
        "active": counts.active,
        **{key: getattr(spec.model, key) for key in ("layers", "hidden_size", "experts", "vocab_size")},
        "contexts": [phase.context for phase in spec.phases],
        "tokens": sum(phase.tokens for phase in spec.phases),
    }
