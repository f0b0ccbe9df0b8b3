"""`zslurm template ls|show|copy|check|diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zslurm.cli.options import Cluster, Json

app = typer.Typer(help="The templates of job scripts.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a template, or a path.", show_default=False)]
RunFile = Annotated[
    Path | None, typer.Option("--run", metavar="RUN_FILE", help="Try it on this run; default: a sample run.")
]


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the templates: your own, the site's, and the shipped ones.

    Example: zslurm template ls
    """
    from zslurm.report.templates import list_templates

    list_templates(as_json=json)


@app.command()
def show(name: Name) -> None:
    """Print a template.

    Example: zslurm template show train
    """
    from zslurm.submit.script.templates import find_template

    print(find_template(name).source, end="")


@app.command()
def copy(
    name: Name,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="NAME|PATH", help="Another name, or a file; default: the same name, yours."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Copy the whole text; default: a short file that extends it.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Make a template of your own out of one; prints its path.

    Example: zslurm template copy train
    """
    from zslurm.report.templates import copy_template

    copy_template(name, to=to, full=full, force=force)


@app.command()
def check(name: Name, run_file: RunFile = None, cluster: Cluster = None, json: Json = False) -> None:
    """Render a template, check the script as shell, and look for what it must say; exit code 5 on errors.

    Example: zslurm template check train
    """
    from zslurm.report.templates import check

    check(name, run_file=run_file, cluster=cluster, as_json=json)


@app.command()
def diff(
    name: Name,
    source: Annotated[bool, typer.Option("--source", help="Compare the templates, not their scripts.")] = False,
    run_file: RunFile = None,
    cluster: Cluster = None,
) -> None:
    """Show how the script of your template differs from that of the shipped one.

    Example: zslurm template diff train
    """
    from zslurm.report.templates import diff

    diff(name, source=source, run_file=run_file, cluster=cluster)
