"""Set keys of a profile's section `cluster` in its text: every other line, with its comments, stays as it is.

A key is replaced with everything inside it; a new one comes at the end of the section. The text is edited line by
line, and the result is parsed: unless it has the new values and all other values as before, it is not taken.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zslurm.cluster.profile import Profile, find_profile, keep_before, profile_path
from zslurm.cluster.profile_writer import scalar
from zslurm.cluster.site import resolve_text
from zslurm.config import yaml12
from zslurm.config.layers import parse_path
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.files import write_atomically

Values = Mapping[str, Any]
"""Keys below `cluster`, such as `measured` or `doctor.hbm_gb_s`, and their values: plain, or nested mappings."""

_SECTION = "cluster"
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class CannotEdit(ConfigError):
    """The text is written in a form that cannot be edited line by line."""


def block(values: Values) -> str:
    """Return the values as the section `cluster` of a profile, to be pasted."""
    return "\n".join([f"{_SECTION}:", *_lines(_nested(values), "  ")]) + "\n"


def with_keys(text: str, values: Values, name: str) -> str:
    """Return the text of a profile with these keys set.

    Raises:
        CannotEdit: the section, or one that a key is in, is written in braces, or with an anchor.
        ConfigError: the text is no valid YAML.
    """
    expected = _expected(yaml12.parse(text, name).data, values)
    for key, value in values.items():
        text = _with_key(text, (_SECTION, *parse_path(key)), value, name)
    try:
        written = yaml12.parse(text, name).data
    except ConfigError:
        written = None
    if _as_words(written) != _as_words(expected):
        raise CannotEdit(f"{name}: its section `{_SECTION}` is written in a form that is not edited here")
    return text


def write_keys(name: str, values: Values) -> Path:
    """Set keys of the profile `name`, in place; a profile that ships gets one of the user's that extends it.

    The text before stays next to it, as NAME.yaml~.

    Returns:
        The file that was written.

    Raises:
        NotFound: there is no such profile.
        CannotEdit: see `with_keys`.
        ConfigError: the profile would not be valid with these values.
        ZslurmError: it cannot be written.
    """
    profile = find_profile(name)
    path = profile.path or profile_path(name)
    if profile.path is None:
        profile = Profile(name, "user", path)
        text = f"{_SECTION}:\n  extends: {name}\n"
    else:
        text = profile.read()
    edited = with_keys(text, values, profile.file)
    resolve_text(profile, edited)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            keep_before(path, edited)
        write_atomically(path, edited)
    except OSError as error:
        raise ZslurmError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def _nested(values: Values) -> dict[str, Any]:
    """Return dotted keys as nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = (str(word) for word in parse_path(key))
        inside = nested
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = value
    return nested


def _expected(data: Any, values: Values) -> Any:
    """Return the data of a profile with the values set."""
    merged: dict[str, Any] = copy.deepcopy(data) if isinstance(data, dict) else {}
    for key, value in values.items():
        inside = merged
        *parents, last = (_SECTION, *(str(word) for word in parse_path(key)))
        for parent in parents:
            below = inside.get(parent)
            inside[parent] = below if isinstance(below, dict) else {}
            inside = inside[parent]
        inside[last] = value
    return merged


def _as_words(value: Any) -> Any:
    """Return data with the keys of mappings as words, as YAML reads them."""
    if isinstance(value, dict):
        return {str(key): _as_words(item) for key, item in value.items()}
    return [_as_words(item) for item in value] if isinstance(value, list | tuple) else value


def _with_key(text: str, path: tuple[Any, ...], value: Any, name: str) -> str:
    """Return the text with one key set; its sections are made if they are missing."""
    lines, lines_of_path = text.splitlines(), yaml12.parse(text, name).lines
    if path in lines_of_path:
        start, indent = lines_of_path[path] - 1, _indent(lines[lines_of_path[path] - 1])
        end = _end_of(lines, start, indent)
        return _joined([*lines[:start], *_lines({path[-1]: value}, " " * indent), *lines[end:]])
    depth = max(depth for depth in range(len(path)) if path[:depth] in lines_of_path or not depth)
    inner: Any = value
    for key in reversed(path[depth + 1 :]):
        inner = {key: inner}
    if not depth:
        return _joined([*lines, *_lines({path[0]: inner}, "")])
    start = lines_of_path[path[:depth]] - 1
    indent = _indent(lines[start])
    if not re.fullmatch(r"\s*[^\s#:]+:\s*(#.*)?", lines[start]):
        raise CannotEdit(f"{name}:{start + 1}: {path[depth - 1]}: is not written as a block of lines")
    end = _end_of(lines, start, indent)
    children = [
        lines_of_path[path_known]
        for path_known in lines_of_path
        if len(path_known) == depth + 1 and path_known[:depth] == path[:depth]
    ]
    inside = _indent(lines[children[0] - 1]) if children else indent + 2
    return _joined([*lines[:end], *_lines({path[depth]: inner}, " " * inside), *lines[end:]])


def _end_of(lines: list[str], start: int, indent: int) -> int:
    """Return the line behind a key's block: comments and empty lines behind its last value are not its own."""
    end = start + 1
    for number in range(start + 1, len(lines)):
        line = lines[number]
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if _indent(line) <= indent:
            break
        end = number + 1
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[Any, Any], indent: str) -> list[str]:
    """Return a mapping as lines of YAML; a mapping without mappings inside on one line, if it is short."""
    lines_out = []
    for key, value in values.items():
        word = str(key) if isinstance(key, int) or _WORD.fullmatch(str(key)) else scalar(str(key))
        if not isinstance(value, Mapping):
            lines_out.append(f"{indent}{word}: {_plain(value)}")
            continue
        flow = "{" + ", ".join(f"{key_word}: {_plain(item)}" for key_word, item in value.items()) + "}"
        if len(flow) < 80 and not any(isinstance(item, Mapping) for item in value.values()) and _words(value):
            lines_out.append(f"{indent}{word}: {flow}")
        else:
            lines_out += [f"{indent}{word}:", *_lines(value, indent + "  ")]
    return lines_out


def _words(values: Mapping[Any, Any]) -> bool:
    """Return whether keys and values can be in braces as they are."""
    keys = all(isinstance(key, int) or _WORD.fullmatch(str(key)) for key in values)
    return keys and all(not isinstance(item, str) or _WORD.fullmatch(item) for item in values.values())


def _plain(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return scalar(value) if isinstance(value, str) else json.dumps(value)
