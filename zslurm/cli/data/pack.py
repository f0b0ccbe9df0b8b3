"""`zslurm data pack`: best-fit packing of a corpus, stored beside it, and how full the sequences are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from typer import Option

from zslurm.checkpoint_tools.quantities import counted, show_count
from zslurm.cli.data.inspect import Bundles, check_exists
from zslurm.cli.errors import as_user_errors
from zslurm.cli.options import Json, Slurm, run_locally_or_as_job
from zslurm.core.console import print_json
from zslurm.core.progress_bar import byte_bar
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.packs.packs import Counts
from zslurm.train.data.packs.store import store
from zslurm.train.sections.section import LARGEST


def pack(
    path: Bundles,
    context: Annotated[int, Option(min=2, max=LARGEST, help="Tokens of a sequence: the context of the phase.")],
    long_documents: Annotated[
        Literal["split", "trim", "refuse"], Option(help="What becomes of documents that are longer; as in data.*.")
    ] = "split",
    slurm: Slurm = False,
    json: Json = False,
) -> None:
    """Pack whole documents into sequences, and store which go together beside the bundles.

    A run with data.packing: best_fit needs this only where there are millions of documents.

    Example: zslurm data pack data/chats --context 32768
    """
    run_locally_or_as_job(slurm)
    check_exists(path)
    with as_user_errors(), byte_bar(f"packing {path.name}") as report:
        stored, counts = store(
            Corpus.open(path), context, long_documents, lambda done, total: report(8 * done, 8 * total)
        )
    if json:
        print_json({"path": str(stored), "filled": counts.filled, **asdict(counts)})
    else:
        print(f"{stored}: {describe(counts, context, long_documents)}")


def describe(counts: Counts, context: int, long_documents: str) -> str:
    """Describe in one line what became of the documents."""
    packed = counts.documents - counts.empty
    parts = [
        f"{counted(packed, 'document')} in {counted(counts.packs, 'sequence')} of {context}, "
        f"{100 * counts.filled:.2f} % full"
    ]
    if counts.long:
        dropped = counted(counts.dropped_tokens, "token", shown=show_count(counts.dropped_tokens))
        done = {"split": "split", "trim": f"trimmed by {dropped} in all"}
        parts.append(f"{counted(counts.long, 'document')} longer than that {done[long_documents]}")
    if counts.empty:
        parts.append(f"{counted(counts.empty, 'empty document')} left out")
    return "; ".join(parts)
