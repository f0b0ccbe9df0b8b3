"""Rows of a Parquet file, a few at a time.

Pages are decoded as they are needed and nothing is read ahead, so that memory is bounded by some pages of the
columns that are asked for, whatever the size of a row group. Checksums of pages are compared if there are any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zslurm.train.errors import DataError

_STREAMED = {"buffer_size": 1 << 20, "pre_buffer": False}


def read_rows(
    path: Path, columns: Sequence[str], start: int, rows_at_once: int, *, nested: bool = False
) -> Iterator[tuple[int, tuple[Any, ...], int]]:
    """Yield the rows from `start` on: (number, one string or None for each of `columns`, rows in the file).

    With `nested` a column may hold lists of messages. All messages of a file have the fields of any of them there;
    those that are null are left out, so that a template sees what it would in a line of JSON.

    Raises:
        DataError: pyarrow is missing; the file cannot be read, is damaged, or lacks a column of text.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: reading .parquet needs the package pyarrow: pip install 'zslurm-train[data]'"
        ) from None
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True, **_STREAMED) as file:
            _check_columns(path, file.schema_arrow, columns, nested=nested)
            metadata = file.metadata
            group, row = 0, 0
            while group < metadata.num_row_groups and row + metadata.row_group(group).num_rows <= start:
                row += metadata.row_group(group).num_rows
                group += 1
            groups = list(range(group, metadata.num_row_groups))
            batches = file.iter_batches(rows_at_once, row_groups=groups, columns=list(columns), use_threads=False)
            for batch in batches if groups else ():
                for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                    if row >= start:
                        yield row, tuple(map(_without_nulls, values)) if nested else values, metadata.num_rows
                    row += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: a text in rows {row} to {row + rows_at_once - 1} is not UTF-8: byte "
            f"0x{error.object[error.start]:02x} at offset {error.start} of it; leave it out"
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as Parquet: {reason}; copy it again") from error


def _without_nulls(value: Any) -> Any:
    """Return a value whose objects lack what is null."""
    if isinstance(value, list):
        return [_without_nulls(value_inside) for value_inside in value]
    if isinstance(value, dict):
        return {
            name: _without_nulls(value_inside) for name, value_inside in value.items() if value_inside is not None
        }
    return value


def _check_columns(path: Path, schema: Any, columns: Sequence[str], *, nested: bool) -> None:
    """Raise a DataError unless every column is there and holds text, or, with `nested`, messages."""
    from pyarrow import types

    for name in columns:
        if name not in schema.names:
            option = "--chat-key" if nested else "--text-column, or with --prompt-key and --completion-key"
            columns_found = ", ".join(schema.names)
            raise DataError(
                f"{path}: has no column {name!r}; its columns are {columns_found} (name one with {option})"
            )
        kind = schema.field(name).type
        text = kind.value_type if types.is_dictionary(kind) else kind
        if nested and (types.is_list(kind) or types.is_large_list(kind)):
            continue
        if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
            raise DataError(
                f"{path}: column {name!r} holds {kind}, not {'lists of messages' if nested else 'text'}"
            )
