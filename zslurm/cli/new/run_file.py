"""The text of a new run file: what the user chose, and what else many runs set as comments."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_count
from zslurm.cli.new.weights import Start
from zslurm.config import load, yaml12
from zslurm.config.spec import RunSpec
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
_SOURCE = {False: "TEXTS", True: "PAIRS --prompt-key prompt --completion-key completion"}
_WIDTH = 100
FEWEST_STEPS = 20
"""Optimizer steps of a fine-tuning, at least: with little data its batches become smaller than the recipe's."""
LEARNING_RATE_DIVISOR = 8
"""A new run from trained weights learns at the recipe's rate over this."""


def run_file_text(
    recipe: str,
    file: Path,
    *,
    name: str,
    data: str,
    nodes: int | None,
    cluster: str | None,
    start: Start | None = None,
    tokens: int | None = None,
    pairs: bool = False,
) -> str:
    """Return the text of the run file `file` that extends a recipe, with what else is often set as comments.

    Args:
        recipe: its name.
        file: where it will be.
        name: of the run.
        data: the token bundles.
        nodes: of the job, where they were chosen.
        cluster: the profile, where one was chosen.
        start: the weights to start from.
        tokens: how many tokens one pass over the data has; needed with `start`.
        pairs: whether the data are prompts with completions.

    Raises:
        ConfigError: a value is not valid, such as the name of the run.
    """
    head = f"extends: {recipe}\nrun: {{name: {json.dumps(name)}}}\ndata: {{path: {json.dumps(data)}}}\n"
    init = [] if start is None else [f"init: {json.dumps(start.init)}"]
    training = [] if start is None else _training(_resolve(file, head), start, tokens or 0)
    spec = _resolve(file, head + "\n".join([*init, *training]) + "\n")
    counts, phases = parameter_counts(spec.model), spec.phases
    tokens = sum(phase.tokens for phase in phases)
    lines = [
        f"# A run of {recipe}: {counted(counts.total, 'parameter', shown=show_count(counts.total))}, "
        f"{counted(spec.model.layers, 'layer')}, {counted(tokens, 'token', shown=show_count(tokens))} in "
        f"{counted(len(phases), 'phase')}.",
        "# `zslurm config show FILE --origin` prints every value, `zslurm config schema` describes every key.",
        f"extends: {recipe}",
        *init,
        "run:",
        f"  name: {json.dumps(name)}",
        *_comment("run", "seed", spec),
        *_comment("run", "runs_dir", spec),
        "data:",
        f"  path: {json.dumps(data)}  # made by: zslurm data build {_SOURCE[pairs]} --out {data}",
        *(["  packing: best_fit  # whole pairs side by side, none cut, none sees another"] if pairs else []),
        "slurm:",
        *([f"  nodes: {nodes}"] if nodes is not None else _comment("slurm", "nodes", spec)),
        *_comment("slurm", "spares", spec),
        *_comment("slurm", "time", spec, "24:00:00"),
        *_comment("slurm", "partition", spec, "gpu"),
        *_comment("slurm", "account", spec, "my-account"),
    ]
    if cluster is not None:
        lines += ["cluster:", f"  name: {json.dumps(cluster)}"]
    lines += training
    if start is None:
        lines += ["# phases: is a list, and a list replaces the recipe's; one value: --set phases[0].lr=3e-4"]
        lines += [f"#   {index}: {_phase(phase)}" for index, phase in enumerate(phases)]
    for section, keys in _COMMENTED.items():
        lines.append(f"# {section}:")
        for key in keys:
            *about, line = _comment(section, key, spec)
            lines += [*(f"# {each}" for each in about), f"# {line.replace('# ', '', 1)}"]
    return "\n".join(lines) + "\n"


def _resolve(file: Path, text: str) -> RunSpec:
    return load.resolve(file, document=yaml12.parse(text, "run file")).spec


def _training(recipe: RunSpec, start: Start, tokens: int) -> list[str]:
    """Return the sections that trained weights ask for: their model, and a phase of one pass over the data."""
    theirs, ours = start.model.model_dump(mode="json"), recipe.model.model_dump(mode="json")
    first = recipe.phases[0]
    context = min(first.context, start.context or first.context)
    micro = first.micro_batch
    steps_at_least = tokens // (context * FEWEST_STEPS)
    batch = max(micro, min(first.global_batch, steps_at_least // micro * micro))
    steps = max(1, tokens // (context * batch))
    differs = [f"  {key}: {json.dumps(value)}" for key, value in theirs.items() if value != ours.get(key)]
    return [
        *(["model:  # that of the weights, where the recipe has another", *differs] if differs else []),
        "phases:",
        f"  - tokens: {steps * batch * context}  # one pass over the data",
        f"    context: {context}",
        f"    global_batch: {batch}  # sequences in one optimizer step",
        f"    micro_batch: {micro}",
        f"    lr: {first.lr / LEARNING_RATE_DIVISOR:g}  # the recipe's over {LEARNING_RATE_DIVISOR}",
        "    schedule: linear  # down to final_lr, 0 unless it is given",
        f"    warmup_steps: {steps // 20}",
        *([] if start.rope_base is None else [f"    rope_base: {start.rope_base:g}  # as they were trained"]),
    ]


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
