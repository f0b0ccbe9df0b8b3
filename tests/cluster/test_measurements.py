"""The file of measurements: what is in it reaches a run, and one that cannot be used is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zslurm.cluster.measurements import Measurements, StoredValue, read_measurements, write_measurements
from zslurm.cluster.profile import measured_path, measurements_of, profile_path
from zslurm.cluster.site import load_site
from zslurm.config.measured import MeasuredVariable
from zslurm.core.errors import ConfigError


def stored(value: float | str | MeasuredVariable, **changes: Any) -> StoredValue:
    fields: dict[str, Any] = {
        "value": value,
        "spread": 0.02,
        "date": "2026-11-23T16:00:00+00:00",
        "nodes": "node[0-3]",
        "ranks_per_node": 8,
        "device": "AMD Instinct MI300X",
        "versions": {"rocm": "7.1", "torch": "2.10.0"},
        "command": "zslurm bench collectives",
        "result": "/results/a.json",
    }
    return StoredValue(**fields | changes)


VALUES = {
    "doctor.hbm_gb_s": stored(3870.0),
    "storage_iops": stored(71_200.0, date="2026-11-20T10:00:00+00:00"),
    "measured.bucket_mb.4": stored(96.0),
    "measured.collectives.4": stored("two_level"),
    "measured.variables.NCCL_ALGO": stored(MeasuredVariable(best="Tree", others={"Ring": 1.2}, date="2026-11-23")),
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the measurements for the profile `lab`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("zslurm.cluster.profile.SITE_PROFILES", tmp_path / "site")
    (tmp_path / "site").mkdir()
    profile_path("lab").parent.mkdir(parents=True)
    profile_path("lab").write_text("cluster:\n  gpus_per_node: 8\n")
    return measured_path("lab")


def test_values_come_back_as_they_were_written(own: Path) -> None:
    measurements = Measurements(profile="lab", values=VALUES)
    write_measurements(own, measurements)
    assert read_measurements(own, "lab") == measurements
    assert measurements_of("lab") == [(own, measurements)]
    cluster = load_site("lab").cluster
    assert (cluster.doctor.hbm_gb_s, cluster.storage_iops) == (3870, 71_200)
    measured = cluster.measured
    assert (measured.bucket_mb, measured.collectives) == ({4: 96.0}, {4: "two_level"})
    assert (measured.device, measured.ranks_per_node) == ("AMD Instinct MI300X", 8)
    assert measured.variables["NCCL_ALGO"].others == {"Ring": 1.2}


def test_a_users_values_win_over_the_sites(own: Path, tmp_path: Path) -> None:
    of_site = Measurements(profile="lab", values={"doctor.hbm_gb_s": stored(3000.0)})
    write_measurements(tmp_path / "site" / own.name, of_site)
    assert load_site("lab").cluster.doctor.hbm_gb_s == 3000
    write_measurements(own, Measurements(profile="lab", values={"storage_iops": stored(5000.0)}))
    assert load_site("lab").cluster.doctor.hbm_gb_s == 3000, "what only the site measured stays"
    write_measurements(own, Measurements(profile="lab", values={"doctor.hbm_gb_s": stored(3500.0)}))
    assert load_site("lab").cluster.doctor.hbm_gb_s == 3500


def test_collectives_of_other_ranks_replace_the_older_ones_and_nothing_else() -> None:
    before = Measurements(profile="lab", values=VALUES)
    after = before.with_values({"measured.bucket_mb.2": stored(64.0, ranks_per_node=4)})
    assert set(after.values) == {"doctor.hbm_gb_s", "storage_iops", "measured.bucket_mb.2"}
    assert set(before.with_values({"measured.bucket_mb.2": stored(64.0)}).values) == {
        *VALUES,
        "measured.bucket_mb.2",
    }


def test_ranks_on_cpus_replace_no_collectives_of_gpus_and_a_part_no_whole() -> None:
    before = Measurements(profile="lab", values=VALUES)
    assert before.with_values({"measured.bucket_mb.4": stored(8.0, device="cpu")}) == before
    after = before.with_values({"storage_iops": stored(1.0), "doctor.gemm_tflops": stored(500.0)}, is_partial=True)
    assert (after.values["storage_iops"].value, after.values["doctor.gemm_tflops"].value) == (71_200, 500)


@pytest.mark.parametrize("key", ["gpu_type", "gpu_family"])
def test_values_of_another_card_are_not_used(own: Path, key: str) -> None:
    write_measurements(own, Measurements(profile="lab", values=VALUES))
    profile_path("lab").write_text(f"cluster:\n  gpus_per_node: 8\n  {key}: mi355x\n")
    cluster = load_site("lab").cluster
    assert cluster.doctor.hbm_gb_s != 3870 and cluster.measured.bucket_mb == {}
    assert cluster.measured.variables == {}
    assert cluster.storage_iops == 71_200, "storage does not depend on the card"


def test_a_profile_cannot_hold_measurements_itself(own: Path) -> None:
    profile_path("lab").write_text("cluster:\n  measured:\n    bucket_mb: {2: 64}\n")
    with pytest.raises(ConfigError, match=r"lab.yaml:2: cluster.measured: measurements are not part of a profile"):
        load_site("lab")


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    data = Measurements(profile="lab", values=VALUES).model_dump(mode="json")
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a file of measurements: "),
        ("[]", "Input should be "),
        (
            edited(lambda data: data.update(schema_version=2)),
            "format 2, of a newer zslurm; this one reads up to 1",
        ),
        (edited(lambda data: data.update(profile="farm")), "was measured with the profile farm, not with lab"),
        (
            edited(lambda data: data["values"]["storage_iops"].pop("date")),
            "values.storage_iops.date: Field required",
        ),
        (
            edited(lambda data: data["values"].update({"gpus_per_node": data["values"]["storage_iops"]})),
            "values.gpus_per_node: no such measurement",
        ),
        (
            edited(lambda data: data["values"]["measured.bucket_mb.4"].update(ranks_per_node=4)),
            "values.measured.bucket_mb.4 and values.measured.variables.NCCL_ALGO are of different ranks or GPUs",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(own: Path, text: str, message: str) -> None:
    own.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_site("lab")
    assert str(caught.value).startswith(f"{own}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_of_the_wrong_kind_is_named_with_its_file(own: Path) -> None:
    own.write_text(edited(lambda data: data["values"]["measured.collectives.4"].update(value="ring")))
    with pytest.raises(ConfigError, match=r"lab\.measured\.json: cluster\.measured\.collectives\."):
        load_site("lab")
