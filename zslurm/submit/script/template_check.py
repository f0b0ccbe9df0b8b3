"""Whether a template makes a script that can train: what `zslurm template check` and every submission look at.

It must render, be valid shell, and keep the lines without which a run is lost: the options that sbatch must see,
the variables, and the loop around the supervisor. What only looks odd is a warning.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from jinja2 import meta, nodes

from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.run.run_dir import RunDir
from zslurm.submit.script.render import render, template_of, template_variables
from zslurm.submit.script.templates import Template, TemplateEnvironment

# Without these a run is placed wrongly, cannot be followed, or is killed before it has saved.
_ESSENTIAL = {"nodes", "ntasks-per-node", "output", "signal", "requeue", "export", "no-kill"}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or odd, and where."""

    level: Literal["error", "warning"]
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def check_template(template: Template, spec: RunSpec, run: RunDir) -> list[Finding]:
    """Everything that is wrong with a template, seen by the script that it makes of a run."""
    unknown = list(_undefined(template, set(template_variables(spec, run))))
    try:
        script = render(spec, run, template=template)
    except ConfigError as error:
        place, _, message = str(error).partition(": ")
        known = any(finding.place == place for finding in unknown)
        return unknown if known else [*unknown, Finding("error", place, message)]
    return [*unknown, *check_script(template.place, script, spec, run), *_shellcheck(template.place, script)]


def refuse_broken_script(spec: RunSpec, run: RunDir) -> None:
    """The same check before a submission. The shipped templates need none, but the site's lines in them do.

    Raises:
        ConfigError: the first error, and how many more there are.
    """
    template = template_of(spec)
    if template.owner == "shipped":
        findings = list(_syntax(template.place, render(spec, run)))
    else:
        findings = [finding for finding in check_template(template, spec, run) if finding.level == "error"]
    if findings:
        more = f" (and {len(findings) - 1} more: `zslurm template check`)" if len(findings) > 1 else ""
        raise ConfigError(f"{findings[0]}{more}")


def check_script(place: str, script: str, spec: RunSpec, run: RunDir) -> list[Finding]:
    """Everything that is wrong with a rendered script, shellcheck's opinions aside."""
    return [*_syntax(place, script), *_missing_lines(place, script, spec, run)]


def _undefined(template: Template, known: set[str]) -> Iterator[Finding]:
    """Variables that nobody gives, each where it is used first."""
    environment = TemplateEnvironment(template)
    try:
        tree = environment.parse(template.source)
    except jinja2.TemplateSyntaxError:
        return  # rendering names the line
    undeclared = meta.find_undeclared_variables(tree) - known
    for node in tree.find_all(nodes.Name):
        if node.name in undeclared:
            undeclared.remove(node.name)
            given = ", ".join(sorted(known))
            yield Finding(
                "error", f"{template.place}:{node.lineno}", f"'{node.name}' is undefined; there are {given}"
            )


def _syntax(place: str, script: str) -> Iterator[Finding]:
    """What `bash -n` says."""
    bash = shutil.which("bash")
    if bash is None:
        return
    done = subprocess.run(
        [bash, "-n"], input=script, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return
    said = done.stderr.strip().splitlines() or ["bash -n: not valid"]
    found = re.match(r".*?line (?P<line>\d+): (?P<message>.*)", said[0])
    if found is None:
        yield Finding("error", place, said[0])
        return
    lines = script.splitlines()
    number = min(int(found["line"]), len(lines))
    where = f"line {number} of the script (`{lines[number - 1].strip()}`)" if lines else "the script"
    yield Finding("error", place, f"not valid shell: {where}: {found['message']}")


def _shellcheck(place: str, script: str) -> Iterator[Finding]:
    """What shellcheck warns of, where there is one."""
    program = shutil.which("shellcheck")
    if program is None:
        return
    command = [program, "--shell=bash", "--severity=warning", "--format=json1", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, errors="replace", check=False)
    try:
        comments: list[dict[str, Any]] = json.loads(done.stdout)["comments"]
    except (ValueError, KeyError, TypeError):
        return
    lines = script.splitlines()
    for comment in comments:
        line = lines[comment["line"] - 1].strip() if 0 < comment["line"] <= len(lines) else ""
        yield Finding("warning", place, f"shellcheck SC{comment['code']}: {comment['message']} (`{line}`)")


def _missing_lines(place: str, script: str, spec: RunSpec, run: RunDir) -> Iterator[Finding]:
    """What a script must say and this one does not."""
    variables = template_variables(spec, run)
    lines = script.splitlines()

    def error(message: str) -> Finding:
        return Finding("error", place, message)

    if not lines or not lines[0].startswith("#!"):
        yield error("the first line must name the shell: #!/bin/bash")
    if spec.cluster.launcher == "slurm":
        yield from _directives(place, lines, variables)
        if "export SUBMITIT_EXECUTOR=slurm" not in lines:
            yield error("does not say `export SUBMITIT_EXECUTOR=slurm`; keep the block `identity`")
    if not any(line.startswith("export ZSLURM_JOB_ID=") for line in lines):
        yield error("does not set ZSLURM_JOB_ID; keep the block `identity`")
    hidden = [name for name in variables["env"] if not any(f"export {name}=" in line for line in lines)]
    if hidden:
        yield error(f"does not export {', '.join(hidden)}; keep the block `environment`")
    if variables["secrets"] and shlex.quote(variables["secrets_file"]) not in script:
        yield error("does not read the file of secrets; keep the block `environment`")
    for line in variables["setup"]:
        if line not in lines:
            yield error(f"leaves out a line of cluster.setup (`{line}`); keep the block `setup`")
    for name in variables["modules"]:
        if f"module load {shlex.quote(name)}" not in script:
            yield error(f"does not load the module {name}; keep the block `modules`")
    if variables["code"] is not None and shlex.quote(variables["code"].path) not in script:
        yield error("does not run the copy of the code (run.snapshot); keep the block `python`")
    loop = (variables["supervisor_command"], "job-$ZSLURM_JOB_ID.exit")
    trapped = all(re.search(rf"^\s*trap\s.*\b{name}\b", script, re.MULTILINE) for name in ("USR2", "TERM"))
    if not trapped or any(part not in script for part in loop):
        yield error(
            "does not have the loop around the supervisor; keep the block `launch`, or say "
            '{% include "_supervise.sh.j2" %}'
        )


def _directives(place: str, lines: list[str], variables: dict[str, Any]) -> Iterator[Finding]:
    """The #SBATCH options: there, in time, and those that other code relies on with their value."""
    given: dict[str, str] = {}
    commands = False
    for line in lines:
        if line.startswith("#SBATCH"):
            if commands:
                yield Finding("error", place, f"sbatch reads no options after the first command: `{line}`")
            else:
                name, _, value = line.removeprefix("#SBATCH").strip().removeprefix("--").partition("=")
                given[name] = value.strip("'\"")
        elif line.strip() and not line.startswith("#"):
            commands = True
    for name, value in variables["directives"]:
        if name not in given:
            level: Literal["error", "warning"] = "error" if name in _ESSENTIAL else "warning"
            shown = "" if value is True else f"={value}"
            yield Finding(level, place, f"no line `#SBATCH --{name}{shown}`; keep the block `directives`")
        elif name == "signal" and not given[name].startswith("B:USR2@"):
            yield Finding("error", place, f"--signal={given[name]}: the supervisor waits for B:USR2@SECONDS")
        elif name == "nodes" and given[name] != str(value):
            yield Finding("error", place, f"--nodes={given[name]}: the run has {value}; set slurm.nodes")
