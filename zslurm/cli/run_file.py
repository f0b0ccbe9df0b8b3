"""The text of a new run file: what the user chose, the weights that it starts from, and comments."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zslurm.checkpoint_tools.quantities import counted, show_count
from zslurm.cli.errors import as_user_errors
from zslurm.config import load, yaml12
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, NoProfile
from zslurm.core.units import show_value
from zslurm.run.checkpoints import find_checkpoint
from zslurm.submit.resolve import resolve_run
from zslurm.train.config import ModelConfig
from zslurm.train.sections.phases import PhaseConfig
from zslurm.train.shapes import parameter_counts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Start:
    """Trained weights.

    Attributes:
        init: the value of the key `init`, with an absolute path.
        model: theirs.
        tokenizer: their tokenizer.json.
        rope_base: theirs; None if unknown.
        context: longest sequence that they were trained with, in tokens; None if unknown.
        dtype: "bf16" or "fp32", in which they were trained; None if it is not known.
        lr: peak learning rate that they were trained with last; None if it is not known.
    """

    init: str
    model: ModelConfig
    tokenizer: Path
    rope_base: float | None
    context: int | None
    dtype: str | None = None
    lr: float | None = None


def find_start(reference: str) -> Start:
    """Return the weights that a folder of transformers, a checkpoint or a run means.

    Raises:
        NotFound: there are none.
        ConfigError: they cannot be read, or have no tokenizer.
    """
    from zslurm.train.hub import CheckpointWeights, FolderWeights  # imports numpy and h5py

    kind, _, path_part = reference.partition(":")
    name = path_part if kind in ("hf", "ckpt") else reference
    folder = Path(name).expanduser()
    is_folder = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    path = (folder if is_folder else find_checkpoint(name)).absolute()
    with as_user_errors(), (FolderWeights if is_folder else CheckpointWeights)(path) as weights:
        settings, files = weights.settings, weights.tokenizer()
    if files is None:
        raise ConfigError(f"--init {reference}: has no tokenizer.json, which the data must be made with")
    return Start(
        init=f"{'hf' if is_folder else 'ckpt'}:{path}",
        model=settings.model,
        tokenizer=files.file,
        rope_base=settings.rope_base,
        context=settings.context,
        dtype=settings.dtype,
        lr=settings.lr,
    )


def nearest_recipe(model: ModelConfig) -> str:
    """Return the name of the recipe whose model has about as many parameters."""
    size = parameter_counts(model).total

    def ratio(name: str) -> float:
        document = yaml12.parse(f"extends: {name}\n", "run file")
        recipe = load.resolve(Path("run.yaml"), document=document).spec.model
        return abs(math.log(parameter_counts(recipe).total / size))

    return min(load.recipes(), key=lambda name: (ratio(name), name))  # zaya1-8b before further phases of it


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
"""What data are built from."""
_WIDTH = 100
FEWEST_STEPS = 20
"""Optimizer steps of a fine-tuning, at least: with little data its batches become smaller than the recipe's."""
LEARNING_RATE_DIVISOR = 8
"""A run from trained weights learns at the rate that they were trained with last, over this."""
_LONG = {
    "refuse": "a pair that is longer than the context stops the submission",
    "trim": "the end of a pair that is longer than the context is cut",
}
_CONTEXT_OF_PAIRS, _CONTEXT_OF_TEXTS = 1024, 4096
_OF_RECIPE = "of the recipe"
_OF_WEIGHTS = "of the weights"
_HIGHEST_GUESS = 1e-4
"""Highest learning rate of a fine-tuning if the weights do not state theirs."""


