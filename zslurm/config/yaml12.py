"""YAML with the scalars of YAML 1.2's core schema, and the line that each value came from.

PyYAML resolves scalars by YAML 1.1: `24:00:00` becomes 86400, `no` becomes False, `010` becomes 8 and `8e12`
stays a word. Each of these has spoilt a cluster job. Here the core schema decides: `24:00:00` and `no`
are words, `010` is ten, `8e12` is a number (yamlcore has its resolvers for PyYAML's loader). Only mappings,
sequences and scalars are built, here and not by the library's constructor, which would lose their lines and take
tags.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
import yamlcore
from yaml.error import MarkedYAMLError

from zslurm.core.errors import ConfigError, NotFound

STDIN = Path("-")

Key = str | int
KeyPath = tuple[Key, ...]

_INTEGER = "tag:yaml.org,2002:int"

MAX_DIGITS = 400
"""Of an integer; Python itself refuses to print integers of thousands of digits."""


@dataclass(frozen=True)
class YamlDocument:
    """A parsed file: its data, and the 1-based line of every key path in it."""

    data: Any
    lines: dict[KeyPath, int]


class _Loader(yamlcore.CoreLoader):  # type: ignore[misc] # it has no types
    """Composes nodes; a tag would be a request to build something else."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise MarkedYAMLError(None, None, "tags are not supported", event.start_mark)  # type: ignore[arg-type]
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """Return the value of a scalar.

        Raises:
            ValueError: an integer of more than MAX_DIGITS digits.
        """
        if len(node.value) > MAX_DIGITS and node.tag == _INTEGER:
            raise ValueError(f"a number of more than {MAX_DIGITS} digits")
        return self.construct_object(node)


def plain_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar by YAML 1.2's core schema."""
    loader = _Loader("")
    return loader.scalar(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text))


def _build(
    loader: _Loader, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str, open_ids: frozenset[int]
) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if id(node) in open_ids:
        raise ConfigError(f"{name}:{line}: an alias refers to the mapping or list that it is in")
    if isinstance(node, yaml.ScalarNode):
        try:
            return loader.scalar(node)
        except ValueError as error:
            raise ConfigError(f"{name}:{line}: {error}") from error
    inside = open_ids | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, (*path, i), lines, name, inside) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    mapping: dict[Key, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{name}:{key_line}: a key must be a word, not a list or a mapping")
        key = key_node.value
        if key in mapping:
            raise ConfigError(f"{name}:{key_line}: the key {json.dumps(key)} is given a second time; keep one")
        lines[(*path, key)] = key_line
        mapping[key] = _build(loader, value_node, (*path, key), lines, name, inside)
    return mapping


def parse(text: str, name: str) -> YamlDocument:
    """Parse one YAML document; `name` is what error messages call it (a path, or `--set`).

    Raises:
        ConfigError: not YAML, more than one document, a tag, a duplicate key, or a self-referring alias.
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return YamlDocument(None if node is None else _build(loader, node, (), lines, name, frozenset()), lines)
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid YAML: lists or mappings are nested too deeply") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        shown = text.splitlines()[line].strip() if line < len(text.splitlines()) else "end of file"
        raise ConfigError(
            f"{name}:{line + 1}: not valid YAML: {error.problem or error.context}: {shown}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.2 would read as another value than PyYAML does."""

    def text(self, value: str) -> yaml.Node:
        """Return the node of a string."""
        quoted = plain_scalar(value) != value or not value
        return self.represent_scalar("tag:yaml.org,2002:str", value, style='"' if quoted else None)


_Dumper.add_representer(str, _Dumper.text)


def dump(value: Any) -> str:
    """Return YAML that `parse` reads as the same value."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
    )


def called(path: Path) -> str:
    """Return what messages and origins call a file."""
    return "standard input" if path == STDIN else str(path)


def read(path: Path) -> YamlDocument:
    """Parse the file at `path`; `-` is standard input.

    Raises:
        NotFound: there is no such file.
        ConfigError: it cannot be read, is not UTF-8, or is not valid YAML.
    """
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return parse(text, called(path))
