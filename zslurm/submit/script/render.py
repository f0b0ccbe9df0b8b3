"""Render the script of a run's job, once: what is checked, shown, kept and submitted is the same `JobScript`.

It needs neither Slurm nor submitit, so it works on any laptop.

Nothing in a name, path or value can run a command: shell words are quoted with shlex, `#SBATCH` values with
Slurm's own quotes, and control characters never get this far (RunSpec refuses them).
"""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from zslurm.cluster.rccl.environment import RULES, Setting, environment
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.core.quoting import ShellWord, quote
from zslurm.job.preparation.code_copy import job_code
from zslurm.run.exclusions import active_exclusions, read_exclusions
from zslurm.run.run_dir import RunDir
from zslurm.run.secrets import split_secrets
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.sbatch_options import OPTIONS
from zslurm.submit.group_exclusions import excluded_by_group
from zslurm.submit.script.rail_lines import rail_lines, switches_request
from zslurm.submit.script.templates import Template, TemplateEnvironment, find_template

_SUPERVISOR_STARTS = 20
"""How often a supervisor that dies is started, with none between that lived for _SUPERVISOR_LIVED_S."""

_SUPERVISOR_LIVED_S = 600
"""Seconds after which a supervisor counts as having been well."""


@dataclass(frozen=True)
class JobScript:
    """The script of a job.

    Attributes:
        template: what it was rendered from.
        text: the script itself.
        variables: what the template could use, by name.
        secrets: the variables that the script reads from a separate file, with their values.
    """

    template: Template
    text: str
    variables: Mapping[str, Any]
    secrets: Mapping[str, str]


def _excluded_nodes(spec: RunSpec, run: RunDir, *, start_over: bool) -> str | None:
    """Return the nodes that the user and the group exclude and those that Aegis found broken; None for none.

    A node that the run asks for by name is never excluded.
    """
    try:
        exclusions = {} if start_over else read_exclusions(run)
        of_group = excluded_by_group(spec, run, start_over=start_over)
    except OSError:  # the supervisor, which writes there, reports it
        exclusions, of_group = {}, set()
    broken = of_group.union(active_exclusions(exclusions, time.time())) - set(expand(spec.slurm.nodelist or ""))
    if not broken:
        return spec.slurm.exclude
    return compress([*expand(spec.slurm.exclude or ""), *broken])


