"""Resolve a run: built-in defaults < cluster profile < recipe < run file < `--set`."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zslurm.checkpoint_tools.plain import load_json
from zslurm.config import yaml12
from zslurm.config.layers import Layers, Origin, Override, show_path
from zslurm.config.measured import MeasuredSection
from zslurm.config.problems import describe
from zslurm.config.spec import RECORDED, RunSpec, spec_class
from zslurm.config.text import CONTROL
from zslurm.config.yaml12 import KeyPath
from zslurm.core.errors import ConfigError
from zslurm.core.paths import expand

# Keys that hold paths: relative ones given in a file are relative to that file, others to the working directory.
_PATH_KEYS = (
    ("run", "runs_dir"),
    ("data", "path"),
    ("checkpoint", "resume_from"),
    ("checkpoint", "rescue_dir"),
    ("checkpoint", "local_dir"),
    ("evaluation", "data"),
    ("cluster", "template"),
    ("cluster", "venv"),
    ("cluster", "exclusions"),
    ("cluster", "gemm_table"),
    ("trainer", "directory"),
)
_FILE_LAYERS = ("cluster profile", "base file", "run file")
# Paths end up in scripts and in Slurm's own patterns, where these characters cannot be written safely.
_FORBIDDEN_IN_PATHS = "%\\"


@dataclass(frozen=True)
class Resolved:
    """A validated run and the layers it was made from."""

    spec: RunSpec
    layers: Layers

    def rows(self) -> list[tuple[KeyPath, Any, Origin]]:
        """Return every leaf value of the run with its origin, in the order of the sections."""
        return list(_leaves(self.spec.model_dump(mode="json"), (), self.layers))


def _leaves(value: Any, path: KeyPath, layers: Layers) -> Any:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key), layers)
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, i), layers)
    else:
        yield path, value, layers.leaf_origin(path)


def recipes() -> dict[str, str]:
    """Return the names of the shipped recipes, each with its text."""
    folder = resources.files("zslurm.train").joinpath("recipes")
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def _base_of(name: object, user: Path | None, line: int | None) -> tuple[yaml12.YamlDocument, str, Path | None]:
    """Return the document that `extends: NAME` means: a shipped recipe, or a file next to the naming one."""
    where = f"{yaml12.called(user)}:{line}" if user else "extends"
    if not isinstance(name, str):
        raise ConfigError(f"{where}: extends: expected the name of a recipe or a file, got {json.dumps(name)}")
    shipped = recipes()
    if name in shipped:
        return yaml12.parse(shipped[name], f"recipe {name}"), f"recipe {name}", None
    path = (user.parent if user else Path()) / expand(name)
    if path.is_file():
        return yaml12.read(path), str(path), path
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"recipes: {', '.join(shipped)}"
    raise ConfigError(f"{where}: extends: no recipe and no file is called `{name}`; {hint}")


def _stack(
    document: yaml12.YamlDocument, layer: str, file: str, path: Path | None
) -> list[tuple[yaml12.YamlDocument, str, str]]:
    """Return a document and everything it extends, the base first."""
    stack: list[tuple[yaml12.YamlDocument, str, str]] = []
    seen = {file if path is None else path.resolve()}
    while True:
        base = None
        if isinstance(document.data, dict):
            data = dict(document.data)  # a caller may resolve its document again
            base = data.pop("extends", None)
            document = replace(document, data=data)
        stack.insert(0, (document, layer, file))
        if base is None:
            return stack
        named_in, line = file, document.lines.get(("extends",))
        document, file, path = _base_of(base, path, line)
        layer = "recipe" if path is None else "base file"
        identity = file if path is None else path.resolve()
        if identity in seen:
            raise ConfigError(
                f"{named_in}:{line}: extends: {base} is laid under itself; a base cannot extend its heir"
            )
        seen.add(identity)


def resolve(
    run_file: Path,
    *,
    document: yaml12.YamlDocument | None = None,
    profile: Sequence[tuple[yaml12.YamlDocument, str]] = (),
    overrides: Sequence[Override] = (),
) -> Resolved:
    """Resolve a run file over a cluster profile and under overrides.

    Args:
        run_file: the YAML run file; `-` reads standard input.
        document: the run file if it has been parsed already.
        profile: the parsed cluster profile and the file it came from, below it what it extends, the base first.
        overrides: applied last, in order.

    Raises:
        ConfigError: anything is wrong; one line for each problem, with place, key and what was expected.
    """
    layers = Layers()
    for section_file, file in profile:
        layers.add(section_file, "cluster profile", file)
    run_document = document or yaml12.read(run_file)
    for section_file, layer, file in _stack(run_document, "run file", yaml12.called(run_file), run_file):
        layers.add(section_file, layer, file)
    for override in overrides:
        layers.override(override)
    return _fit_to_cluster(validate(layers))


def _fit_to_cluster(run: Resolved) -> Resolved:
    """Settle what is `auto` or null and depends on the cluster, which the trainer does not know.

    Ranks on several nodes reduce in the way that `zslurm bench collectives` found faster there; if it was not
    asked, in two levels if rails are not joined, else in one. Buckets have the measured size, if there is one.
    The values have the origin of what they follow from.
    """
    spec, layers = run.spec, run.layers
    changes: dict[str, Any] = {}
    measured, where = spec.cluster.measured, ("cluster", "measured")
    if not measured_alike(spec):
        measured = MeasuredSection()
    if spec.parallel.collectives == "auto" and spec.slurm.nodes > 1 and spec.ranks_per_node > 1:
        faster = measured.collectives_for(spec.slurm.nodes, spec.ranks_per_node)
        changes["collectives"] = faster or ("two_level" if spec.cluster.rails_only else "flat")
        origin = layers.leaf_origin((*where, "collectives") if faster else ("cluster", "rails_only"))
        layers.derive(("parallel", "collectives"), changes["collectives"], origin)
    if spec.parallel.bucket_mb is None and (bucket := measured_bucket(spec)) is not None:
        changes["bucket_mb"] = bucket
        layers.derive(("parallel", "bucket_mb"), bucket, layers.leaf_origin((*where, "bucket_mb")))
    if not changes:
        return run
    return replace(run, spec=spec.model_copy(update={"parallel": spec.parallel.model_copy(update=changes)}))


def measured_alike(spec: RunSpec) -> bool:
    """Return whether the cluster's collectives were measured between ranks of the run's kind, CPUs or GPUs."""
    on_cpus = spec.parallel.device == "cpu" or not spec.cluster.gpus_per_node
    return (spec.cluster.measured.device == "cpu") == on_cpus


def measured_bucket(spec: RunSpec) -> float | None:
    """Return the bucket of a run in MiB by the cluster's measurements; None if nothing applies was measured."""
    knee = spec.cluster.measured.bucket_for(spec.slurm.nodes, spec.ranks_per_node)
    if knee is None or spec.world_size == 1 or not measured_alike(spec):
        return None
    from zslurm.train.plan.communication import (
        largest_useful_bucket_mb,  # the model's shapes: few profiles need them
    )

    return largest_useful_bucket_mb(spec, knee)


