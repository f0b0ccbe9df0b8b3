"""Reference of events, and of what Python programs may import."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import zslurm
import zslurm.run.events as _events  # noqa: F401 - fills CLASSES
from docs.tables.markdown import table
from zslurm.api.submission import submit
from zslurm.run.events.event import CLASSES, Event

PACKAGES = ("zslurm.run.metrics.columns", "zslurm.checkpoint_tools", "zslurm.train.hub")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")


def events() -> str:
    """Return every kind of event with its meaning and the fields of its rows."""
    return table(("event", "meaning", "fields"), (_event(name, kind) for name, kind in sorted(CLASSES.items())))


def _event(name: str, kind: type[Event]) -> tuple[str, str, str]:
    inherited = (vars(base).get("__annotations__", {}) for base in reversed(kind.__mro__) if base is not Event)
    fields = {field: hint for hints in inherited for field, hint in hints.items() if "ClassVar" not in hint}
    shown = (f"`{field}` ({hint.replace(' | None', ', optional')})" for field, hint in fields.items())
    return f"`{name}`", " ".join((kind.__doc__ or "").split()), "; ".join(shown) or "-"


def python_api() -> str:
    """Return what `import zslurm` offers and every public name of the packages, with signature and docstring."""
    return "\n".join([*_api(), *(part for package in PACKAGES for part in _package(package))])


def _api() -> Iterator[str]:
    yield "## zslurm\n"
    yield "[Python](../python.md) has examples.\n"
    for public in zslurm.__all__:
        value = submit if public == "submit" else getattr(zslurm, public)
        if public == "progress":
            yield from _described("progress.step", value.step, "###")
        elif inspect.isclass(value) or inspect.isfunction(value):
            yield from _with_methods(public, value)


def _with_methods(public: str, value: object) -> Iterator[str]:
    yield from _described(public, value, "###")
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for method, found in vars(value).items():
            function = found.__func__ if isinstance(found, classmethod) else found
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                yield from _described(f"{public}.{method}", function, "####")


def _package(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}\n"
    yield _first(module) + "\n"
    for public, value in sorted(vars(module).items()):
        if public.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__.startswith(name):
            yield from _with_methods(public, value)


def _default(function: re.Match[str]) -> str:
    return "..." if function[1].endswith("<lambda>") else function[1]


def _first(value: object) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def _described(name: str, value: object, level: str) -> Iterator[str]:
    yield f"{level} `{name}`\n"
    if inspect.isfunction(value):
        signature = re.sub(r"(: |-> )'([^']+)'", r"\1\2", str(inspect.signature(value)))
        signature = re.sub(r"<function ([\w.<>]+) at 0x\w+>", _default, signature)  # no address of memory
        signature = signature.replace("(cls, ", "(", 1)
        yield f"```text\n{name}{signature}\n```\n"
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):
        return  # what a dataclass without a docstring gets
    yield _markdown(text)


def _markdown(text: str) -> str:
    """Return a docstring in Google's form as Markdown."""
    lines, section = [], False
    for line in text.split("\n"):
        if found := _SECTION.match(line):
            section = True
            lines += [f"**{found[1]}**", ""]
        elif section and re.match(r"    \S", line):
            what, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{what}`: {rest}" if colon and "`" not in what else f"- {line.strip()}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines).replace("<", "&lt;") + "\n"


TABLES = (events, python_api)
