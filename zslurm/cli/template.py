"""`zslurm config template`: list, copy, check and compare the templates of job scripts."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import nodes

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Cluster, Json, complete_templates
from zslurm.cli.terminal.table import Column, print_table
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, say
from zslurm.core.errors import CheckFailed, ConfigError, NotFound, ZslurmError
from zslurm.core.files import write_atomically
from zslurm.core.paths import expand
from zslurm.submit.resolve import resolve_run
from zslurm.submit.script.render import render
from zslurm.submit.script.sample_run import sample_run
from zslurm.submit.script.template_check import check_template
from zslurm.submit.script.templates import (
    SUFFIXES,
    Template,
    TemplateEnvironment,
    find_template,
    own_templates,
    shipped_templates,
    user_templates_dir,
)
from zslurm.submit.submit import run_dir_of

app = typer.Typer(help="The templates of job scripts.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of a template, or a path.", autocompletion=complete_templates),
]
RunFile = Annotated[
    Path | None, typer.Option("--run", metavar="RUN_FILE", help="Try it on this run; default: a sample run.")
]

_COPY = """\
{{# A script of your own. It extends the one that ships with zslurm: what you leave out stays as it is there, also
   after an upgrade. Its blocks, in their order: {blocks}.
   `super()` is what zslurm has in a block. #}}
{{% extends "{base}" %}}

{{% block setup %}}
{{{{ super() }}}}
# Your own lines; they run on the first node of the job, before the supervisor starts.
{{% endblock %}}
"""


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the templates: your own, the site's, and the shipped ones.

    Example: zslurm config template ls
    """
    shipped, user_templates = shipped_templates(), own_templates()
    shown = [
        template for template in [*user_templates.values(), *shipped.values()] if not template.name.startswith("_")
    ]
    shown.sort(key=lambda template: template.name)
    used = shipped | user_templates
    if json:
        facts = ("name", "owner", "place")
        print_json([{**{name: getattr(t, name) for name in facts}, "used": used[t.name] == t} for t in shown])
        return
    rows = [[t.name, t.owner, t.place, "" if used[t.name] == t else "hidden by yours"] for t in shown]
    print_table(["name", "owner", Column("place", "text"), ""], rows)


@app.command()
def show(name: Name) -> None:
    """Print a template.

    Example: zslurm config template show train
    """
    print(find_template(name).source, end="")


@app.command()
def copy(
    name: Name,
    to: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="Another name, or a file; default: the same name, yours."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Copy the whole text; default: a short file that extends it.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Make a template of your own out of one; prints its path.

    Example: zslurm config template copy train
    """
    template = find_template(name)
    if to is not None and ("/" in to or to.endswith(SUFFIXES)):
        target = expand(to).absolute()
    else:
        suffix = next((ending for ending in SUFFIXES if template.file_name.endswith(ending)), SUFFIXES[-1])
        target = user_templates_dir() / f"{to or template.name}{suffix}"
    if target.exists() and not force:
        raise ConfigError(f"{target}: is there already; edit it, or replace it with --force")
    text = template.source if full else _COPY.format(base=template.file_name, blocks=", ".join(_blocks(template)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except OSError as error:
        raise ZslurmError(f"{target}: cannot be written: {error.strerror}") from error
    print(target)
    is_shared = target.parent == user_templates_dir()
    word = target.name.split(".")[0] if is_shared else str(target)
    say(
        f"every run of the template `{word}` uses it"
        if is_shared
        else f"use it with --set cluster.template={word}"
    )
    say(f"check it after an edit: zslurm config template check {word}")


def _blocks(template: Template) -> dict[str, None]:
    """Return the blocks that an heir of the template can replace, in their order in the script."""
    names: dict[str, None] = {}
    for source in (shipped_templates()["train"].source, template.source):
        tree = TemplateEnvironment(template).parse(source)
        names |= dict.fromkeys(block.name for block in tree.find_all(nodes.Block))
    return names


@app.command()
def check(name: Name, run_file: RunFile = None, cluster: Cluster = None, json: Json = False) -> None:
    """Check a template: the script, its shell, what it must have. Exit code 5 on errors.

    Example: zslurm config template check train
    """
    template = find_template(name)
    spec = _run_for(template, run_file, cluster)
    _, findings = check_template(template, spec, run_dir_of(spec))
    errors = [finding for finding in findings if finding.level == "error"]
    if json:
        print_json({"template": template.place, "ok": not errors, "findings": [asdict(f) for f in findings]})
    elif findings:
        print_table(
            [Column("level", "state"), "place", Column("what", "text")],
            [[f.level, f.place, f.message] for f in findings],
        )
    if errors:
        raise CheckFailed(f"{template.place}: {counted(len(errors), 'error')}; it would not be submitted")
    say(f"{template.place}: in order" + (f", {counted(len(findings), 'warning')}" if findings else ""))


@app.command()
def diff(
    name: Name,
    source: Annotated[bool, typer.Option("--source", help="Compare the templates, not their scripts.")] = False,
    run_file: RunFile = None,
    cluster: Cluster = None,
) -> None:
    """Show how your template's script differs from the shipped one's.

    Example: zslurm config template diff train
    """
    own_template = find_template(name)
    shipped = shipped_templates().get(own_template.name, shipped_templates()["train"])
    if own_template == shipped:
        raise NotFound(
            f"{name}: there is no template of your own with this name; `zslurm config template copy {name}`"
        )
    if source:
        before, after = shipped.source, own_template.source
    else:
        spec = _run_for(own_template, run_file, cluster)
        before, after = (
            render(spec, run_dir_of(spec), template=template).text for template in (shipped, own_template)
        )
    for line in difflib.unified_diff(
        before.splitlines(), after.splitlines(), shipped.place, own_template.place, lineterm=""
    ):
        print(line)


def _run_for(template: Template, run_file: Path | None, cluster: str | None) -> RunSpec:
    """Return the run that a template is tried on: the given one, else a sample."""
    if run_file is not None:
        return resolve_run(run_file, cluster=cluster).spec
    return sample_run(cluster, local=template.file_name.endswith(".sh.j2")).spec