class Lengths:
    """The lengths of the documents of a corpus."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self._tokens = tokens
        self.count = len(tokens)
        self.total = int(tokens.sum())
        self.longest = int(tokens.max(initial=0))

    def longer_than(self, tokens: int) -> int:
        """Return how many documents have more than `tokens` tokens."""
        return int((self._tokens > tokens).sum())


@dataclass(frozen=True)
class Context:
    """The context of a new run.

    Attributes:
        tokens: how many.
        limit: what it is the longest context of, such as `of the weights`; empty if the data need no more.
    """

    tokens: int
    limit: str = ""


def context_for(recipe: RunSpec, start: Start | None, lengths: Lengths | None, *, pairs: bool = True) -> Context:
    """Return the context of a run file: the weights' context or less, or the shortest of the recipe's phases.

    It is less than the weights' context if every pair fits into less.

    Args:
        recipe: the run of the recipe on its cluster.
        start: the weights; None if the phases are the recipe's.
        lengths: of the documents; None if they are not known yet.
        pairs: whether the data are prompts with completions.
    """
    if start is None:
        return Context(min(phase.context for phase in recipe.phases), _OF_RECIPE)
    needed = _CONTEXT_OF_TEXTS
    if pairs:
        longest = 1 if lengths is None else max(1, lengths.longest - 1)
        needed = max(_CONTEXT_OF_PAIRS, 1 << (longest - 1).bit_length())
    context = Context(needed)
    if start.context is not None and start.context <= context.tokens:
        context = Context(start.context, _OF_WEIGHTS)
    return context


def run_file_text(
    recipe: str,
    file: Path,
    *,
    name: str,
    data: str,
    nodes: int | None,
    cluster: str | None,
    start: Start | None = None,
    lengths: Lengths | None = None,
    pairs: bool = False,
    long: str | None = None,
) -> str:
    """Return the text of the run file `file` that extends a recipe, with what else is often set as comments.

    Args:
        recipe: its name.
        file: its path.
        name: of the run.
        data: the token bundles.
        nodes: of the job, if they were chosen.
        cluster: the profile, if one was chosen.
        start: the weights to start from.
        lengths: of the documents of the data; needed with `start` for more than a check of the other arguments.
        pairs: whether the data are prompts with completions.
        long: the value of `data.long_documents`; None for the default.

    Raises:
        ConfigError: a value is not valid, such as the name of the run.
        NotFound: with `start`, there is no such profile.
    """
    head = f"extends: {recipe}\nrun: {{name: {json.dumps(name)}}}\ndata: {{path: {json.dumps(data)}}}\n"
    init = [] if start is None else [f"init: {json.dumps(start.init)}"]
    training = []
    if start is not None:
        training = _training(resolve_on_cluster(recipe, nodes, cluster), start, lengths, pairs=pairs)
    spec = _resolve(file, head + "\n".join([*init, *training]) + "\n")
    counts, phases = parameter_counts(spec.model), spec.phases
    tokenizer = f"--vocab-size {spec.model.vocab_size}" if start is None else f"--tokenizer {start.tokenizer}"
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
        f"  path: {json.dumps(data)}  # made by: zslurm data build {_SOURCE[pairs]} {tokenizer} --out {data}",
        *(["  packing: best_fit  # whole pairs in a sequence, none sees another"] if pairs else []),
        *([f"  long_documents: {long}  # {_LONG[long]}"] if long is not None else []),
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
        lines += ["# phases:  # this list replaces the recipe's; one value: --set phases.0.lr=3e-4"]
        lines += [f"# {line}" for phase in phases for line in _phase(phase)]
    for section, keys in _COMMENTED.items():
        if f"{section}:" in training:
            continue
        lines.append(f"# {section}:")
        for key in keys:
            *about, line = _comment(section, key, spec)
            lines += [*(f"# {about_line}" for about_line in about), f"# {line.replace('# ', '', 1)}"]
    return "\n".join(lines) + "\n"


def resolve_on_cluster(recipe: str, nodes: int | None, cluster: str | None) -> RunSpec:
    """Return the run of a recipe on a cluster, whose profile decides the ranks of a node.

    Without `cluster` it is the default profile; if there is none, a node has one rank.

    Raises:
        ConfigError: the profile is not valid, or there are several and none is the default.
        NotFound: there is no such profile.
    """
    job = "" if nodes is None else f"slurm: {{nodes: {nodes}}}\n"
    document = yaml12.parse(f"extends: {recipe}\nrun: {{name: {recipe}}}\n{job}", "run file")
    try:
        return resolve_run(None, cluster=cluster, document=document).spec
    except NoProfile:
        return load.resolve(Path("run"), document=document).spec


def _resolve(file: Path, text: str) -> RunSpec:
    return load.resolve(file, document=yaml12.parse(text, "run file")).spec


def _training(recipe: RunSpec, start: Start, lengths: Lengths | None, *, pairs: bool) -> list[str]:
    """Return the sections that trained weights ask for: their model, and a phase of one pass over the data."""
    theirs, recipe_values = start.model.model_dump(mode="json"), recipe.model.model_dump(mode="json")
    first, tokens = recipe.phases[0], 0 if lengths is None else lengths.total
    chosen = context_for(recipe, start, lengths, pairs=pairs)
    context = chosen.tokens
    ranks = recipe.world_size
    most = first.global_batch * first.context // context
    batch = max(ranks, min(most, tokens // (context * FEWEST_STEPS)))
    micro = max(1, min(first.micro_batch * first.context // context, batch // ranks))
    batch -= batch % (micro * ranks)
    steps = max(1, tokens // (context * batch))
    differs = [f"  {key}: {json.dumps(value)}" for key, value in theirs.items() if value != recipe_values.get(key)]
    lr, whose = _learning_rate(recipe, start)
    dtype = start.dtype or recipe.parallel.dtype
    return [
        *(["model:  # that of the weights, if the recipe has another", *differs] if differs else []),
        *(["parallel:", f"  dtype: {dtype}  # as they were trained"] if dtype != recipe.parallel.dtype else []),
        "phases:",
        f"  - tokens: {steps * batch * context}  # one pass over the data",
        f"    context: {context}  # {_about_context(start, chosen)}",
        f"    global_batch: {batch}  # sequences in one optimizer step",
        f"    micro_batch: {micro}",
        f"    lr: {lr / LEARNING_RATE_DIVISOR:.3g}  # {whose} over {LEARNING_RATE_DIVISOR}",
        "    schedule: linear  # down to final_lr, 0 unless it is given",
        f"    warmup_steps: {steps // 20}",
        *([] if start.rope_base is None else [f"    rope_base: {start.rope_base:g}  # as they were trained"]),
    ]


def _learning_rate(recipe: RunSpec, start: Start) -> tuple[float, str]:
    """Return the rate that the weights were trained with last, and whose it is."""
    if start.lr is not None:
        return start.lr, "that of the run that trained the weights"
    lr = min(recipe.phases[-1].lr, _HIGHEST_GUESS * LEARNING_RATE_DIVISOR)
    return lr, "the weights do not state theirs: that of a model of about this size, at most 8e-4,"


def _about_context(start: Start, context: Context) -> str:
    if context.limit == _OF_WEIGHTS:
        return "tokens, as they were trained"
    theirs = (
        "the weights do not state theirs" if start.context is None else f"they were trained with {start.context}"
    )
    if context.limit:
        return f"tokens, the most {context.limit}; {theirs}"
    return f"tokens; {theirs}" if start.context is None else f"tokens, enough for these data; {theirs}"


def _phase(phase: PhaseConfig) -> list[str]:
    """Return the keys of a phase that are no defaults, as lines of a list of YAML."""
    phase_values = phase.model_dump(mode="json", exclude_defaults=True)
    first, *others = [f"{key}: {json.dumps(value)}" for key, value in {"name": phase.name, **phase_values}.items()]
    return [f"  - {first}", *(f"    {line}" for line in others)]


def _comment(section: str, key: str, spec: RunSpec, example: str | None = None) -> list[str]:
    """Return a key as comments in its section: what it is, and its value in the recipe, or an example."""
    config_section = getattr(spec, section)
    value = getattr(config_section, key)
    if section == "run":  # what follows from where it is run is no example
        value = type(config_section).model_fields[key].default
    shown = example if value is None and example is not None else "null" if value is None else show_value(value)
    about = textwrap.wrap(type(config_section).model_fields[key].description or "", _WIDTH)
    return [*(f"  # {line}" for line in about), f"  # {key}: {shown}"]
