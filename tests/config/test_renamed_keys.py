"""Old names of configuration keys: accepted with a line, refused beside the new one, read from config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.submit.specs import run_spec
from zslurm.config import renamed_keys, yaml12
from zslurm.config.layers import Layers
from zslurm.config.load import load_spec, validate
from zslurm.core.errors import ConfigError

OLD_FILE = "aegis:\n  retries: 2\n  silent_s: 11\n"


@pytest.fixture(autouse=True)
def _nothing_was_reported() -> None:
    renamed_keys.report.cache_clear()


def _layers(text: str = "", *overrides: str) -> Layers:
    layers = Layers()
    layers.add(yaml12.parse(text, "run.yaml"), "run file", "run.yaml")
    for assignment in overrides:
        layers.override(assignment)
    return layers


def test_a_run_file_with_an_old_name_is_resolved_to_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    layers = _layers(OLD_FILE)
    assert layers.data["aegis"] == {"retries": 2, "heartbeat_timeout_s": 11}
    assert layers.leaf_origin(("aegis", "heartbeat_timeout_s")).place == "run.yaml:3"
    _layers(OLD_FILE)
    assert capsys.readouterr().err.splitlines() == [
        "run.yaml:3: aegis.silent_s is called aegis.heartbeat_timeout_s now; "
        "a later version will refuse the old name"
    ]


@pytest.mark.parametrize("assignment", ["aegis.deputy_s=7", "aegis={deputy_s: 7}"])
def test_an_override_with_an_old_name_counts(assignment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _layers("aegis:\n  standby_s: 5\n", assignment).data["aegis"]["standby_s"] == 7
    assert "--set: aegis.deputy_s is called aegis.standby_s now" in capsys.readouterr().err


def test_a_wrong_value_under_an_old_name_is_refused_where_it_is() -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:2: aegis\.heartbeat_timeout_s"):
        validate(_layers("aegis:\n  silent_s: never\n"))


def test_both_names_in_one_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:2: aegis\.silent_s is the old name"):
        _layers("aegis:\n  silent_s: 11\n  heartbeat_timeout_s: 12\n")


def test_a_config_json_of_an_older_version_loads_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = run_spec(tmp_path)
    body = json.loads(default.model_dump_json())
    assert "silent_s" not in body["aegis"]
    body["aegis"]["silent_s"] = body["aegis"].pop("heartbeat_timeout_s") + 1
    body["aegis"]["deputy_s"] = body["aegis"].pop("standby_s") + 1
    (tmp_path / "config.json").write_text(json.dumps(body))
    aegis = load_spec(tmp_path / "config.json").aegis
    assert aegis.heartbeat_timeout_s == default.aegis.heartbeat_timeout_s + 1
    assert aegis.standby_s == default.aegis.standby_s + 1
    assert capsys.readouterr().err == ""
