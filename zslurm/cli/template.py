"""`zslurm template`: list, copy, check and compare the templates of job scripts."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import nodes

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cli.options import Cluster, Json
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, print_table, say
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

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a template, or a path.", show_default=False)]
RunFile = Annotated[
    Path | None, typer.Option("--run", metavar="RUN_FILE", help="Try it on this run; default: a sample run.")
]


@app.command("ls")
def list_(json: Json = False) -> None:
    """List the templates: your own, the site's, and the shipped ones.

    Example: zslurm template ls
    """
    list_templates(as_json=json)


@app.command()
def show(name: Name) -> None:
    """Print a template.

    Example: zslurm template show train
    """
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
    copy_template(name, to=to, full=full, force=force)


@app.command()
def check(name: Name, run_file: RunFile = None, cluster: Cluster = None, json: Json = False) -> None:
    """Render a template, check the script as shell, and look for what it must say; exit code 5 on errors.

    Example: zslurm template check train
    """
    check_templates(name, run_file=run_file, cluster=cluster, as_json=json)


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
    show_diff(name, source=source, run_file=run_file, cluster=cluster)


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


def list_templates(*, as_json: bool) -> None:
    """`zslurm template ls`."""
    shipped, own = shipped_templates(), own_templates()
    shown = [template for template in [*own.values(), *shipped.values()] if not template.name.startswith("_")]
    facts = [
        {
            "name": template.name,
            "owner": template.owner,
            "used": (shipped | own)[template.name] == template,
            "place": template.place,
        }
        for template in sorted(shown, key=lambda template: template.name)
    ]
    if as_json:
        print_json(facts)
        return
    words = {True: "", False: "hidden by yours"}
    print_table(
        ["name", "owner", "place", ""],
        [[str(f["name"]), str(f["owner"]), str(f["place"]), words[bool(f["used"])]] for f in facts],
    )


def copy_template(name: str, *, to: str | None, full: bool, force: bool) -> None:
    """`zslurm template copy`: prints the path of the new file.

    Raises:
        NotFound: no template has the name.
        ConfigError: the file is there already.
        ZslurmError: it cannot be written.
    """
    template = find_template(name)
    target = _target(template, to)
    if target.exists() and not force:
        raise ConfigError(f"{target}: is there already; edit it, or replace it with --force")
    text = template.source if full else _COPY.format(base=template.file_name, blocks=", ".join(_blocks(template)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except OSError as error:
        raise ZslurmError(f"{target}: cannot be written: {error.strerror}") from error
    print(target)
    own = target.parent == user_templates_dir()
    word = target.name.split(".")[0] if own else str(target)
    say(f"every run of the template `{word}` uses it" if own else f"use it with --set cluster.template={word}")
    say(f"check it after an edit: zslurm template check {word}")


def _target(template: Template, to: str | None) -> Path:
    if to is not None and ("/" in to or to.endswith(SUFFIXES)):
        return expand(to).absolute()
    suffix = next(suffix for suffix in SUFFIXES if template.file_name.endswith(suffix) or suffix == SUFFIXES[-1])
    return user_templates_dir() / f"{to or template.name}{suffix}"


def _blocks(template: Template) -> list[str]:
    """The blocks that an heir of the template can replace, in their order in the script."""
    from_base = shipped_templates()["train"]
    names: dict[str, None] = {}
    for source in (from_base.source, template.source):
        tree = TemplateEnvironment(template).parse(source)
        names |= dict.fromkeys(block.name for block in tree.find_all(nodes.Block))
    return list(names)


def _run_for(template: Template, run_file: Path | None, cluster: str | None) -> RunSpec:
    """The run that a template is tried on: the given one with this template, else a sample."""
    if run_file is not None:
        return resolve_run(run_file, cluster=cluster).spec
    return sample_run(cluster, local=template.file_name.endswith(".sh.j2")).spec


def check_templates(name: str, *, run_file: Path | None, cluster: str | None, as_json: bool) -> None:
    """`zslurm template check`.

    Raises:
        CheckFailed: the template has errors.
        NotFound: no template has the name.
    """
    template = find_template(name)
    spec = _run_for(template, run_file, cluster)
    _, findings = check_template(template, spec, run_dir_of(spec))
    errors = [finding for finding in findings if finding.level == "error"]
    if as_json:
        print_json({"template": template.place, "ok": not errors, "findings": [asdict(f) for f in findings]})
    elif findings:
        print_table(["level", "place", "what"], [[f.level, f.place, f.message] for f in findings])
    if errors:
        raise CheckFailed(f"{template.place}: {counted(len(errors), 'error')}; it would not be submitted")
    say(f"{template.place}: in order" + (f", {counted(len(findings), 'warning')}" if findings else ""))


def show_diff(name: str, *, source: bool, run_file: Path | None, cluster: str | None) -> None:
    """`zslurm template diff`: how the script of a template differs from that of the shipped one.

    Raises:
        NotFound: no template has the name.
        ConfigError: it cannot be rendered.
    """
    own = find_template(name)
    shipped = shipped_templates().get(own.name, shipped_templates()["train"])
    if own == shipped:
        raise NotFound(f"{name}: there is no template of your own with this name; `zslurm template copy {name}`")
    if source:
        before, after = shipped.source, own.source
    else:
        spec = _run_for(own, run_file, cluster)
        before, after = (render(spec, run_dir_of(spec), template=template).text for template in (shipped, own))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), shipped.place, own.place, lineterm="")
    for line in lines:
        print(line)
