"""Layers of configuration: merge them, and remember the origin of each value.

Later layers win. Mappings merge key by key; lists and scalars replace what was there. An override
`--set phases.0.lr=3e-4` reaches into a list by index; `phases[0].lr` is the same, but some shells expand brackets.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zslurm.config import yaml12
from zslurm.config.yaml12 import KeyPath
from zslurm.core.errors import ConfigError

_WORD = r"[A-Za-z_][A-Za-z0-9_-]*"
_PATH = re.compile(rf"{_WORD}(\.{_WORD}|\.\d+|\[\d+\])*")
_PATH_PART = re.compile(rf"({_WORD})|\[(\d+)\]|\.(\d+)")


@dataclass(frozen=True)
class Origin:
    """The origin of a value: the layer, and the file and line if there is one."""

    layer: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        """Return `run file run.yaml:12`, or just the layer."""
        return self.place if self.place.startswith(self.layer) else f"{self.layer} {self.place}"

    @property
    def place(self) -> str:
        """Return what precedes an error message: `run.yaml:12`, or the layer."""
        return self.layer if self.file is None else f"{self.file}" + (f":{self.line}" if self.line else "")


DEFAULT = Origin("default")
# The first words of layer names, in the order in which later ones win.
LAYER_ORDER = ("default", "cluster", "recipe", "base", "run", "--set")


def rank_of(origin: Origin) -> int:
    """Return how late the layer of an origin is; every option of the command line counts as `--set`."""
    word = origin.layer.split(" ")[0]
    return LAYER_ORDER.index("--set" if word.startswith("-") else word)


@dataclass(frozen=True)
class Override:
    """A value that wins over all files.

    Attributes:
        path: of the key.
        value: as a run file would give it, parsed.
        option: what messages and origins call it: `--nodes`, or `--set phases.0.lr`.
    """

    path: KeyPath
    value: Any
    option: str

    @classmethod
    def of(cls, key: str, value: Any, option: str | None = None) -> Override:
        """Return the override of a dotted key; without `option` it counts as one of `--set`.

        Raises:
            ConfigError: the text is no key.
        """
        path = parse_path(key)
        if not path:
            raise ConfigError(f"--set {key}: expected KEY=VALUE, such as phases.0.lr=3e-4")
        return cls(path, value, option or f"--set {key}")

    @classmethod
    def parse(cls, assignment: str) -> Override:
        """Return the override that `--set KEY=VALUE` means; the value is read as YAML.

        Raises:
            ConfigError: the text is no assignment, or the value is not valid YAML.
        """
        key, equals, text = assignment.partition("=")
        if not equals or not parse_path(key):
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE, such as phases.0.lr=3e-4")
        return cls.of(key, yaml12.parse(text, f"--set {key}").data)


@dataclass
class Layers:
    """The merged data so far, and the origin of every key path in it."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    # The last file: where a section that is not given would be.
    top: Origin = DEFAULT

    def add(self, document: yaml12.YamlDocument, layer: str, file: str) -> None:
        """Lay a parsed file over what is there.

        Raises:
            ConfigError: the file's top level is not a mapping.
        """
        data = {} if document.data is None else document.data
        if not isinstance(data, dict):
            raise ConfigError(f"{file}:1: expected sections such as `model:` and `phases:`, not a single value")

        def origin(path: KeyPath) -> Origin:
            return Origin(layer, file, document.lines.get(path))

        self.top = Origin(layer, file)
        # A section whose every line is commented out gives nothing.
        self._merge(self.data, {key: {} if value is None else value for key, value in data.items()}, (), origin)

    def _merge(
        self,
        target: dict[str, Any],
        source: dict[str, Any],
        path: KeyPath,
        origin: Callable[[KeyPath], Origin],
    ) -> None:
        for key, value in source.items():
            path_of_key = (*path, key)
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self.origins[path_of_key] = origin(path_of_key)
                self._merge(target[key], value, path_of_key, origin)
            else:
                self._forget(path_of_key)
                target[key] = self._adopt(value, path_of_key, origin)

    def _adopt(self, value: Any, path: KeyPath, origin: Callable[[KeyPath], Origin]) -> Any:
        """Return a copy of `value`, with the origin of every part of it recorded."""
        self.origins[path] = origin(path)
        if isinstance(value, dict):
            return {key: self._adopt(item, (*path, key), origin) for key, item in value.items()}
        if isinstance(value, list):
            return [self._adopt(item, (*path, i), origin) for i, item in enumerate(value)]
        return value

    def _forget(self, path: KeyPath) -> None:
        for origin_path in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[origin_path]

    def override(self, override: Override) -> None:
        """Replace one value, or add it.

        Raises:
            ConfigError: the path runs through something that does not exist.
        """
        path = override.path
        target: Any = self.data
        for depth, key_part in enumerate(path[:-1]):
            if isinstance(key_part, int):
                self._check_index(target, path[: depth + 1], override.option)
                target = target[key_part]
            elif isinstance(target, dict):
                target = target.setdefault(key_part, {})
            else:
                raise ConfigError(f"{override.option}: {show_path(path[:depth])} holds no keys")
        last = path[-1]
        if isinstance(last, int):
            self._check_index(target, path, override.option)
        elif not isinstance(target, dict):
            raise ConfigError(f"{override.option}: {show_path(path[:-1])} holds no keys")
        self._forget(path)
        target[last] = self._adopt(override.value, path, lambda _: Origin(override.option))

    def _check_index(self, target: Any, path: KeyPath, option: str) -> None:
        """Check that the last part of a path is the index of an item of a list."""
        name, index = show_path(path[:-1]), path[-1]
        if not isinstance(target, list):
            lists = [key for key, value in self.data.items() if isinstance(value, list)]
            near = difflib.get_close_matches(name, lists, 1, 0.5)
            hint = f"; did you mean `{near[0]}[{index}]`?" if near else ""
            raise ConfigError(f"{option}: `{name}` is not a list{hint}")
        if not isinstance(index, int) or index >= len(target):
            raise ConfigError(f"{option}: there is no item [{index}]; the list has {len(target)}")

    def derive(self, path: tuple[str, str], value: Any, origin: Origin) -> None:
        """Set a value that follows from another one, whose origin it has."""
        section, key = path
        self._forget(path)
        self.data.setdefault(section, {})[key] = self._adopt(value, path, lambda _: origin)

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of the value at `path`, else of a value inside it, else of the section around it."""
        if path in self.origins:
            return self.origins[path]
        for origin_path, origin in self.origins.items():
            if origin_path[: len(path)] == path:
                return origin
        return self.origin(path[:-1]) if path else DEFAULT

    def leaf_origin(self, path: KeyPath) -> Origin:
        """Return the origin of a leaf of the resolved run: a default, unless it is in the layers' data."""
        value: Any = self.data
        for key_part in path:
            try:
                value = value[key_part]
            except (KeyError, IndexError, TypeError):
                return DEFAULT
        return self.origin(path)


def parse_path(text: str) -> KeyPath:
    """Return `a.b[0].c`, or `a.b.0.c`, as ("a", "b", 0, "c"); empty if it is not a path."""
    if not _PATH.fullmatch(text):
        return ()
    return tuple(word or int(bracketed or dotted) for word, bracketed, dotted in _PATH_PART.findall(text))


def show_path(path: KeyPath) -> str:
    """Return ("a", "b", 0, "c") as `a.b[0].c`; a part that is no plain word is quoted."""
    shown = ""
    for key_part in path:
        if isinstance(key_part, int):
            shown += f"[{key_part}]"
        else:
            shown += ("." if shown else "") + (key_part if re.fullmatch(_WORD, key_part) else json.dumps(key_part))
    return shown
