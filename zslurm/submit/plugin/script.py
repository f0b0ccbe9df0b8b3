"""From the parameters of a function to the script of its job, over the cluster's profile."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from submitit.core import utils
from submitit.slurm.slurm import SlurmJobEnvironment

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.profile import LOCAL, default_name, profile_layers
from zslurm.config import yaml12
from zslurm.config.layers import Override
from zslurm.config.load import Resolved, resolve
from zslurm.config.spec import RunSpec
from zslurm.config.text import CONTROL
from zslurm.core.errors import ConfigError
from zslurm.run.secrets import split_secrets, write_secrets
from zslurm.slurm.jobs import time_limit
from zslurm.slurm.sbatch_options import OPTIONS, carried_by
from zslurm.submit.plugin.parameters import PARAMETERS, SET_BY_SUBMITIT
from zslurm.submit.script.rail_lines import rail_lines, switches_request
from zslurm.submit.script.render import environment_variables, job_environment
from zslurm.submit.script.templates import Template, TemplateEnvironment, find_template

_MINUTES = 5
"""submitit's time limit if neither a parameter nor the profile has one."""

_SIGNAL_S = 90
"""submitit's time from the signal to the end of a job if neither a parameter nor the profile has one."""

_LONGEST_MINUTES = 24855 * 24 * 60
"""What submitit counts with if there is no limit: Slurm's longest time."""

_KEYS = {option.name.replace("-", "_"): option.key for option in OPTIONS if option.key}
"""Parameter -> key of the section `slurm`."""

_OF_RUNS = {"nodes": 1, "ranks_per_node": 1, "spares": 0, "cpus_per_task": None, "mem": None}
"""What a profile may give for runs, and what a function does not take from it: its size."""

_OF_THE_SCRIPT = frozenset(
    "gpus_per_node num_gpus signal_delay_s setup teardown array_parallelism stderr_to_stdout "
    "additional_parameters srun_args use_srun".split()
)
"""Parameters that are no options of sbatch by their name."""

_FLAGS = sorted(PARAMETERS - _KEYS.keys() - _OF_THE_SCRIPT)
"""Parameters that are options of sbatch for which the section `slurm` has no key."""

_OPTION = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Function:
    """How a function is to run.

    Attributes:
        spec: the cluster, and what is asked of Slurm.
        minutes: its time limit.
        options: of sbatch, in the order in which the script has them, without those that depend on the submission.
        parameters: as they were given.
    """

    spec: RunSpec
    minutes: int
    options: Sequence[tuple[str, str | bool]]
    parameters: Mapping[str, Any]

    @cached_property
    def template(self) -> Template:
        """The template of the cluster, which is read once.

        Raises:
            NotFound: cluster.template names nothing.
        """
        return find_template(self.spec.cluster.template)

    @cached_property
    def compiled(self) -> jinja2.Template:
        """The template with a function in the place of the supervisor.

        Raises:
            ConfigError: it is not valid.
        """
        with _template_errors(self.template.place):
            return TemplateEnvironment(self.template).get_template("_function.sbatch.j2")

    @property
    def tasks(self) -> int:
        """Return the number of tasks of a job: each leaves a result."""
        return self.spec.slurm.nodes * (self.spec.slurm.ranks_per_node or 1)


def resolve_function(parameters: Mapping[str, Any]) -> Function:
    """Resolve the parameters of a function over the cluster's profile.

    Raises:
        ConfigError: a parameter is refused, or there is no profile of a cluster.
        NotFound: there is no such profile.
    """
    parameters_given = {name: value for name, value in parameters.items() if value is not None}
    profile = parameters_given.get("profile") or default_name()
    if profile == LOCAL:
        raise ConfigError(
            "the profile `local` is this machine; name a cluster's with zslurm_profile or in $ZSLURM_CLUSTER, or "
            'use cluster="local" of submitit'
        )
    for name in ("setup", "teardown", "srun_args", "overrides"):
        _check_list(name, parameters_given.get(name, ()))
    section = {
        key: _value(name, parameters_given[name]) for name, key in _KEYS.items() if name in parameters_given
    }
    section = _OF_RUNS | section
    document = yaml12.YamlDocument({"trainer": {"command": ["python"]}, "slurm": section}, {})
    resolved = resolve(
        Path("update_parameters"),
        document=document,
        profile=profile_layers(profile),
        overrides=[Override.parse(text) for text in parameters_given.get("overrides", ())],
    )
    spec = resolved.spec
    if spec.cluster.container is not None:
        raise ConfigError(
            f"cluster.container of the profile {profile}: functions run outside of containers; submit a program "
            "(`zslurm submit -- ...`), or give zslurm_overrides=['cluster.container=null']"
        )
    minutes = _minutes(spec)
    return Function(spec, minutes, list(_options(resolved, parameters_given, minutes)), parameters_given)


