"""Help pages: commands in groups, each with its first sentence, and options with words for values, not types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer import Argument, BadParameter, Context, Option
from typer.core import TyperCommand, TyperGroup

_NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?)"
_RANGE = re.compile(rf"(?:; )?(?:{_NUMBER}<=)?x(?:(<=|>=){_NUMBER})?(?=[;\]])")
_UNBOUNDED, _TINY = 1e6, 1e-3
"""A limit from here on, and a least value above 0 up to here, are a guard that nobody needs to read about."""
_UNLISTED = ("install_completion", "show_completion")
"""Options of Typer's that do what `zslurm completion` does."""
_WORDS = {"int": "N", "float": "X", "Path": "PATH", "str": "TEXT"}
"""What stands for a value of a type if an option names nothing better."""


MORE = "More options"
"""The `rich_help_panel` of options that few users need: `--help` does not show them, `zslurm help --all` does."""

_ALL = "zslurm.all"
"""The key of `Context.meta` that is set if help has all commands and options."""


def show_all(ctx: Any) -> None:
    """Have the help of a command and of its group list everything."""
    ctx.meta[_ALL] = True


class HelpCommand(TyperCommand):
    """A command whose help has no names of Python's types."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return `[OPTIONS]` and the arguments as they are typed."""
        arguments = [
            _argument(parameter) for parameter in self.get_params(ctx) if parameter.param_type_name == "argument"
        ]
        return [*([self.options_metavar] if self.options_metavar else []), *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write_parameters(self, ctx, formatter)


class HelpGroup(TyperGroup):
    """A group whose commands stand under headings, each with its first sentence, which is never cut.

    Attributes:
        headings: the names of commands by heading; commands that are in none come last, under `Commands`.
        further_headings: those that are shown only if everything is asked for.
    """

    headings: Mapping[str, str] = {}
    further_headings: Mapping[str, str] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, and after them the commands."""
        self.format_commands(ctx, formatter)
        _write_parameters(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands that are not hidden."""
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        lines = {name: _first_sentence(command) for name, command in shown.items()}
        longest = max(map(len, lines), default=0)
        groups = {**self.headings, **self.further_headings}
        placed = {name for names in groups.values() for name in names.split()}
        unplaced = [name for name in lines if name not in placed]
        headings = dict(groups if _ALL in ctx.meta else self.headings) or {"Commands": ""}
        last = list(headings)[-1] if not self.further_headings or _ALL in ctx.meta else ""
        for heading, names in headings.items():
            listed = [*names.split(), *(unplaced if heading == last else ())]
            rows = [(name.ljust(longest), lines[name]) for name in listed if name in lines]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def with_help(app: typer.Typer) -> typer.Typer:
    """Have the commands and groups of an application explain themselves with these classes."""
    for command in app.registered_commands:
        command.cls = HelpCommand
    for group in app.registered_groups:
        group.cls = HelpGroup
        if group.typer_instance is not None:
            with_help(group.typer_instance)
    return app


def _first_sentence(command: Any) -> str:
    return str(command.get_short_help_str(1000)).removesuffix(".")


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    arguments, options, left_out = [], [], 0
    for parameter in command.get_params(ctx):
        if getattr(parameter, "rich_help_panel", None) == MORE and _ALL not in ctx.meta:
            left_out += 1
            continue
        record = parameter.get_help_record(ctx)
        if record is None or parameter.name in _UNLISTED:
            continue
        text = _RANGE.sub(_range_in_words, record[1]).replace("[; ", "[").replace("  []", "").rstrip()
        if parameter.param_type_name == "argument":
            name = _argument(parameter).replace("[", "").replace("]", "")
            arguments.append((name, text.replace("  [required]", "")))
        else:
            options.append((_option(parameter), text))
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl(arguments)
    if options:
        with formatter.section("Options"):
            formatter.write_dl(options)
    if left_out:
        words = " ".join(ctx.command_path.split()[1:])
        formatter.write_paragraph()
        formatter.write_text(f"{left_out} more options: zslurm help --all {words}")


def _range_in_words(match: re.Match[str]) -> str:
    first, relation, second = match.groups()
    least, most = (second, None) if relation == ">=" else (first, second)
    if most is not None and float(most) >= _UNBOUNDED:
        most = None
    if most is None:
        if least is None or 0 <= float(least) <= _TINY or float(least) == 1:  # as anybody expects
            return ""
        words = f"at least {least}"
    else:
        words = f"{least} to {most}" if least else f"at most {most}"
    return f"{'; ' if match[0].startswith('; ') else ''}{words}"


def _argument(parameter: Any) -> str:
    """Return an argument as the usage names it."""
    name = parameter.metavar or str(parameter.name).upper()
    many = parameter.nargs != 1 and "..." not in name
    if not parameter.required and not name.startswith("["):
        name = f"[{name}]"
    return name + ("..." if many else "")


def _option(parameter: Any) -> str:
    """Return an option's names, and the word for its value."""
    names = ", ".join(sorted(parameter.opts, key=lambda name: (name.startswith("--"), name)))
    if parameter.secondary_opts:
        names += f" / {', '.join(parameter.secondary_opts)}"
    return names if parameter.is_flag or parameter.count else f"{names} {_value(parameter)}"


def _value(parameter: Any) -> str:
    if parameter.metavar is not None:
        return str(parameter.metavar)
    described: str = parameter.display_type(None).strip("<>").removeprefix("list[").removesuffix("]")
    if "|" in described:
        return described
    return _WORDS.get(described.removesuffix(" range"), _WORDS.get(described.title(), described.upper()))


def help(
    context: Context,
    words: Annotated[
        list[str] | None, Argument(metavar="[COMMAND]...", help="A command, such as `data build`.")
    ] = None,
    every: Annotated[bool, Option("--all", help="All commands, and all options of a command.")] = False,
) -> None:
    """Show the help of a command, with --all everything.

    Example: zslurm help --all data build
    """
    shown: Any = context.parent
    if every:
        show_all(shown)
    for word in words or []:
        if not hasattr(shown.command, "resolve_command") or word not in shown.command.commands:
            raise BadParameter(f"there is no command `{' '.join(words or [])}`; `zslurm help --all` lists them")
        name, command, _ = shown.command.resolve_command(shown, [word])
        shown = type(shown)(command, info_name=name, parent=shown)
    print(shown.command.get_help(shown))
