"""The shipped recipes are valid runs, the schema agrees with the loader, and config.json reads back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.config.run_files import PHASES, resolve_text
from zslurm.config import yaml12
from zslurm.config.load import load_spec, recipes, run_file_schema
from zslurm.core.errors import ConfigError
from zslurm.train.config import load_train_config


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_a_valid_run_by_itself_and_by_the_schema(tmp_path: Path, name: str) -> None:
    spec = resolve_text(tmp_path, f"extends: {name}\n").spec
    assert spec.total_steps > 0
    jsonschema.validate(yaml12.parse(recipes()[name], name).data, run_file_schema())


def test_the_schema_is_a_schema_and_describes_every_key() -> None:
    schema = run_file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "required" not in schema, "a run file may leave out what its recipe gives"
    for section in schema["$defs"].values():
        for key, described in section["properties"].items():
            assert described.get("description"), key


@pytest.mark.parametrize(
    "run_file",
    [
        {"extends": "zaya1-tiny", "run": {"name": "x"}},
        {"slurm": {"nodes": 2, "time": "24:00:00", "flags": {"exclusive": True, "reservation": "spring"}}},
        {"cluster": {"setup": ["module load rocm"], "env": {"A": "b"}}},
    ],
)
def test_the_schema_accepts_good_run_files(run_file: dict[str, Any]) -> None:
    jsonschema.validate(run_file, run_file_schema())


@pytest.mark.parametrize(
    "run_file",
    [
        {"modle": {}},
        {"model": {"hiden_size": 1}},
        {"model": {"layers": 0}},
        {"model": {"layers": "two"}},
        {"phases": []},
        {"parallel": {"dtype": "fp8"}},
        {"extends": 5},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(run_file: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(run_file, run_file_schema())


def test_config_json_reads_back_as_the_same_run(tmp_path: Path) -> None:
    text = (
        f"{PHASES}run: {{name: x, seed: 5}}\noptim: {{clip_norm: null, betas: [0.5, 0.75]}}\n"
        "slurm: {nodes: 3, time: 2-12, flags: {exclusive: true, comment: ünïcode, hold: null}}\n"
        "cluster: {setup: [module load rocm], env: {A: 'b c'}, gpus_per_node: 8}\n"
    )
    spec = resolve_text(tmp_path, text).spec
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec.model_dump(mode="json")))
    assert load_spec(path) == spec
    trainers = load_train_config(path)
    assert trainers.model == spec.model
    assert trainers.phases == spec.phases
    assert trainers.run.seed == 5


def test_a_resolved_run_is_frozen(tmp_path: Path) -> None:
    spec = resolve_text(tmp_path, PHASES).spec
    with pytest.raises(ValueError, match="frozen"):
        spec.model.layers = 1  # type: ignore[misc]


def test_a_damaged_config_json_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file"):
        load_spec(path)
    for text, message in [
        ("{", r"config\.json: it is not JSON"),
        ("[]", r"config\.json: it is no configuration of a run"),
        ("{}", r"config\.json: phases: required, but not given$"),
        ('{"phases": [], "aegis": {"pol_s": 1}}', r"config\.json: phases: expected at least one item, got \[\]$"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_spec(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"config\.json: it is not UTF-8 text"):
        load_spec(path)


def test_what_follows_from_a_run(tmp_path: Path) -> None:
    """Ranks, steps and cores of a run come from its keys by one rule each."""
    spec = resolve_text(tmp_path, PHASES).spec
    assert (spec.ranks_per_node, spec.world_size, spec.cpus_per_task, spec.total_steps) == (1, 1, 1, 10)
    cluster = "cluster: {gpus_per_node: 8, cpus_per_node: 96}\nslurm: {nodes: 4}\n"
    spec = resolve_text(tmp_path, PHASES + cluster).spec
    assert (spec.ranks_per_node, spec.world_size, spec.cpus_per_task) == (8, 32, 12)
    spec = resolve_text(tmp_path, PHASES + cluster, "slurm.ranks_per_node=2", "slurm.cpus_per_task=5").spec
    assert (spec.ranks_per_node, spec.world_size, spec.cpus_per_task) == (2, 8, 5)
    assert resolve_text(tmp_path, PHASES, "phases[0].tokens=961").spec.total_steps == 11, "the last step is whole"
    ramp = "phases[0].batch_ramp=[{until_tokens: 160, global_batch: 2}]"
    assert resolve_text(tmp_path, PHASES, ramp).spec.total_steps == 5 + 9, "800 of 960 tokens are left, 96 a step"
