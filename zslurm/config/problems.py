"""What pydantic found wrong, as lines a person can act on: place, key, expectation, the nearest valid key."""

from __future__ import annotations

import difflib
import re
import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zslurm.config.layers import Layers, Origin, parse_path, rank_of, show_path
from zslurm.config.text import shown_json
from zslurm.config.yaml12 import KeyPath


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section inside `tuple[Section, ...]`, `Section | None`, `Annotated[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, list, Union, types.UnionType) or hasattr(annotation, "__metadata__"):
        for inner in get_args(annotation):
            model = _model_in(inner)
            if model is not None:
                return model
    return None


def _section_at(spec: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    section: type[BaseModel] | None = spec
    for key_part in path:
        if isinstance(key_part, int):
            continue
        if section is None or key_part not in section.model_fields:
            return None
        section = _model_in(section.model_fields[key_part].annotation)
    return section


def _elsewhere(key: str, spec: type[BaseModel]) -> list[str]:
    """Return the sections' keys of exactly this name: the commonest slip is a key in the wrong section."""
    places_found: list[str] = []
    for name, field in spec.model_fields.items():
        section = _model_in(field.annotation)
        if section is not None and key in section.model_fields:
            places_found.append(f"{name}[0].{key}" if get_origin(field.annotation) is tuple else f"{name}.{key}")
    return places_found


def _shown(value: Any) -> str:
    text = shown_json(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _clean_path(location: tuple[str | int, ...], data: Any, *, missing: bool) -> KeyPath:
    """Return pydantic's location without the union members it appends: what addresses the data."""
    path: list[str | int] = []
    value = data
    for key_part in location:
        if isinstance(value, dict) and isinstance(key_part, str) and (missing or key_part in value):
            path.append(key_part)
            value = value.get(key_part)
        elif isinstance(value, list | tuple) and isinstance(key_part, int):
            path.append(key_part)
            value = value[key_part] if key_part < len(value) else None
        else:
            break
    return tuple(path)


def _latest_mentioned(message: str, path: KeyPath, layers: Layers, spec: type[BaseModel]) -> Origin:
    """Return the origin of a broken rule over several keys: of those in its message, the one of the latest layer.

    Within a layer it is the first that is named: the message's subject.
    """
    section = _section_at(spec, path)
    keys = rf"\b(?:{'|'.join(section.model_fields)})\b(?:\.\w[\w-]*|\[\d+\])*" if section else r"(?!)"
    paths = [(*path, *parse_path(key)) for key in re.findall(keys, message)]
    origins = [layers.origins[candidate] for candidate in paths if candidate in layers.origins]
    return max(origins, key=rank_of, default=layers.origin(path))


def describe(error: ValidationError, layers: Layers, spec: type[BaseModel]) -> list[str]:
    """Return one line for each problem, in the order of the sections."""
    lines: list[str] = []
    reported: list[KeyPath] = []
    for item in error.errors():
        path = _clean_path(item["loc"], layers.data, missing=item["type"] == "missing")
        if any(deeper[: len(path)] == path for deeper in reported):
            continue  # a list that is too short because its one item was refused, or the next member of a union
        reported.append(path)
        location, problem = _problem(item, path, layers, spec)
        line = ": ".join(word for word in (location, show_path(path), problem) if word)
        if line not in lines:
            lines.append(line)
    return lines


def _problem(item: ErrorDetails, path: KeyPath, layers: Layers, spec: type[BaseModel]) -> tuple[str, str]:
    """Return the place of a problem, and what it is."""
    kind, location = item["type"], layers.origin(path).place
    if kind == "extra_forbidden":
        return location, f"unknown key; {_nearest(path, spec)}"
    if kind == "missing":
        section = _section_at(spec, path[:-1])
        field = section.model_fields.get(str(path[-1])) if section else None
        described = f" ({field.description})" if field and field.description else ""
        return (location if len(path) > 1 else layers.top.place), f"required, but not given{described}"
    if kind == "value_error":
        message = item["msg"].removeprefix("Value error, ")
        return _latest_mentioned(message, path, layers, spec).place, message
    if kind == "too_short":
        return location, f"expected at least one item, got {_shown(item['input'])}"
    message = item["msg"].replace("Input should be", "expected").replace("a valid tuple", "a list")
    message = re.sub(r"a valid dictionary.*", "a mapping of keys to values", message)
    message = re.sub(r", (got|unable to) .*", "", message)
    return location, f"{message}, got {_shown(item['input'])}"


def _nearest(path: KeyPath, spec: type[BaseModel]) -> str:
    """Return what may have been meant by an unknown key."""
    section = _section_at(spec, path[:-1])
    keys = list(section.model_fields) if section else []
    if len(path) == 1:
        keys.insert(0, "extends")
    near = _elsewhere(str(path[-1]), spec) or difflib.get_close_matches(str(path[-1]), keys, 1, 0.5)
    return f"did you mean `{'` or `'.join(near)}`?" if near else f"known here: {', '.join(keys)}"
