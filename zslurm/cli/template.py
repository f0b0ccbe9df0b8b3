"""`zslurm template ls|show`."""

from __future__ import annotations

from typing import Annotated

import typer

from zslurm.cli.options import Json

app = typer.Typer(help="The templates of job scripts.", no_args_is_help=True)


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the templates.

    Example: zslurm template ls
    """
    from zslurm.cli.output import print_json, print_table
    from zslurm.launch.render import shipped_templates

    found = [template for name, template in shipped_templates().items() if not name.startswith("_")]
    if json:
        print_json([{"name": template.name, "place": template.place} for template in found])
    else:
        print_table(["name", "place"], [[template.name, template.place] for template in found])


@app.command()
def show(name: Annotated[str, typer.Argument(help="Name of a template, or a path.", show_default=False)]) -> None:
    """Print a template.

    Example: zslurm template show train
    """
    from zslurm.launch.render import find_template

    print(find_template(name).source, end="")