def validate(layers: Layers) -> Resolved:
    """Type-check merged layers.

    Raises:
        ConfigError: one line for each problem.
    """
    data = copy.deepcopy(layers.data)
    _anchor_paths(data, layers)
    try:
        spec = spec_class(data).model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, layers, spec_class(data)))) from error
    return Resolved(spec, layers)


def _anchor_paths(data: dict[str, Any], layers: Layers) -> None:
    """Make paths absolute: relative to the file that gave them, else to the working directory.

    Values of a wrong type stay as they are: validation names them.
    """
    if data.get("init") == {}:
        data["init"] = None  # `init:` and nothing behind it
    init = data.get("init")
    kind, colon, location = init.partition(":") if isinstance(init, str) else ("", "", "")
    if kind in ("hf", "ckpt") and location:
        data["init"] = kind + colon + _absolute(location, ("init",), layers)
    sources = data["data"].get("sources") if isinstance(data.get("data"), dict) else None
    if isinstance(sources, dict):
        for source, value_given in sources.items():
            if isinstance(value_given, str):
                sources[source] = _absolute(value_given, ("data", "sources", source), layers)
    evaluation = data.get("evaluation")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("tasks"), list):
        # A word without a suffix is a task of lm-evaluation-harness.
        evaluation["tasks"] = [
            _absolute(task, ("evaluation", "tasks", index), layers)
            if isinstance(task, str) and ("/" in task or task.endswith((".yaml", ".yml")))
            else task
            for index, task in enumerate(evaluation["tasks"])
        ]
    for name, key in _PATH_KEYS:
        section = data.get(name, {})
        if not isinstance(section, dict) or (name == "trainer" and name not in data):
            continue
        value_given = section.get(key)
        if value_given is None:
            value_given = getattr(
                RunSpec.model_fields[name].default, key, "."
            )  # of trainer, the only one without a default
        is_word = key == "gemm_table" and value_given in ("auto", "off")
        is_shipped_template = (
            key == "template" and "/" not in str(value_given) and not str(value_given).endswith(".j2")
        )
        if isinstance(value_given, str) and not is_shipped_template and not is_word:
            section[key] = _absolute(value_given, (name, key), layers)
            data[name] = section


def _absolute(given: str, key: KeyPath, layers: Layers) -> str:
    """Return the path at `key`, absolute."""
    origin = layers.leaf_origin(key)
    path = expand(given)
    if not path.is_absolute():
        base = Path(origin.file).parent if origin.layer in _FILE_LAYERS and origin.file else Path()
        path = base.absolute() / path
    text = str(path)
    if any(character in text for character in _FORBIDDEN_IN_PATHS) or CONTROL.search(text):
        raise ConfigError(
            f"{origin.place}: {show_path(key)}: a path here cannot hold '%', '\\' or control characters: {text!a}"
        )
    return text


def load_spec(config_json: Path) -> RunSpec:
    """Read a resolved run back from RUN_DIR/config.json.

    Raises:
        ConfigError: it is missing, damaged, or of another version of zslurm.
    """
    try:
        data = load_json(config_json.read_bytes())
    except OSError as error:
        raise ConfigError(f"{config_json}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{config_json}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{config_json}: it is no configuration of a run")
    try:
        return spec_class(data).model_validate(data, context=RECORDED)
    except ValidationError as error:
        origin = Origin("run file", str(config_json))
        raise ConfigError(describe(error, Layers(data, {(): origin}, origin), RunSpec)[0]) from error


def run_file_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of run files: RunSpec with every section optional, and `extends`."""
    schema = RunSpec.model_json_schema()
    schema["title"] = "zslurm run file"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema.pop("required", None)
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "a recipe or a file that this one is laid over",
        "examples": sorted(recipes()),
    }
    return schema
