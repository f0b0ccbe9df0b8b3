"""`zslurm help`: the help of the program and of its commands, whole if it is asked for."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, BadParameter, Context, Option

from zslurm.cli.help import show_all


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
