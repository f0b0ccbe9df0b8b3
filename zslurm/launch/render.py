"""Render the script of a run's job. Needs neither Slurm nor submitit, so it works on any laptop.

Nothing in a name, path or value can run a command: shell words are quoted with shlex, `#SBATCH` values with
Slurm's own quotes, and control characters never get this far (RunSpec refuses them).
"""

from __future__ import annotations

import shlex
import sys
import traceback
from dataclasses import dataclass
from importlib import resources

import jinja2

from zslurm.config.spec import RunSpec
from zslurm.errors import ConfigError, NotFound
from zslurm.launch.run_dir import RunDir
from zslurm.paths import expand

SUPERVISOR_STARTS = 20
_SUFFIXES = (".sbatch.j2", ".sh.j2")


@dataclass(frozen=True)
class Template:
    """A template and where it lies."""

    name: str
    source: str
    place: str


def shipped_templates() -> dict[str, Template]:
    """Every template that ships with zslurm, by name; parts that others include start with `_`."""
    found: dict[str, Template] = {}
    folder = resources.files("sbatch_templates")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        for suffix in _SUFFIXES:
            if entry.name.endswith(suffix):
                name = entry.name.removesuffix(suffix)
                found[name] = Template(name, entry.read_text(encoding="utf-8"), f"sbatch_templates/{entry.name}")
    return found


def find_template(name: str) -> Template:
    """A shipped template by name, or a file of the user's by path.

    Raises:
        NotFound: neither.
        ConfigError: the file is not text.
    """
    shipped = shipped_templates()
    if name in shipped:
        return shipped[name]
    path = expand(name)
    if path.is_file():
        try:
            return Template(path.name, path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not a template: not a text file in UTF-8") from error
    listed = ", ".join(sorted(n for n in shipped if not n.startswith("_")))
    raise NotFound(f"{name}: no template and no file has this name; templates: {listed}")


def _directive(value: str | bool) -> str:
    """The value of an #SBATCH line with its equals sign; nothing for a bare flag.

    Slurm strips one level of quotes, and reads backslash escapes inside them too.
    """
    if value is True:
        return ""
    text = str(value)
    if all(character.isalnum() or character in "-_.,:/@=+[]%" for character in text) and text:
        return f"={text}"
    return "='" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _environment(template: Template) -> jinja2.Environment:
    """Jinja2 that knows `template` by its place, and the shipped ones by their file names."""
    known = {part.place.rsplit("/", 1)[1]: part for part in shipped_templates().values()} | {
        template.place: template
    }

    def load(name: str) -> tuple[str, str, None] | None:
        return (known[name].source, known[name].place, None) if name in known else None

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["directive"] = _directive
    environment.filters["comment"] = lambda value: "".join(c if c.isprintable() else "?" for c in str(value))
    return environment


def directives(spec: RunSpec, run: RunDir) -> list[tuple[str, str | bool]]:
    """The #SBATCH options of a run, in the order in which they are shown."""
    slurm, cluster = spec.slurm, spec.cluster
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    options: list[tuple[str, str | bool | None]] = [
        ("job-name", slurm.job_name or spec.run.name),
        ("nodes", str(slurm.nodes)),
        ("ntasks-per-node", str(spec.ranks_per_node)),
        ("cpus-per-task", str(spec.cpus_per_task)),
        ("gpus-per-node", f"{kind}{cluster.gpus_per_node}" if cluster.gpus_per_node else None),
        ("mem", slurm.mem),
        ("time", slurm.time),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("nodelist", slurm.nodelist),
        ("exclude", slurm.exclude),
        ("output", str(run.logs / "job-%j.log")),
        ("open-mode", "append"),
        ("requeue", True),
        ("signal", f"B:USR2@{slurm.save_margin_s}"),
    ]
    options += [(flag, value) for flag, value in slurm.flags.items() if value is not False]
    return [(flag, value) for flag, value in options if value is not None]


def job_environment(spec: RunSpec) -> dict[str, str]:
    """Variables that the script exports: zslurm's own, then the profile's and the run's."""
    own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if spec.cluster.interface:
        own["ZSLURM_INTERFACE"] = spec.cluster.interface
        own["GLOO_SOCKET_IFNAME"] = spec.cluster.interface
        own["NCCL_SOCKET_IFNAME"] = spec.cluster.interface
    return {**own, **spec.cluster.env}


def supervisor_command(run: RunDir) -> str:
    """The shell command that runs submitit's pickled call (the same that submitit's executors build)."""
    return f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}"


def render(spec: RunSpec, run: RunDir, *, command: str | None = None, job_id: str = "local") -> str:
    """The script of a run's job.

    Args:
        spec: the resolved run.
        run: its directory (it need not exist).
        command: shell command of the supervisor; default: supervisor_command(run).
        job_id: id of a local job; Slurm tells a Slurm job its own.

    Raises:
        ConfigError: the template is not valid, or uses a variable that does not exist.
        NotFound: cluster.template names nothing.
    """
    template = find_template("local" if spec.cluster.launcher == "local" else spec.cluster.template)
    try:
        text = (
            _environment(template)
            .get_template(template.place)
            .render(
                job_name=spec.slurm.job_name or spec.run.name,
                directives=directives(spec, run),
                env=job_environment(spec),
                setup=spec.cluster.setup,
                run_dir=str(run.path),
                job_log=str(run.job_log(job_id)),
                job_id=job_id,
                supervisor_command=command or supervisor_command(run),
                supervisor_starts=SUPERVISOR_STARTS,
                spec=spec,
            )
        )
    except jinja2.TemplateSyntaxError as error:
        place = f"{error.filename or template.place}:{error.lineno}"
        raise ConfigError(f"{place}: not a valid template: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        raise ConfigError(f"{_place(error, template)}: includes `{error.name}`, which does not exist") from error
    except Exception as error:  # a template is a program of the user's: it may raise anything
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{_place(error, template)}: cannot be rendered: {message}") from error
    return text


def _place(error: Exception, template: Template) -> str:
    """File and line of the template that raised: Jinja2 writes them into the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    places = {template.place, *(part.place for part in shipped_templates().values())}
    found = [f"{frame.filename}:{frame.lineno}" for frame in frames if frame.filename in places]
    return found[-1] if found else template.place
