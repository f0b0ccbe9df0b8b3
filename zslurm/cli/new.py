"""`zslurm new`: a commented run file from a recipe, to edit and submit."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Cluster, complete_recipes
from zslurm.cli.run_file import (
    Context,
    Lengths,
    Start,
    context_for,
    find_start,
    nearest_recipe,
    resolve_on_cluster,
    run_file_text,
)
from zslurm.cluster.profile import default_name
from zslurm.config import load, yaml12
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, NoProfile, NotFound
from zslurm.core.files import write_atomically

_DEFAULT_RECIPE = "zaya1-tiny"


class LongPairs(StrEnum):
    """What becomes of pairs that are longer than the context."""

    REFUSE = "refuse"
    TRIM = "trim"


def new(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The run file to write; `-` for stdout.")] = Path(
        "run.yaml"
    ),
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="What the run extends; `zslurm config recipes` lists them. [default: zaya1-tiny; with "
            "--init the one of the nearest size]",
            autocompletion=complete_recipes,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("-J", "--job-name", metavar="NAME", help="Name of the run; default: the file's.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="The token bundle or directory of them. [default: data/texts, or data/pairs]"
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Build the data from these texts, as `zslurm data build` (repeatable)."),
    ] = None,
    pairs: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Build the data from lines of `prompt` and `completion` (repeatable)."),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="Fine-tune: a folder of transformers, a checkpoint, or the newest one of a run.",
        ),
    ] = None,
    long_pairs: Annotated[
        LongPairs | None,
        typer.Option(
            help="What becomes of pairs that are longer than the context: no file, or their end is cut. "
            "[default: refuse]"
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("-N", "--nodes", metavar="N", min=1, help="Nodes of the job.")
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Write a commented run file from a recipe.

    With --text or --pairs it also builds the data, and with --init the run starts from trained weights and takes
    their model, their tokenizer and one pass over the data. A file that exists is not replaced.

    Example: zslurm new tune.yaml --init my-model --pairs pairs.jsonl
    """
    recipe_names = load.recipes()
    if recipe is not None and recipe not in recipe_names:
        raise NotFound(f"--recipe {recipe}: there is no such recipe; there are {', '.join(recipe_names)}")
    if text and pairs:
        raise ConfigError(
            "give --text or --pairs, not both; zslurm data build makes each, and docs/mixtures.md mixes"
        )
    if long_pairs is not None and not pairs:
        raise ConfigError(f"--long-pairs {long_pairs.value}: there are no pairs; name their files with --pairs")
    to_stdout = file == yaml12.STDIN
    if not to_stdout and file.exists():
        raise ConfigError(f"{file}: it exists; name another file, or `-` for stdout")
    where = data or ("data/pairs" if pairs else "data/texts")
    start = None if init is None else find_start(init)
    recipe = recipe or (_DEFAULT_RECIPE if start is None else nearest_recipe(start.model))
    chosen = name or (file.stem if not to_stdout and file.stem != "run" else recipe)
    # What is wrong with the names above is found before data are built, which can take hours.
    run_file_text(recipe, file, name=chosen, data=where, nodes=nodes, cluster=cluster)
    # Without weights only the recipe's context matters, which needs no profile.
    profile = cluster or (None if start is not None else "local")
    resolved = resolve_on_cluster(recipe, nodes, profile) if start is not None or pairs else None
    directory = Path() if to_stdout else file.parent
    if sources := text or pairs:
        _build(sources, directory / where, recipe, start, pairs=bool(pairs))
    lengths = None if resolved is None else _lengths(directory / where)
    long = None
    if pairs and resolved is not None and lengths is not None:
        context = context_for(resolved, start, lengths)
        long = _check_fit(lengths, context, long_pairs or LongPairs.REFUSE)
    run_text = run_file_text(
        recipe, file, name=chosen, data=where, nodes=nodes, cluster=cluster,
        start=start, lengths=lengths, pairs=bool(pairs), long=long,
    )  # fmt: skip
    if to_stdout:
        print(run_text, end="")
        return
    try:
        write_atomically(file, run_text)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    if not (directory / where).exists():
        size = _vocab_size(recipe)
        say(f"build its data first: zslurm data build TEXTS --vocab-size {size} --out {directory / where}")
    site = "" if cluster is not None or _has_profile() else " --cluster local"
    say(f"wrote {file}; see what it would do with: zslurm submit {file}{site} --dry-run")


def _vocab_size(recipe: str) -> int:
    file = yaml12.parse(f"extends: {recipe}\n", "run file")
    return load.resolve(Path("run.yaml"), document=file).spec.model.vocab_size


def _has_profile() -> bool:
    """Return whether a cluster profile applies if none is named."""
    try:
        default_name()
    except NoProfile:
        return False
    return True


def _build(sources: list[Path], out: Path, recipe: str, start: Start | None, *, pairs: bool) -> None:
    """Build the data with the tokenizer of the weights, or with one of the recipe's vocabulary that is trained."""
    from zslurm.cli.data_build import describe_summary, make_bundle  # imports h5py
    from zslurm.train.data.build.source_reader import Fields

    fields = Fields(prompt_key="prompt", completion_key="completion") if pairs else Fields()
    tokenizer = None if start is None else start.tokenizer
    vocab_size = _vocab_size(recipe) if start is None else None
    summary = make_bundle(sources, out, fields=fields, tokenizer=tokenizer, vocab_size=vocab_size)
    say(describe_summary(summary))


def _check_fit(lengths: Lengths, context: Context, wanted: LongPairs) -> str:
    """Report the pairs that are longer than the context; return the value of `data.long_documents`.

    Raises:
        ConfigError: there are some, and none may be cut.
    """
    long = lengths.longer_than(context.tokens + 1)
    if not long:
        return LongPairs.REFUSE.value
    long_pairs = (
        f"{counted(long, 'pair')} of {lengths.count:,} {'is' if long == 1 else 'are'} longer than the context "
        f"{context.limit}, {counted(context.tokens, 'token')} (the longest has {lengths.longest:,})"
    )
    if wanted is LongPairs.REFUSE:
        raise ConfigError(
            f"{long_pairs}: add --long-pairs trim, which cuts their end, or take them out of the file"
        )
    say(f"{long_pairs}: their end is cut")
    return wanted.value


def _lengths(data: Path) -> Lengths:
    """Return the lengths of the documents of the data, in tokens.

    Raises:
        ConfigError: the data are not there, or damaged.
    """
    import numpy as np

    from zslurm.cli.errors import as_user_errors
    from zslurm.train.data.bundle import Corpus  # imports h5py

    if not data.exists():
        raise NotFound(f"{data}: there are no data; build them with --text or --pairs, or name them with --data")
    with as_user_errors():
        corpus = Corpus.open(data)
        return Lengths(np.concatenate([np.diff(bundle.documents.astype(np.int64)) for bundle in corpus.bundles]))
