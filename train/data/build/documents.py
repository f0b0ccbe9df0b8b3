"""Documents from records: what their text is, or what is wrong with them.

Text is never half-decoded: replacement characters would be learned. A text file that was found in a directory and
is not UTF-8 is left out and named; one that was asked for by name, and every fault in a line or a row, is an error
that names the place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.data.build.chat import ChatTemplate, RefusedConversation, Rendered
from zslurm.train.data.build.compressed import open_source
from zslurm.train.data.build.source_reader import Cursor, Raw, SourceReader
from zslurm.train.data.build.sources import SourceFile, SourceKind
from zslurm.train.errors import DataError

SAMPLE_BYTES = 64 << 20
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


@dataclass(frozen=True)
class Document:
    """One document: `texts` is its text, or its prompt and completion; `skipped` is why it has none.

    Of a conversation `learned` is the part of its text that the assistant speaks.
    """

    texts: tuple[str, ...]
    text_bytes: int
    sha256: bytes
    skipped: str | None = None
    learned: tuple[tuple[int, int], ...] | None = None

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to learn: no text, no completion, or nothing that the assistant says."""
        return not self.texts[-1] or self.learned == ()


def document_of(raw: Raw, reader: SourceReader) -> Document:
    """Decode, parse and check a record.

    Raises:
        DataError: names the file, and the line or row and what is wrong there.
    """
    if raw.content is None:
        return _of_text_file(raw, reader)
    names = reader.fields.of(raw.file.kind)
    values = raw.content if isinstance(raw.content, tuple) else _of_line(raw, raw.content, names, _option(reader))
    if reader.chat is not None:
        return _conversation(raw, reader.chat, names[0], values[0])
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise DataError(f"{raw.where}: {name!r} is {_name_of(value)}, not a string")
    try:
        return _document([value.encode() for value in values], tuple(values))
    except UnicodeEncodeError as error:
        raise DataError(
            f"{raw.where}: holds half of a surrogate pair (\\u{ord(error.object[error.start]):04x}), "
            "which is no text"
        ) from error


def _of_text_file(raw: Raw, reader: SourceReader) -> Document:
    path = raw.file.path
    if reader.fields.masked:
        missing = reader.fields.of(raw.file.kind)[0]
        what = "conversations" if reader.chat is not None else "prompts and completions"
        raise DataError(
            f"{path}: is a text file, which has no {missing!r}; {what} are read "
            "from .jsonl and .parquet (choose files of a directory with --glob)"
        )
    with open_source(raw.file) as (stream, _):
        content = stream.read(reader.max_document_bytes + 1)
    reader.check_size(str(path), len(content))
    try:
        return _document([content], (content.decode("utf-8"),))
    except UnicodeDecodeError as error:
        fault = f"{path}: is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}"
        if raw.file.named:
            raise DataError(f"{fault}; convert it (iconv -t UTF-8) or leave it out") from error
        return _document([content], ("",), skipped=fault)


def _conversation(raw: Raw, chat: ChatTemplate, name: str, messages: Any) -> Document:
    """Check and render the messages of a conversation.

    Raises:
        DataError: names the record, and what is wrong with it or what the template says against it.
    """
    if not isinstance(messages, list):
        raise DataError(f"{raw.where}: {name!r} is {_name_of(messages)}, not a list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{raw.where}: message {index} of {name!r} has no 'role' (an object with role and content)"
            )
    content = json.dumps(messages, ensure_ascii=False, sort_keys=True, default=str)
    try:
        rendered = chat.render(messages) if messages else Rendered("", ())
        document = _document([content.encode()], (rendered.text,), learned=rendered.learned)
        return replace(document, text_bytes=len(rendered.text.encode()))
    except RefusedConversation as error:
        raise DataError(f"{raw.where}: the chat template ({chat.where}) fails: {error}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{raw.where}: holds half of a surrogate pair, which is no text") from error


def _of_line(raw: Raw, line: bytes, names: Sequence[str], option: str) -> tuple[Any, ...]:
    """Return the values of the fields in one line of JSON."""
    try:
        text = line.decode("utf-8-sig" if raw.cursor.record == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{raw.where}: is not UTF-8: byte 0x{line[error.start]:02x} at offset "
            f"{raw.cursor.offset + error.start} of the file; convert it (iconv -t UTF-8) or leave it out"
        ) from error
    try:
        value = json.loads(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise DataError(f"{raw.where}: is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{raw.where}: cannot be parsed: {in_words(error)}") from error
    if not isinstance(value, dict):
        raise DataError(f"{raw.where}: is {_name_of(value)}, not an object with {names[0]!r}")
    for name in names:
        if name not in value:
            keys = ", ".join(map(repr, value)) or "none"
            raise DataError(f"{raw.where}: has no {name!r}; its keys: {keys} (set {option})")
    return tuple(value[name] for name in names)


def _document(
    contents: Sequence[bytes],
    texts: tuple[str, ...],
    skipped: str | None = None,
    learned: tuple[tuple[int, int], ...] | None = None,
) -> Document:
    """Return a document and the hash of its bytes: of one text, or of two and the start of the second."""
    digest = hashlib.sha256(" ".join(str(len(content)) for content in contents).encode() + b"\n")
    for content in contents:
        digest.update(content)
    return Document(texts, sum(map(len, contents)), digest.digest(), skipped, learned)


def _option(reader: SourceReader) -> str:
    """Return the options that name the fields."""
    if reader.chat is not None:
        return "--chat-key"
    return "--prompt-key and --completion-key" if reader.fields.paired else "--text-key"


def _name_of(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


def training_shares(files: Sequence[SourceFile], limit: int) -> dict[int, int]:
    """Return how many bytes to take of which files, by their number; all if they fit into `limit` bytes."""
    every = max(1, -(-sum(file.size for file in files) // limit))
    texts = [number for number, file in enumerate(files) if file.kind is SourceKind.TEXT]
    chosen = set(texts[::every])
    return {
        number: file.size if number in chosen else -(-file.size // every)
        for number, file in enumerate(files)
        if number in chosen or file.kind is not SourceKind.TEXT
    }


def training_texts(reader: SourceReader, report: Callable[[int, int], None]) -> Iterator[str]:
    """Yield the texts that a tokenizer is trained on: about SAMPLE_BYTES, spread over the sources.

    Of text files every k-th is taken whole; of files of many documents the first k-th part, since reading all of
    them to choose would take as long as building. Shuffle sorted documents, or use a tokenizer that you have.
    `report` gets the bytes done and in all.

    Raises:
        DataError: a file cannot be read, or a record is faulty.
    """
    shares = training_shares(reader.files, SAMPLE_BYTES)
    done, total = 0, sum(shares.values())
    report(done, total)
    for number, share in shares.items():
        taken = 0
        for raw, size, _ in reader.records_of(reader.files[number], Cursor(number)):
            if taken >= share:
                break
            yield from filter(None, document_of(raw, reader).texts)
            taken += size
        done += share
        report(done, total)
