"""Build a corpus: texts in, a directory of token bundles out, complete or not at all.

One process reads the sources in order, others parse and tokenize batches of some 256 KiB (`encode.py`), and the
first writes what comes back, in order, into bundles (`bundle_writer.py`). Memory is bounded by the batches under
way and the largest document, whatever the size of the files. The result is deterministic: the same texts, settings
and library versions give the same bytes, on any number of processes.

A build that is started again after a kill skips the bundles that are whole (`unfinished.py`), and ends with the
same bytes. build.json records a hash of the texts and the settings; building again into the same OUT reads the
sources once to compare, recognises the build and leaves OUT as it is.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from zslurm.checkpoint_tools.durable import sync
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.build.bundle_writer import BUNDLE_BYTES, RollingWriter, part_path
from zslurm.train.data.build.chat import ChatTemplate
from zslurm.train.data.build.documents import SAMPLE_BYTES, training_texts
from zslurm.train.data.build.encode import Encoder, Tally, encode_all
from zslurm.train.data.build.source_reader import MAX_DOCUMENT_BYTES, START, Cursor, Fields, SourceReader
from zslurm.train.data.build.sources import EXCLUDED_DIRECTORIES, find_files
from zslurm.train.data.build.tokenizer import (
    encoding_threads,
    end_token_id,
    file_sha256,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from zslurm.train.data.build.trim import Trimming
from zslurm.train.data.build.unfinished import (
    CORPUS,
    WholeBundle,
    bundles_to_keep,
    files_sha256,
    lock_path,
    staging_directory,
    unfinished_path,
    whole_bundles,
)
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.manifest import BuildManifest, BuildSummary
from zslurm.train.data.schema import BUNDLE_NAME, TOKENIZER_FILE, VERSION, BundleHeader
from zslurm.train.errors import BuildFailed, DataError

_WRONG_PLACE = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError)


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is: `done` of `total` bytes of the sources in this stage."""

    stage: Literal["tokenizer", "tokens", "compare"]
    done: int
    total: int


Report = Callable[[BuildProgress], None]


@dataclass(frozen=True)
class _Plan:
    """One build's arguments, checked."""

    reader: SourceReader
    source: str
    vocab_size: int | None
    tokenizer: Path | None
    end_token: str | None
    bundle_bytes: int
    workers: int
    trimming: Trimming | None
    report: Report
    note: Callable[[str], None]

    def settings(self) -> dict[str, Any]:
        """Return all that decides the result, in addition to the texts and the libraries."""
        return {
            "bundle_version": VERSION,
            "vocab_size": self.vocab_size,
            "sample_bytes": None if self.tokenizer else SAMPLE_BYTES,
            "tokenizer_sha256": file_sha256(self.tokenizer) if self.tokenizer else None,
            "end_token": self.end_token,
            "bundle_bytes": self.bundle_bytes,
            **asdict(self.reader.fields),
            **({"trim_answers": asdict(self.trimming)} if self.trimming else {}),
            **({"chat_template_sha256": self.reader.chat.sha256} if self.reader.chat else {}),
        }

    @cached_property
    def kept_with(self) -> dict[str, Any]:
        """What an unfinished build must have in common with this one, or its bundles are not kept."""
        files = self.reader.files  # a tokenizer is trained on a sample of all of them
        sources = files_sha256(files, START, Cursor(len(files))) if self.tokenizer is None else None
        return self.settings() | {"tokenizers_version": tokenizers.__version__, "sources": sources}

    def progress(self, stage: Literal["tokenizer", "tokens", "compare"]) -> Callable[[int, int], None]:
        """Return a function that reports bytes done and in all."""
        return lambda done, total: self.report(BuildProgress(stage, done, total))


