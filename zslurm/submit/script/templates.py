"""Templates of job scripts: the ones that ship with zslurm, the site's, and the user's own.

A user's are in ~/.config/zslurm/templates ($XDG_CONFIG_HOME is honoured), a site's in /etc/zslurm/templates; they
hide shipped ones of the same name. Inside a template the file name of a shipped one always means the shipped one:
a user's `train.sbatch.j2` may begin with `{% extends "train.sbatch.j2" %}` and change one block of it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import jinja2

from zslurm.cluster.profile import config_dir
from zslurm.core.errors import ConfigError, NotFound
from zslurm.core.paths import expand
from zslurm.core.quoting import quote

SITE_TEMPLATES = Path("/etc/zslurm/templates")
SUFFIXES = (".sbatch.j2", ".sh.j2")
Owner = Literal["shipped", "site", "yours", "file"]


@dataclass(frozen=True)
class Template:
    """A template and its location: `place` is a path, or the shipped folder's name and the file."""

    name: str
    source: str
    place: str
    owner: Owner = "shipped"

    @property
    def file_name(self) -> str:
        """Return the name of its file."""
        return self.place.rsplit("/", 1)[1]


def shipped_templates() -> dict[str, Template]:
    """Return every template that ships with zslurm, by name; parts that others include start with `_`."""
    templates: dict[str, Template] = {}
    for entry in sorted(resources.files("zslurm.sbatch_templates").iterdir(), key=lambda entry: entry.name):
        if name := _name_of(entry.name):
            templates[name] = Template(name, entry.read_text(encoding="utf-8"), f"sbatch_templates/{entry.name}")
    return templates


def user_templates_dir() -> Path:
    """Return the folder of this user's templates."""
    return config_dir() / "templates"


def own_templates() -> dict[str, Template]:
    """Return the templates of the user and of the site, by name; a user's hides the site's.

    Raises:
        ConfigError: one is not text.
    """
    templates: dict[str, Template] = {}
    folders: tuple[tuple[Path, Owner], ...] = ((user_templates_dir(), "yours"), (SITE_TEMPLATES, "site"))
    for folder, owner in folders:
        for path in sorted(folder.glob("*.j2")):
            if name := _name_of(path.name):
                templates.setdefault(name, Template(name, _read(path), str(path), owner))
    return templates


def _name_of(file_name: str) -> str | None:
    return next((file_name.removesuffix(suffix) for suffix in SUFFIXES if file_name.endswith(suffix)), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a template: not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def find_template(name: str) -> Template:
    """Return a template by name (the user's, the site's, a shipped one), or a file by path.

    Raises:
        NotFound: none; the nearest name is suggested.
        ConfigError: the file is not text.
    """
    templates = shipped_templates() | own_templates()
    if name in templates:
        return templates[name]
    path = expand(name)
    if path.is_file():
        return Template(path.name, _read(path), str(path.absolute()), "file")
    names = sorted(template_name for template_name in templates if not template_name.startswith("_"))
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{near[0]}`? " if near else ""
    raise NotFound(f"{name}: no template and no file has this name; {hint}templates: {', '.join(names)}")


class TemplateEnvironment(jinja2.Environment):
    """Jinja2 that knows one template by its place, the shipped ones by their file names, and its neighbours."""

    def __init__(self, template: Template) -> None:
        self._shipped = {shipped.file_name: shipped for shipped in shipped_templates().values()}
        self._template = template
        self.places = {template.place}
        """Locations of the templates that were used."""
        super().__init__(
            loader=jinja2.FunctionLoader(self._load),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self.filters["sh"] = lambda value: quote(value if isinstance(value, str) else str(value))
        self.filters["directive"] = _directive
        self.filters["comment"] = as_comment

    def _load(self, name: str) -> tuple[str, str, None] | None:
        if (template := self._find(name)) is None:
            return None
        self.places.add(template.place)
        return template.source, template.place, None

    def _find(self, name: str) -> Template | None:
        if name == self._template.place:
            return self._template
        if name in self._shipped:
            return self._shipped[name]
        own_folder = [] if self._template.owner == "shipped" else [Path(self._template.place).parent]
        for folder in (*own_folder, user_templates_dir(), SITE_TEMPLATES):
            path = folder / name
            if "/" not in name and path.is_file():
                return Template(path.name, _read(path), str(path), "file")
        return None


def as_comment(value: object) -> str:
    """Return text that stays inside one line of a comment, whatever it holds."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def _directive(value: str | bool) -> str:
    """Return the value of an #SBATCH line with its equals sign; nothing for a bare flag.

    Slurm strips one level of quotes, and reads backslash escapes inside them too.
    """
    if value is True:
        return ""
    text = str(value)
    if re.fullmatch(r"[\w.,:/@=+[\]%-]+", text):
        return f"={text}"
    return "='" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
