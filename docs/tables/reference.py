"""Reference pages: every command with its options, every key of a run file, every exit code."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperGroup
from typer.main import get_group

from docs.tables.markdown import table
from zslurm.cli.commands import COMMANDS, load
from zslurm.cli.main import app
from zslurm.config.spec import RunSpec
from zslurm.core.errors import Exit

_EXITS = {
    Exit.DONE: ("what was asked is done", "-"),
    Exit.FAILED: ("it failed; the last line names the reason", "`zslurm status RUN`, `zslurm logs RUN --errors`"),
    Exit.USAGE: (
        "an option, a run file or a profile is wrong; nothing changed",
        "correct what the line names",
    ),
    Exit.NOT_FOUND: (
        "a run, job, file or template that you named is missing",
        "`zslurm status` lists your runs",
    ),
    Exit.SLURM_UNAVAILABLE: ("Slurm's commands are missing, or its controller does not answer", "try again"),
    Exit.CHECK_FAILED: ("what was checked is not in order; a line for each fault", "fix these, check again"),
    Exit.INTERRUPTED: ("the run was interrupted and has saved", "`zslurm submit` the same file: it continues"),
    Exit.STOPPED: (
        "stopped for good: another start would end the same way",
        "read the cause before you submit",
    ),
}


def exit_codes() -> str:
    """Return every exit code, with what to do."""
    rows = ((f"{code.value}", *_EXITS[code]) for code in Exit)
    return table(("exit code", "meaning", "what to do next"), rows)


def commands() -> str:
    """Return every command with its arguments and options, in the order of `zslurm --help`."""
    root = get_group(app)
    names = [name for name in COMMANDS if not getattr(root.commands[name], "hidden", False)]
    return "\n".join(part for name in names for part in _described(load(name), f"zslurm {name}"))


def _described(command: Any, path: str) -> Iterator[str]:
    """Yield a command, then its subcommands where it is a group."""
    if command.hidden:
        return
    yield f"## `{path}`\n" if path.count(" ") == 1 else f"### `{path}`\n"
    yield _prose(command.help or "")
    if isinstance(command, TyperGroup):
        for name, part in command.commands.items():
            yield from _described(part, f"{path} {name}")
        return
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    yield f"```text\n{' '.join([path, '[OPTIONS]', *(_metavar(one) for one in arguments)])}\n```\n"
    if rows := [row for one in shown if (row := _row(one))]:
        yield table(("argument or option", "what"), rows)


def _prose(text: str) -> str:
    """Return help as paragraphs of Markdown; a literal block of it (after \\b) keeps its lines."""
    parts = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            parts.append("```text\n" + paragraph.removeprefix("\b").strip("\n") + "\n```")
        else:
            parts.append(_escaped(" ".join(paragraph.split())))
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Return text in which what is outside of code is no HTML and no link."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


def _metavar(argument: Any) -> str:
    word = (argument.metavar or argument.name or "").upper().strip("[].")
    word += "..." if argument.nargs == -1 else ""
    return word if argument.required else f"[{word}]"


def _row(parameter: Any) -> tuple[str, str] | None:
    what = " ".join((parameter.help or "").split())
    if parameter.param_type_name == "argument":
        return (f"`{_metavar(parameter)}`", _escaped(what)) if what else None
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    if not callable(default) and default not in (None, False, True, (), []) and "default" not in what:
        what += f" (default: `{getattr(default, 'value', default)}`)"
    return names, _escaped(what)


def run_file_keys() -> str:
    """Return every key of a run file by section: type, default, meaning, and who changes it.

    Raises:
        ValueError: a key has no user in key_users.yaml, or an entry there has no key.
    """
    users = yaml.safe_load((Path(__file__).parent / "key_users.yaml").read_text(encoding="utf-8"))
    text = "\n".join(
        part
        for name, field in RunSpec.model_fields.items()
        for part in (f"## {name}\n", *_section(name, field.annotation, field, users))
    )
    if users:
        raise ValueError(f"docs/tables/key_users.yaml: no key of a run file is called {', '.join(users)}")
    return text


def _section(path: str, kind: Any, field: FieldInfo, users: dict[str, str]) -> Iterator[str]:
    rows, inner = [], []
    model = _model_in(kind)
    if model is None:
        rows.append(_key(path, field, users))
    else:
        for name, part in model.model_fields.items():
            if isinstance(part.json_schema_extra, dict) and part.json_schema_extra.get("readOnly"):
                continue  # a command writes it, not a person
            prefix = f"{path}[]" if get_origin(kind) in (tuple, list) else path
            if _model_in(part.annotation) is None:
                rows.append(_key(f"{prefix}.{name}", part, users))
            else:
                inner.append((f"{prefix}.{name}", part))
    if rows:
        yield table(("key", "type", "default", "what", "who changes it"), rows)
    for name, part in inner:
        yield f"### {name}\n"
        if part.description:
            yield f"{part.description[0].upper()}{part.description[1:]}.\n"
        yield from _section(name, part.annotation, part, users)


def _model_in(kind: Any) -> type[BaseModel] | None:
    """Return the section that a type is, or is a list of, or may be; None where it is none."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for part in get_args(kind) if (found := _model_in(part)) is not None), None)


def _key(path: str, field: FieldInfo, users: dict[str, str]) -> tuple[str, ...]:
    if path not in users:
        raise ValueError(f"docs/tables/key_users.yaml: who changes {path}, and why? Without such a person it goes")
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "-" if value in (None, (), {}, []) else f"`{_plain(value)}`"
    return f"`{path}`", _type(field.annotation), default, field.description or "", users.pop(path)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): ""}
_PLURALS = {"whole number": "whole numbers", "number": "numbers", "text": "texts"}


def _type(kind: Any) -> str:
    """Return a type in words."""
    if kind in _WORDS:
        return _WORDS[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{_plain(part)}`" for part in parts)
    if origin in (tuple, list):
        return f"list of {_plural(_type(parts[0]))}"
    if origin is dict:
        return f"mapping of names to {_plural(_type(parts[1]))}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(word for part in parts if (word := _type(part))))
    if parts:  # Annotated
        return _type(parts[0])
    return "text"


def _plural(words: str) -> str:
    return " or ".join(_PLURALS.get(word, word) for word in words.split(" or "))


TABLES = (exit_codes, commands, run_file_keys)
