"""Check whether a template makes a script that can train, in `zslurm config template check` and at submission.

It must render, be valid shell, and keep the lines without which a run is lost: the options that sbatch must see,
the variables, and the loop around the supervisor. What only looks odd is a warning.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from jinja2 import meta, nodes

from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.run.run_dir import RunDir
from zslurm.submit.script.render import JobScript, render, template_of, template_variables
from zslurm.submit.script.templates import Template, TemplateEnvironment, as_comment

# Without these a run is placed wrongly, cannot be followed, or is killed before it has saved.
_ESSENTIAL = {"nodes", "ntasks-per-node", "output", "signal", "requeue", "export", "no-kill"}

# Without these it runs, but is slower.
_PLACES_THE_JOB = {
    "exclusive": ": another job on a node would share its rails",
    "switches": ": the job would be spread over more leaf switches than it needs",
}


@dataclass(frozen=True)
class TemplateFinding:
    """One thing that is wrong, or odd, and where."""

    level: Literal["error", "warning"]
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def check_template(
    template: Template, spec: RunSpec, run: RunDir, *, start_over: bool = False
) -> tuple[JobScript | None, list[TemplateFinding]]:
    """Render a template for a run; returns the script, if there is one, and everything that is wrong with it."""
    unknown = list(_undefined(template, set(template_variables(spec, run))))
    try:
        script = render(spec, run, template=template, start_over=start_over)
    except ConfigError as error:
        location, _, message = str(error).partition(": ")
        is_known = any(finding.place == location for finding in unknown)
        return None, unknown if is_known else [*unknown, TemplateFinding("error", location, message)]
    return script, [*unknown, *_syntax(script), *_missing_lines(script), *_shellcheck(script)]


def checked_script(spec: RunSpec, run: RunDir, *, start_over: bool = False) -> JobScript:
    """Render the script of a submission, and refuse one that is broken.

    The shipped templates need no check, but the site's lines in them do.

    Raises:
        ConfigError: the first error, and how many more there are.
        NotFound: cluster.template names nothing.
    """
    template = template_of(spec)
    script: JobScript | None
    if template.owner == "shipped":
        script = render(spec, run, template=template, start_over=start_over)
        findings = list(_syntax(script))
    else:
        script, findings = check_template(template, spec, run, start_over=start_over)
    errors = [finding for finding in findings if finding.level == "error"]
    if script is None or errors:
        more = f" (and {len(errors) - 1} more: `zslurm config template check`)" if len(errors) > 1 else ""
        raise ConfigError(f"{errors[0]}{more}")
    return script


def _undefined(template: Template, known: set[str]) -> Iterator[TemplateFinding]:
    """Find variables that do not exist, each at its first use."""
    environment = TemplateEnvironment(template)
    try:
        tree = environment.parse(template.source)
    except jinja2.TemplateSyntaxError:
        return  # rendering names the line
    undeclared = meta.find_undeclared_variables(tree) - known
    for node in tree.find_all(nodes.Name):
        if node.name in undeclared:
            undeclared.remove(node.name)
            names = ", ".join(sorted(known))
            yield TemplateFinding(
                "error", f"{template.place}:{node.lineno}", f"'{node.name}' is undefined; there are {names}"
            )


def _syntax(script: JobScript) -> Iterator[TemplateFinding]:
    """Find what `bash -n` refuses."""
    template_place = script.template.place
    bash = shutil.which("bash")
    if bash is None:
        return
    done = subprocess.run(
        [bash, "-n"], input=script.text, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return
    message = (done.stderr.strip().splitlines() or ["bash -n: not valid"])[0]
    match = re.match(r".*?line (?P<line>\d+): (?P<message>.*)", message)
    if match is None:
        yield TemplateFinding("error", template_place, message)
        return
    lines = script.text.splitlines()
    number = min(int(match["line"]), len(lines))
    where = f"line {number} of the script (`{lines[number - 1].strip()}`)" if lines else "the script"
    yield TemplateFinding("error", template_place, f"not valid shell: {where}: {match['message']}")


def _shellcheck(script: JobScript) -> Iterator[TemplateFinding]:
    """Find what shellcheck warns of, if there is one."""
    program = shutil.which("shellcheck")
    if program is None:
        return
    command = [program, "--shell=bash", "--severity=warning", "--format=json1", "-"]
    done = subprocess.run(
        command, input=script.text, capture_output=True, text=True, errors="replace", check=False
    )
    try:
        comments: list[dict[str, Any]] = json.loads(done.stdout)["comments"]
    except (ValueError, KeyError, TypeError):
        return
    lines = script.text.splitlines()
    for comment in comments:
        line = lines[comment["line"] - 1].strip() if 0 < comment["line"] <= len(lines) else ""
        yield TemplateFinding(
            "warning", script.template.place, f"shellcheck SC{comment['code']}: {comment['message']} (`{line}`)"
        )


def _missing_lines(script: JobScript) -> Iterator[TemplateFinding]:
    """Find what a script must have and this one does not."""
    location, variables = script.template.place, script.variables
    lines = script.text.splitlines()

    def line_of(block: str) -> int:
        return _line_of_block(script.template, block)

    def error(message: str) -> TemplateFinding:
        return TemplateFinding("error", location, message)

    if not lines or not lines[0].startswith("#!"):
        yield error("the first line must name the shell: #!/bin/bash")
    if variables["spec"].cluster.launcher == "slurm":
        yield from _directives(location, lines, variables, line_of)
        if any(f"# {as_comment(line)}" not in lines for line in variables["rails"]):
            yield TemplateFinding(
                "warning",
                f"{location}:{line_of('rails')}",
                "does not show the map of rails; keep the block `rails`, or write "
                '{% include "_rails.sh.j2" %} below the #SBATCH lines',
            )
        if "export SUBMITIT_EXECUTOR=slurm" not in lines:
            yield error("has no line `export SUBMITIT_EXECUTOR=slurm`; keep the block `identity`")
    if not any(line.startswith("export ZSLURM_JOB_ID=") for line in lines):
        yield error("does not set ZSLURM_JOB_ID; keep the block `identity`")
    hidden = [name for name in variables["env"] if not any(f"export {name}=" in line for line in lines)]
    if hidden:
        yield error(f"does not export {', '.join(hidden)}; keep the block `environment`")
    if variables["secrets"] and shlex.quote(variables["secrets_file"]) not in script.text:
        yield error("does not read the file of secrets; keep the block `environment`")
    for line in variables["setup"]:
        if line not in lines:
            yield error(f"leaves out a line of cluster.setup (`{line}`); keep the block `setup`")
    for name in variables["modules"]:
        if f"module load {shlex.quote(name)}" not in script.text:
            yield error(f"does not load the module {name}; keep the block `modules`")
    if variables["code"] is not None and shlex.quote(variables["code"].path) not in script.text:
        yield error("does not run the copy of the code (run.snapshot); keep the block `python`")
    loop = (variables["supervisor_command"], "job-$ZSLURM_JOB_ID.exit")
    trapped = all(re.search(rf"^\s*trap\s.*\b{name}\b", script.text, re.MULTILINE) for name in ("USR2", "TERM"))
    if not trapped or any(fragment not in script.text for fragment in loop):
        yield error(
            "does not have the loop around the supervisor; keep the block `launch`, or write "
            '{% include "_supervise.sh.j2" %}'
        )


def _line_of_block(template: Template, name: str) -> int:
    """Return the line of a template where what belongs into a block is missing.

    That is the block itself, or else where it would be: after the last #SBATCH line or the block of those.
    """
    blocks: dict[str, int] = {}
    for block in TemplateEnvironment(template).parse(template.source).find_all(nodes.Block):
        blocks[block.name] = block.lineno
    options = [number for number, line in enumerate(template.source.splitlines(), 1) if "#SBATCH" in line]
    return blocks.get(name) or max([*options, blocks.get("directives", 1)])


def _directives(
    place: str, lines: list[str], variables: Mapping[str, Any], line_of: Callable[[str], int]
) -> Iterator[TemplateFinding]:
    """Check the #SBATCH options: there, in time, and those that other code relies on with their value.

    `line_of` gives the line of the template if something of a block is missing.
    """
    directives: dict[str, str] = {}
    commands = False
    for line in lines:
        if line.startswith("#SBATCH"):
            if commands:
                yield TemplateFinding("error", place, f"sbatch reads no options after the first command: `{line}`")
            else:
                name, _, value = line.removeprefix("#SBATCH").strip().removeprefix("--").partition("=")
                directives[name] = value.strip("'\"")
        elif line.strip() and not line.startswith("#"):
            commands = True
    for name, value in variables["directives"]:
        if name not in directives:
            level: Literal["error", "warning"] = "error" if name in _ESSENTIAL else "warning"
            shown, why = "" if value is True else f"={value}", _PLACES_THE_JOB.get(name, "")
            where = f"{place}:{line_of('directives')}" if why else place
            yield TemplateFinding(
                level, where, f"no line `#SBATCH --{name}{shown}`{why}; keep the block `directives`"
            )
        elif name == "signal" and not directives[name].startswith("B:USR2@"):
            yield TemplateFinding(
                "error", place, f"--signal={directives[name]}: the supervisor waits for B:USR2@SECONDS"
            )
        elif name == "nodes" and directives[name] != str(value):
            yield TemplateFinding(
                "error", place, f"--nodes={directives[name]}: the run has {value}; set slurm.nodes"
            )