_GPU_FLAGS = frozenset(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"))


def directives(spec: RunSpec, run: RunDir, *, start_over: bool = False) -> list[tuple[str, str | bool]]:
    """Return the #SBATCH options of a run, whose directory need not exist, in the order in which they are shown.

    With `start_over` a run that is there is moved aside first: its history excludes no node of the new one.
    """
    slurm = spec.slurm
    gpu_option, gpus = spec.cluster.gpu_flag(spec.cluster.gpu_request, spec.ranks_per_node)
    computed: dict[str, str | bool | None] = {
        "job-name": slurm.job_name or spec.run.name,
        "nodes": str(slurm.nodes + slurm.spares),
        "ntasks-per-node": str(spec.ranks_per_node),
        "cpus-per-task": str(spec.cpus_per_task),
        "gpus-per-node": gpus,
        "exclude": _excluded_nodes(spec, run, start_over=start_over),
        "output": str(run.logs / "job-%j.log"),
        "open-mode": "append",
        "requeue": True,
        "no-kill": True if spec.outlives_nodes else None,
        "signal": f"B:USR2@{slurm.save_margin_s}",
        "exclusive": True if spec.needs_rails_alone and "exclusive" not in slurm.flags else None,
        "switches": None if "switches" in slurm.flags else switches_request(spec),
    }
    options = [
        (
            gpu_option if option.name == "gpus-per-node" else option.name,
            computed[option.name] if option.name in computed else getattr(slurm, option.key),
        )
        for option in OPTIONS
        if option.rendered
    ]
    if "network" not in slurm.flags:
        options.append(("network", spec.network_request))
    options += [(flag, value) for flag, value in slurm.flags.items() if value is not False]
    return _one_gpu_request([(flag, value) for flag, value in options if value is not None])


def _one_gpu_request(options: list[tuple[str, str | bool]]) -> list[tuple[str, str | bool]]:
    """Return the options with one --gres, if there are two.

    Raises:
        ConfigError: GPUs are asked for in two forms, which Slurm 26.05 refuses.
    """
    of_gpus = [flag for flag, value in options if flag in _GPU_FLAGS or (flag == "gres" and "gpu" in str(value))]
    if len(of_gpus) > 1:
        first, second = of_gpus[:2]
        raise ConfigError(
            f"slurm.flags.{second}: the job asks for GPUs by --{first} already (cluster.gpus_per_node); leave the "
            "flag out, or set cluster.gpu_option to the form that your site wants"
        )
    gres = [str(value) for flag, value in options if flag == "gres"]
    if len(gres) < 2:
        return options
    at = next(index for index, (flag, _) in enumerate(options) if flag == "gres")
    other_options = [option for option in options if option[0] != "gres"]
    return [*other_options[:at], ("gres", ",".join(gres)), *other_options[at:]]


def job_settings(
    spec: RunSpec, origin_of: Callable[[str], str] = lambda name: f"cluster.env.{name}"
) -> list[Setting]:
    """Return the variables that the script exports: zslurm's, the rules', and the ones in cluster.env.

    `origin_of` gives the origin of a variable's value in cluster.env.
    """
    variables = {
        "PYTHONSAFEPATH": ("1", "a json.py of the working directory must not hide Python's own"),
        "PYTHONUNBUFFERED": ("1", "logs show what was printed when it was printed"),
    }
    if spec.cluster.interface:
        variables["ZSLURM_INTERFACE"] = (spec.cluster.interface, "interface of the rendezvous")
    settings = [
        Setting(name, value, reason, "", "zslurm")
        for name, (value, reason) in variables.items()
        if name not in spec.cluster.env
    ]
    of_cluster = environment(spec.cluster, origin_of)
    if spec.slurm.nodes + spec.slurm.spares == 1:  # ranks of one node need no plugin for the network between nodes
        of_cluster = [setting for setting in of_cluster if (setting.name, setting.origin) != ("NCCL_NET", RULES)]
    return settings + of_cluster


def job_environment(spec: RunSpec) -> dict[str, str]:
    """Return the variables that the script exports."""
    return {setting.name: setting.value for setting in job_settings(spec)}


def job_python(spec: RunSpec) -> str:
    """Return the Python that runs the supervisor, and the ranks if nothing else is set."""
    return f"{spec.cluster.venv}/bin/python" if spec.cluster.venv else sys.executable


def template_of(spec: RunSpec) -> Template:
    """Return the template of a run's script.

    Raises:
        NotFound: cluster.template names nothing.
    """
    return find_template("local" if spec.cluster.launcher == "local" else spec.cluster.template)


def template_variables(
    spec: RunSpec, run: RunDir, *, command: str | None = None, start_over: bool = False
) -> dict[str, Any]:
    """Return everything that a template may use, by name; see docs/templates.md."""
    # The same that submitit's executors build: it runs submitit's pickled call.
    own_command = f"{shlex.quote(job_python(spec))} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}"
    return {
        "job_name": spec.slurm.job_name or spec.run.name,
        "directives": directives(spec, run, start_over=start_over),
        "rails": rail_lines(spec),
        **environment_variables(spec, run.secrets),
        "code": job_code(spec, run),
        "run_dir": str(run.path),
        "runs_dir": str(run.path.parent),
        # A script is rendered before its job has an id: the launcher or Slurm gives it in the environment.
        "job_log": ShellWord(f'{quote(str(run.logs))}/job-"$ZSLURM_JOB_ID".log'),
        "job_id": ShellWord('"$ZSLURM_JOB_ID"'),
        "supervisor_command": command or own_command,
        "submitted_call": None
        if command is not None or spec.cluster.launcher == "local"
        else ShellWord(f'{quote(str(run.submitit))}/"$ZSLURM_JOB_ID"_submitted.pkl'),
        "supervisor_starts": _SUPERVISOR_STARTS,
        "supervisor_lived_s": _SUPERVISOR_LIVED_S,
    }


def environment_variables(spec: RunSpec, secrets_file: Path) -> dict[str, Any]:
    """Return what every template may use of the profile: the environment of the job."""
    env, secrets = split_secrets(job_environment(spec))
    cluster = spec.cluster
    return {
        **{key: getattr(cluster, key) for key in ("modules", "setup", "venv")},
        "env": env,
        "secrets": list(secrets),
        "secrets_file": str(secrets_file),
        "spec": spec,
    }


def render(
    spec: RunSpec,
    run: RunDir,
    *,
    command: str | None = None,
    template: Template | None = None,
    start_over: bool = False,
) -> JobScript:
    """Render the script of a run's job.

    The run's directory need not exist. `command` replaces the shell command of the supervisor, `template` the
    run's template; `start_over` is as in `directives`.

    Raises:
        ConfigError: the template is not valid, or uses a variable that does not exist.
        NotFound: cluster.template names nothing.
    """
    template = template or template_of(spec)
    environment = TemplateEnvironment(template)
    variables = template_variables(spec, run, command=command, start_over=start_over)
    try:
        text = environment.get_template(template.place).render(variables)
    except jinja2.TemplateSyntaxError as error:
        location = f"{error.filename or template.place}:{error.lineno}"
        raise ConfigError(f"{location}: not a valid template: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        location = _place(error, template, environment)
        raise ConfigError(f"{location}: includes or extends `{error.name}`, which does not exist") from error
    except ConfigError:
        raise
    except Exception as error:  # a template is a program of the user's: it may raise anything
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{_place(error, template, environment)}: cannot be rendered: {message}") from error
    return JobScript(template, text, variables, split_secrets(job_environment(spec))[1])


def _place(error: Exception, template: Template, environment: TemplateEnvironment) -> str:
    """Return file and line of the template that raised: Jinja2 writes them into the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    template_frames = [
        f"{frame.filename}:{frame.lineno}" for frame in frames if frame.filename in environment.places
    ]
    return template_frames[-1] if template_frames else template.place
