"""What pydantic found wrong, as lines a person can act on: place, key, expectation, the nearest valid key."""

from __future__ import annotations

import difflib
import json
import re
import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from zslurm.config.layers import LAYER_ORDER, Layers, Origin, show_path
from zslurm.config.yaml12 import KeyPath


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section inside `tuple[Section, ...]`, `Section | None`, `Annotated[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, list, Union, types.UnionType) or hasattr(annotation, "__metadata__"):
        for inner in get_args(annotation):
            found = _model_in(inner)
            if found is not None:
                return found
    return None


def _section_at(spec: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    section: type[BaseModel] | None = spec
    for part in path:
        if isinstance(part, int):
            continue
        if section is None or part not in section.model_fields:
            return None
        section = _model_in(section.model_fields[part].annotation)
    return section


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _clean_path(location: tuple[str | int, ...], data: Any) -> KeyPath:
    """Pydantic's location without the union members it appends: only parts that address the data."""
    path: list[str | int] = []
    value = data
    for part in location:
        if isinstance(value, dict) and isinstance(part, str):
            path.append(part)
            value = value.get(part)
        elif isinstance(value, list | tuple) and isinstance(part, int):
            path.append(part)
            value = value[part] if part < len(value) else None
        else:
            break
    return tuple(path)


def _latest_mentioned(message: str, path: KeyPath, layers: Layers, spec: type[BaseModel]) -> Origin:
    """Where a rule over several keys was broken: the last given of the keys that its message names."""
    section = _section_at(spec, path)
    named = [key for key in section.model_fields if re.search(rf"\b{key}\b", message)] if section else []
    given = [layers.origins[(*path, key)] for key in named if (*path, key) in layers.origins]
    return max(
        given, key=lambda origin: LAYER_ORDER.index(origin.layer.split(" ")[0]), default=layers.origin(path)
    )


def describe(error: ValidationError, layers: Layers, spec: type[BaseModel]) -> list[str]:
    """One line for each problem, in the order of the sections."""
    lines: list[str] = []
    reported: list[KeyPath] = []
    for item in error.errors():
        path = _clean_path(item["loc"], layers.data)
        if any(deeper[: len(path)] == path and deeper != path for deeper in reported):
            continue  # a list that is too short because its one item was refused
        reported.append(path)
        key = show_path(path)
        place = layers.origin(path).place
        kind = item["type"]
        if kind == "extra_forbidden":
            section = _section_at(spec, path[:-1])
            known = list(section.model_fields) if section else []
            near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
            problem = f"{key}: unknown key; {hint}"
        elif kind == "missing":
            section = _section_at(spec, path[:-1])
            described = section.model_fields[str(path[-1])].description if section else None
            problem = f"{key}: required, but not given" + (f" ({described})" if described else "")
        elif kind == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            place = _latest_mentioned(message, path, layers, spec).place
            problem = f"{key}: {message}"
        elif kind == "too_short":
            problem = f"{key}: expected at least one item, got {_shown(item['input'])}"
        else:
            message = item["msg"].replace("Input should be", "expected").replace("a valid tuple", "a list")
            message = re.sub(r"a valid dictionary.*", "a mapping of keys to values", message)
            problem = f"{key}: {message}, got {_shown(item['input'])}"
        line = f"{place}: {problem}"
        if line not in lines:
            lines.append(line)
    return lines