def build(
    sources: Sequence[Path],
    out_dir: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    glob: str = "*",
    excluded: frozenset[str] = EXCLUDED_DIRECTORIES,
    fields: Fields = Fields(),  # noqa: B008 (frozen)
    end_token: str | None = None,
    bundle_bytes: int = BUNDLE_BYTES,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    workers: int = 1,
    chat_template: Path | None = None,
    trimming: Trimming | None = None,
    report: Report = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> BuildSummary:
    """Tokenize texts into the corpus directory `out_dir`.

    Args:
        sources: files and directories, in the order and of the kinds of `train/data/build/sources.py`. `out_dir`
            may be inside one; it is not read.
        out_dir: appears complete or not at all; one that exists must be empty or hold this very build.
        vocab_size: train a byte-level BPE of this size on the texts.
        tokenizer: use this tokenizer.json, or the one in this directory, instead.
        glob: which files of a directory to take.
        excluded: names of directories that are not entered.
        fields: what of a line or a row is the text; with a prompt and a completion, the prompt's tokens do not
            count as targets.
        end_token: the tokenizer's end-of-document token, if it is not one of the usual ones.
        bundle_bytes: a new bundle begins before it would exceed this; documents are not split.
        max_document_bytes: a larger document is refused; a process needs about 100 times that in memory.
        workers: processes that tokenize; 1: none but this one. More need an importable main module.
        chat_template: of conversations, if it is not the one next to the tokenizer.
        trimming: take so much of the reasoning of longer documents that they fit a context.
        report: gets the progress, in this thread, after each batch; what it raises ends the build.
        note: gets messages for people: an earlier, unfinished build; a smaller vocabulary.

    Raises:
        MissingSource: a source does not exist.
        DataError: bad sources, texts or tokenizer, no usable text, or `out_dir` is taken or cannot be written.
        BuildFailed: there is no room, or a process was killed.
    """
    started = time.monotonic()
    if vocab_size is None and tokenizer is None:
        raise DataError("give the size of a vocabulary to train, or a tokenizer to use")
    if vocab_size is not None and tokenizer is not None:
        raise DataError("give the size of a vocabulary to train or a tokenizer to use, not both")
    if (fields.prompt_key is None) != (fields.completion_key is None):
        raise DataError("prompts and completions go together: give the keys of both, or of neither")
    if fields.chat_key is not None and (fields.prompt_key is not None or tokenizer is None):
        raise DataError(
            "conversations have neither prompts nor completions, and need the tokenizer of a chat template"
        )
    if trimming is not None and not (trimming.opening and trimming.closing):
        raise DataError("the tags of reasoning must not be empty (--reasoning-tags)")
    if chat_template is not None and fields.chat_key is None:
        raise DataError("a chat template is for conversations: give the key of their messages, too")
    if min(bundle_bytes, max_document_bytes, workers) < 1:
        raise DataError("the sizes of a bundle and of a document, and the number of workers, are at least 1")
    if tokenizer is not None:
        tokenizer = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
        end_token_id(load_tokenizer(tokenizer), end_token)  # complains before the sources are read
    chat = None
    if fields.chat_key is not None and tokenizer is not None:
        chat = ChatTemplate.of_tokenizer(tokenizer, chat_template)
    out = out_dir.absolute()
    files = find_files(sources, glob, excluded, ours=(out, unfinished_path(out)), locks=[lock_path(out)])
    plan = _Plan(
        reader=SourceReader(files, fields, max_document_bytes, chat),
        source=_describe(sources, glob),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        end_token=end_token,
        bundle_bytes=bundle_bytes,
        workers=workers,
        trimming=trimming,
        report=report,
        note=note,
    )
    try:
        summary = _recognise(out, plan) if _is_taken(out) else _make(out, plan)
    except OSError as error:
        kind = DataError if isinstance(error, _WRONG_PLACE) else BuildFailed
        raise kind(f"{out}: cannot be written: {error.strerror or error}") from error
    return replace(summary, seconds=time.monotonic() - started)


def _make(out: Path, plan: _Plan) -> BuildSummary:
    """Write tokenizer, bundles and build.json into a directory that becomes `out`, and may hold whole bundles."""
    with staging_directory(out, plan.note) as staging, encoding_threads(plan.workers):
        directory = staging / CORPUS
        kept = _prepare(staging, plan)
        tokenizer = load_tokenizer(directory / TOKENIZER_FILE)
        header = BundleHeader(
            vocab_size=vocabulary_size(tokenizer),
            tokenizer_sha256=file_sha256(directory / TOKENIZER_FILE),
            end_token=end_token_id(tokenizer, plan.end_token),
            source=plan.source,
        )
        tally = _write_bundles(staging, header, kept, plan)
        corpus = Corpus.open(directory)
        manifest = BuildManifest(
            source=plan.source,
            settings=plan.settings(),
            source_sha256=tally.sha256,
            bundles=len(corpus.bundles),
            documents=corpus.document_count,
            tokens=corpus.token_count,
            vocab_size=header.vocab_size,
            tokenizer_sha256=header.tokenizer_sha256,
            fingerprint=corpus.fingerprint,
            text_bytes=tally.text_bytes,
            empty_documents=tally.empty_documents,
            skipped_files=tuple(tally.skipped_files),
            targets=tally.targets,
            trimmed_documents=tally.trimmed_documents,
            removed_tokens=tally.removed_tokens,
            too_long_documents=tally.too_long_documents,
        )
        manifest.write(directory)
    return manifest.summary(out, reused=False, continued=len(kept))


def _prepare(staging: Path, plan: _Plan) -> list[WholeBundle]:
    """Make `staging` hold the bundles to keep, which are returned, and their tokenizer, and nothing else."""
    directory = staging / CORPUS
    for path in sorted(directory.iterdir()):
        if named := BUNDLE_NAME.fullmatch(path.name):  # the naming of all bundles at the end was interrupted
            path.replace(part_path(directory, int(named["part"])))
    if whole_count := whole_bundles(staging):
        plan.note(f"comparing {counted(whole_count, 'bundle')} of an unfinished build with the checksums")
    kept = bundles_to_keep(staging, plan.kept_with, plan.reader.files, plan.workers)
    expected_names = {f"part-{part:05d}" for part in range(len(kept))} | (
        {CORPUS, "tokenizer"} if kept else {CORPUS}
    )
    for path in [*staging.iterdir(), *directory.iterdir()]:
        if path.stem not in expected_names:
            path.unlink()
    if kept:
        plan.note(f"continuing after the whole bundles: {len(kept)}")
    else:
        _make_tokenizer(directory / TOKENIZER_FILE, plan)
    return kept


def _make_tokenizer(path: Path, plan: _Plan) -> None:
    """Copy the tokenizer, or train one."""
    if plan.tokenizer is not None:
        shutil.copyfile(plan.tokenizer, path)
    elif plan.vocab_size is not None:
        texts = training_texts(plan.reader, plan.progress("tokenizer"))
        trained = train_tokenizer(texts, plan.vocab_size)
        trained.save(str(path))
        if (size := vocabulary_size(trained)) < plan.vocab_size:
            plan.note(
                f"the vocabulary has {counted(size, 'entry')}, not {plan.vocab_size}: an entry joins two that "
                "occur together at least twice, and the text has no more such pairs; a larger one needs more text"
            )
    sync(path)


def _write_bundles(staging: Path, header: BundleHeader, kept: Sequence[WholeBundle], plan: _Plan) -> Tally:
    """Tokenize everything after the bundles that are kept; returns what was read in all."""
    reader = plan.reader
    start, tally = (kept[-1].cursor, kept[-1].tally) if kept else (START, Tally())
    report = plan.progress("tokens")
    total = sum(file.size for file in reader.files)
    report(sum(file.size for file in reader.files[: start.file]), total)
    directory, masked = staging / CORPUS, reader.fields.masked
    encoder = Encoder(reader, directory / TOKENIZER_FILE, header.end_token, plan.trimming)
    with (
        RollingWriter(directory, header, plan.bundle_bytes, masked=masked, finished=len(kept)) as writer,
        closing(encode_all(encoder, reader.batches(start), plan.workers)) as encoded,
    ):
        for batch, documents in encoded:
            for document in documents:
                if document.tokens.size:
                    if not writer.has_room_for(document.tokens.size):
                        writer.finish()
                        files = files_sha256(reader.files, start, document.cursor)
                        start = document.cursor
                        WholeBundle(plan.kept_with, files, start, tally).write(staging, writer.finished - 1)
                    writer.append(document.tokens, document.targets if masked else None)
                tally.add(document)
            report(batch.done, total)
        if not writer.commit():
            raise DataError(f"{plan.source}: {_nothing(tally)}")
    return tally


def _nothing(tally: Tally) -> str:
    """Return why there are no documents."""
    first = f" ({tally.skipped_files[0]})" if tally.skipped_files else ""
    return (
        f"no usable text: {counted(tally.empty_documents, 'document is', 'documents are')} empty, "
        f"{counted(len(tally.skipped_files), 'file is', 'files are')} not UTF-8{first}"
    )


def _describe(sources: Sequence[Path], glob: str) -> str:
    """Return the sources in a line, for people."""
    shown = ", ".join(map(str, sources[:3]))
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    return f"{shown}{more} ({glob})"


def _is_taken(out: Path) -> bool:
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _recognise(out: Path, plan: _Plan) -> BuildSummary:
    """Return the summary of an OUT that holds this very build; its sources are read to find out.

    Raises:
        DataError: it holds something else, or is damaged.
    """
    record = BuildManifest.read(out)
    settings = plan.settings()
    changed = sorted(key for key in settings if record.settings.get(key) != settings[key])
    if changed:
        raise DataError(
            f"{out}: holds a corpus built with other settings ({', '.join(changed)}); "
            "name another directory, or remove this one"
        )
    if record.source_sha256 != _hash_of_texts(plan):
        raise DataError(f"{out}: holds a corpus of other text; name another directory, or remove this one")
    if record.fingerprint != Corpus.open(out).fingerprint:
        raise DataError(f"{out}: its bundles are not those that it was built with; remove it and build again")
    return record.summary(out, reused=True)


def _hash_of_texts(plan: _Plan) -> str:
    """Return the hash of the documents, without tokenizing them."""
    tally = Tally()
    report = plan.progress("compare")
    total = sum(file.size for file in plan.reader.files)
    report(0, total)
    with closing(encode_all(Encoder(plan.reader, None), plan.reader.batches(), plan.workers)) as looked_at:
        for batch, documents in looked_at:
            for document in documents:
                tally.add(document)
            report(batch.done, total)
    return tally.sha256