def _check_list(name: str, value: Any) -> None:
    """Refuse a text in the place of a list: each of its letters would be a line.

    Raises:
        ConfigError: it is no list of texts.
    """
    if isinstance(value, str | bytes) or not all(isinstance(item, str) for item in value):
        prefix = "zslurm" if name == "overrides" else "slurm"
        raise ConfigError(f"{prefix}_{name}: expected a list of texts, got {value!a}")


def _value(name: str, value: Any) -> Any:
    """Return a parameter as the configuration takes it."""
    return str(value) if name == "time" and isinstance(value, int) else value


def _minutes(spec: RunSpec) -> int:
    if spec.slurm.time is None:
        return _MINUTES
    limit = time_limit(spec.slurm.time)
    return _LONGEST_MINUTES if limit is None else max(1, int(limit.total_seconds() // 60))


def _options(resolved: Resolved, given: Mapping[str, Any], minutes: int) -> Iterator[tuple[str, str | bool]]:
    """Yield the options of sbatch that do not depend on the submission.

    Raises:
        ConfigError: one is refused.
    """
    spec, slurm = resolved.spec, resolved.spec.slurm
    flags = slurm.flags | _flags(given)
    gpus = _gpus(spec, given)
    alone = gpus is not None and slurm.nodes > 1 and spec.needs_rails_alone
    delay = given.get("signal_delay_s")
    if delay is None:
        is_own = resolved.layers.leaf_origin(("slurm", "save_margin_s")).layer != "default"
        delay = slurm.save_margin_s if is_own else min(_SIGNAL_S, minutes * 60)
    options: list[tuple[str, str | bool | None]] = [
        ("job-name", slurm.job_name or "submitit"),
        ("nodes", str(slurm.nodes)),
        ("ntasks-per-node", str(slurm.ranks_per_node) if slurm.ranks_per_node else None),
        ("cpus-per-task", str(slurm.cpus_per_task) if slurm.cpus_per_task else None),
        spec.cluster.gpu_flag(gpus, slurm.ranks_per_node or 1),
        ("mem", slurm.mem),
        ("time", slurm.time or str(minutes)),
        *((option.name, getattr(slurm, option.key)) for option in carried_by("function")),
        ("open-mode", "append"),
        ("requeue", True),
        ("export", slurm.export),
        ("signal", f"{SlurmJobEnvironment.USR_SIG}@{delay}"),
        ("exclusive", True if alone else None),
        ("switches", switches_request(spec)),
    ]
    if "no-requeue" in flags:
        options.remove(("requeue", True))
    options = [(name, value) for name, value in options if name not in flags]
    for name, value in [*options, *flags.items()]:
        if value is not None and value is not False:
            yield name, value


def _flags(given: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return the options of sbatch that were given by name, and in `slurm_additional_parameters`.

    Raises:
        ConfigError: submitit or zslurm sets one itself, or it is not one line.
    """
    named_flags = {name: given[name] for name in _FLAGS if name in given}
    additional = given.get("additional_parameters", {})
    if not isinstance(additional, Mapping):
        raise ConfigError("slurm_additional_parameters: expected a dictionary of sbatch's long options")
    for name, value in {**named_flags, **additional}.items():
        shown = f"slurm_{name}" if name in named_flags else f"slurm_additional_parameters: {name}"
        option = str(name).replace("_", "-")
        if not _OPTION.fullmatch(option):
            raise ConfigError(f"{shown}: not a long option of sbatch (write it without the dashes)")
        if option in SET_BY_SUBMITIT:
            raise ConfigError(f"{shown}: cannot be set; {SET_BY_SUBMITIT[option]}")
        if CONTROL.search(str(value)):
            raise ConfigError(f"{shown}: must be one line without control characters, got {str(value)!a}")
    return {
        str(name).replace("_", "-"): value if isinstance(value, bool) else str(value)
        for name, value in {**named_flags, **additional}.items()
        if value is not None
    }


def _gpus(spec: RunSpec, given: Mapping[str, Any]) -> str | None:
    """Return the value of --gpus-per-node with the cluster's type of GPU; None if a function asks for none.

    Raises:
        ConfigError: a node has fewer.
    """
    gpus_wanted = given.get("gpus_per_node", given.get("num_gpus"))
    if not gpus_wanted:
        return None
    cluster = spec.cluster
    if not str(gpus_wanted).isdecimal():  # `a100:2`
        if CONTROL.search(str(gpus_wanted)):
            raise ConfigError(f"gpus_per_node: must be a number or TYPE:NUMBER, got {str(gpus_wanted)!a}")
        return str(gpus_wanted)
    if int(gpus_wanted) > cluster.gpus_per_node:
        has = counted(cluster.gpus_per_node, "GPU")
        raise ConfigError(f"gpus_per_node: {gpus_wanted} asked for, and a node of {cluster.name} has {has}")
    return f"{cluster.gpu_type}:{gpus_wanted}" if cluster.gpu_type else str(gpus_wanted)


def function_script(function: Function, command: str, folder: Path, secrets: Path, array: int | None) -> str:
    """Render the script that runs submitit's `command` as a job, or as an array of `array` jobs.

    Secrets of the profile, if it has any, are written into the file `secrets`.

    Raises:
        ConfigError: the template is not valid, or has no blocks to put the function in.
        NotFound: cluster.template names nothing.
        ZslurmError: the file of secrets cannot be written.
    """
    spec, parameters = function.spec, function.parameters
    paths = utils.JobPaths(folder=folder)
    logs = [str(paths.stdout), None if parameters.get("stderr_to_stdout") else str(paths.stderr)]
    if array is not None:
        logs = [log and log.replace("%j", "%A_%a") for log in logs]
    first = [log and log.replace("%t", "0") for log in logs]
    options = [*function.options, ("output", first[0]), ("error", first[1])]
    if array is not None:
        options.append(("array", f"0-{array - 1}%{min(array, int(parameters.get('array_parallelism', 256)))}"))
    write_secrets(secrets, split_secrets(job_environment(spec))[1])
    variables = environment_variables(spec, secrets)
    # A function is imported by the name of its module, which may be in the directory that the job runs in.
    variables["env"].pop("PYTHONSAFEPATH", None)
    several = spec.slurm.nodes > 1
    variables |= {
        "venv": None,  # a pickle is read by the Python that wrote it
        "code": None,
        "own_setup": list(parameters.get("setup", ())),
        "job_name": spec.slurm.job_name or "submitit",
        "directives": [(name, value) for name, value in options if value is not None],
        "rails": rail_lines(spec) if several else [],
        "command": command if parameters.get("use_srun") is False else f"{_srun(logs, parameters)} {command}",
        "teardown": list(parameters.get("teardown", ())),
        "base": function.template.place,
    }
    with _template_errors(function.template.place):
        text = function.compiled.render(variables)
    if variables["command"] not in text or "export SUBMITIT_EXECUTOR=zslurm" not in text:
        raise ConfigError(
            f"{function.template.place}: cannot run functions: keep the blocks `identity` and `launch`, which "
            "they replace"
        )
    return text


def _srun(logs: Sequence[str | None], given: Mapping[str, Any]) -> str:
    """Return the command that starts the tasks."""
    words = ["srun", "--unbuffered", "--output", logs[0], *(["--error", logs[1]] if logs[1] else [])]
    if given.get("cpus_per_task"):  # Slurm 22.05 and newer does not take it from the job
        words.append(f"--cpus-per-task={given['cpus_per_task']}")
    return shlex.join([*(str(word) for word in words), *(str(word) for word in given.get("srun_args", ()))])


@contextmanager
def _template_errors(place: str) -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateError as error:
        raise ConfigError(f"{place}: cannot be rendered: {' '.join(str(error).split())}") from error
