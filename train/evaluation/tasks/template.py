"""Jinja templates over the fields of a document, as lm-evaluation-harness renders them.

A template that is the name of a field is that field's value as it is. Rendering is jinja's sandboxed one: a task
file from elsewhere reaches no attribute that runs anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from zslurm.train.errors import DataError


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    return re.sub(pattern, replacement, text, count=count)


_ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_ENVIRONMENT.filters["regex_replace"] = _regex_replace


@lru_cache(maxsize=1024)
def _compiled(text: str) -> Template:
    return _ENVIRONMENT.from_string(text)


def render(key: str, template: str, fields: Mapping[str, Any]) -> str:
    """Return a rendered template.

    Raises:
        DataError: it is no template, or a field that it names is missing; the message begins with `key`.
    """
    try:
        return _compiled(template).render(**fields)
    except TemplateError as error:
        raise DataError(f"{key}: {error.message}; the document has {', '.join(fields) or 'no field'}") from error
    except Exception as error:  # whatever the expression of a template does with a field
        raise DataError(f"{key}: {type(error).__name__}: {error}") from error


def no_field(key: str, name: str, fields: Mapping[str, Any]) -> DataError:
    """Return the error of a document that lacks a field."""
    return DataError(f"{key}: the document has no field {name!r}; it has {', '.join(fields) or 'none'}")


def value_of(key: str, template: str, fields: Mapping[str, Any]) -> Any:
    """Return the field that `template` names, or the template rendered.

    Raises:
        DataError: as `render`.
    """
    return fields[template] if template in fields else render(key, template, fields)


def list_of(key: str, template: str, fields: Mapping[str, Any]) -> list[str]:
    """Return a list of strings: a field, or what a template makes, written as a Python list.

    Raises:
        DataError: it is none.
    """
    found = value_of(key, template, fields)
    if isinstance(found, str):
        try:
            found = ast.literal_eval(found)
        except (SyntaxError, ValueError):
            if found.isidentifier():
                raise no_field(key, found, fields) from None
            raise DataError(f"{key}: makes no list: {found[:60]!r}") from None
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise DataError(f"{key}: makes no list of strings: {str(found)[:60]}")
    return list(found)
