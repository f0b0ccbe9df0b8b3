"""`zslurm new`: a commented run file from a recipe, to edit and submit."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from zslurm.checkpoint_tools.quantities import counted, show_count
from zslurm.cli.options import Cluster, complete_recipes
from zslurm.config import load, yaml12
from zslurm.config.spec import RunSpec
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, NotFound
from zslurm.core.files import write_atomically
from zslurm.core.units import show_value
from zslurm.train.shapes import parameter_counts

_COMMENTED: dict[str, tuple[str, ...]] = {
    "checkpoint": ("every_steps", "keep_last", "keep_every"),
    "evaluation": ("every_steps",),
    "optim": ("weight_decay", "clip_norm"),
    "parallel": ("dtype",),
    "metrics": ("log_every", "tensorboard"),
    "aegis": ("mode", "retries", "recovery"),
}
"""Keys that many runs change, which the file names with their present values, as comments."""
_WIDTH = 100


def new(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The run file to write; `-` for stdout.")] = Path(
        "run.yaml"
    ),
    recipe: Annotated[
        str,
        typer.Option(
            metavar="RECIPE",
            help="What the run extends; `zslurm config recipes` lists them.",
            autocompletion=complete_recipes,
        ),
    ] = "zaya1-tiny",
    name: Annotated[
        str | None, typer.Option("-J", "--job-name", metavar="NAME", help="Name of the run; default: the file's.")
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="PATH", help="The token bundle or directory of them, by `zslurm data build`.")
    ] = "data/texts",
    nodes: Annotated[
        int | None, typer.Option("-N", "--nodes", metavar="N", min=1, help="Nodes of the job.")
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Write a commented run file from a recipe.

    A file that exists is not replaced.

    Example: zslurm new run.yaml --recipe zaya1-100m --data data/texts --nodes 2
    """
    known = load.recipes()
    if recipe not in known:
        raise NotFound(f"--recipe {recipe}: there is no such recipe; there are {', '.join(known)}")
    chosen = name or (file.stem if file != yaml12.STDIN and file.stem != "run" else recipe)
    text = run_file_text(recipe, file, name=chosen, data=data, nodes=nodes, cluster=cluster)
    if file == yaml12.STDIN:
        print(text, end="")
        return
    if file.exists():
        raise ConfigError(f"{file}: it exists; name another file, or `-` for stdout")
    try:
        write_atomically(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    say(f"wrote {file}; see what it would do with: zslurm submit {file} --dry-run")


def run_file_text(recipe: str, file: Path, *, name: str, data: str, nodes: int | None, cluster: str | None) -> str:
    """Return the text of the run file `file` that extends a recipe, with what else is often set as comments.

    Raises:
        ConfigError: a value is not valid, such as the name of the run.
    """
    head = f"extends: {recipe}\nrun: {{name: {json.dumps(name)}}}\ndata: {{path: {json.dumps(data)}}}\n"
    spec = load.resolve(file, document=yaml12.parse(head, "run file")).spec
    counts, phases = parameter_counts(spec.model), spec.phases
    tokens = sum(phase.tokens for phase in phases)
    lines = [
        f"# A run of {recipe}: {counted(counts.total, 'parameter', shown=show_count(counts.total))}, "
        f"{counted(spec.model.layers, 'layer')}, {counted(tokens, 'token', shown=show_count(tokens))} in "
        f"{counted(len(phases), 'phase')}.",
        "# `zslurm config show FILE --origin` prints every value, `zslurm config schema` describes every key.",
        f"extends: {recipe}",
        "run:",
        f"  name: {json.dumps(name)}",
        *_comment("run", "seed", spec),
        *_comment("run", "runs_dir", spec),
        "data:",
        f"  path: {json.dumps(data)}  # made by: zslurm data build TEXTS --out {data}",
        "slurm:",
        *([f"  nodes: {nodes}"] if nodes is not None else _comment("slurm", "nodes", spec)),
        *_comment("slurm", "spares", spec),
        *_comment("slurm", "time", spec, "24:00:00"),
        *_comment("slurm", "partition", spec, "gpu"),
        *_comment("slurm", "account", spec, "my-account"),
    ]
    if cluster is not None:
        lines += ["cluster:", f"  name: {json.dumps(cluster)}"]
    lines += ["# phases: is a list, and a list replaces the recipe's; one value: --set phases[0].lr=3e-4"]
    lines += [f"#   {index}: {_phase(phase)}" for index, phase in enumerate(phases)]
    for section, keys in _COMMENTED.items():
        lines.append(f"# {section}:")
        for key in keys:
            *about, line = _comment(section, key, spec)
            lines += [*(f"# {each}" for each in about), f"# {line.replace('# ', '', 1)}"]
    return "\n".join(lines) + "\n"


def _phase(phase: Any) -> str:
    return (
        f"{phase.name}: tokens {show_count(phase.tokens)}, context {phase.context}, global_batch "
        f"{phase.global_batch}, micro_batch {phase.micro_batch}, lr {phase.lr:g}"
    )


def _comment(section: str, key: str, spec: RunSpec, example: str | None = None) -> list[str]:
    """Return a key as comments in its section: what it is, and its value in the recipe, or an example."""
    part = getattr(spec, section)
    value = getattr(part, key)
    if section == "run":  # what follows from where it is run is no example
        value = type(part).model_fields[key].default
    shown = example if value is None and example is not None else "null" if value is None else show_value(value)
    about = textwrap.wrap(type(part).model_fields[key].description or "", _WIDTH)
    return [*(f"  # {line}" for line in about), f"  # {key}: {shown}"]
