"""What a submission says of a cluster's measurements, and what it takes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_measurements import stored
from zslurm.cluster.measurements import Measurements, write_measurements
from zslurm.cluster.profile import measured_path, profile_layers, profile_path
from zslurm.cluster.rccl.environment import MEASURED, environment
from zslurm.config.load import Resolved, resolve
from zslurm.config.measured import MeasuredVariable
from zslurm.submit.checks.measured import about_measurements, sources_of_values

PROFILE = """\
cluster:
  gpus_per_node: 8
  gpu_type: mi300x
  rocm_version: "7.1"
  rails_only: true
"""


class Lab:
    """A profile, its measurements, and a run on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        profile_path("lab").parent.mkdir(parents=True)
        profile_path("lab").write_text(PROFILE)

    def measured(self, **values: Any) -> None:
        named = {key.replace("__", "."): value for key, value in values.items()}
        write_measurements(measured_path("lab"), Measurements(profile="lab", values=named))

    def run(self, **sections: Any) -> Resolved:
        path = self.directory / "run.yaml"
        body = {"extends": "zaya1-8b", "data": {"path": "t.h5"}, "slurm": {"nodes": 2}} | sections
        path.write_text(json.dumps(body))
        return resolve(path, profile=profile_layers("lab"))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("zslurm.config.software.torch_version", lambda cluster: "2.10.0")
    return Lab(tmp_path)


def test_a_cluster_of_gpus_that_was_not_measured_gets_a_line(lab: Lab) -> None:
    (line,) = about_measurements(lab.run().spec)
    assert line.startswith("nothing was measured on lab: ") and "`zslurm calibrate`" in line
    assert about_measurements(lab.run(parallel={"device": "cpu"}).spec) == []
    lab.measured(storage_iops=stored(5000.0, device="cpu"))
    assert len(about_measurements(lab.run().spec)) == 1, "a measurement without GPUs is none of GPUs"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"versions": {"rocm": "7.1.1-38", "torch": "2.10.0+rocm7.1"}}, None),
        (
            {"versions": {"rocm": "6.4", "torch": "2.10.0"}},
            "cluster.rocm_version is 7.1, the measurement's ROCm 6.4",
        ),
        ({"versions": {"torch": "2.9.1"}}, "the job's torch is 2.10.0, the measurement's 2.9.1"),
        ({"device": "AMD Instinct MI250X"}, "the GPUs are mi300x, the measurement's AMD Instinct MI250X"),
    ],
)
def test_measurements_with_something_else_get_a_line(lab: Lab, changes: dict[str, Any], why: str | None) -> None:
    lab.measured(doctor__hbm_gb_s=stored(3870.0, **changes))
    lines = about_measurements(lab.run().spec)
    assert len(lines) == (0 if why is None else 1)
    if why is not None:
        assert lines[0].startswith("doctor.hbm_gb_s was measured on lab on 2026-11-23 with something else: ")
        assert why in lines[0] and "`zslurm calibrate RUN --again`" in lines[0]


def test_collectives_of_another_card_are_not_used(lab: Lab) -> None:
    lab.measured(measured__bucket_mb__2=stored(96.0))
    assert lab.run().spec.parallel.bucket_mb == 96
    lab.measured(measured__bucket_mb__2=stored(96.0, device="AMD Instinct MI250X"))
    assert lab.run().spec.parallel.bucket_mb is None


def test_an_older_value_gets_a_line_whatever_was_measured_since(lab: Lab) -> None:
    old = {"versions": {"rocm": "6.2", "torch": "2.10.0"}}
    lab.measured(
        measured__bucket_mb__2=stored(96.0, **old),
        storage_iops=stored(5000.0, date="2026-11-27T00:00:00+00:00"),
    )
    (line,) = about_measurements(lab.run().spec)
    assert line.startswith("measured.bucket_mb.2 was measured on lab")


def test_a_profile_that_calls_itself_otherwise_has_its_measurements(lab: Lab) -> None:
    profile_path("lab").write_text(PROFILE + "  name: fancy\n")
    lab.measured(measured__bucket_mb__2=stored(96.0))
    spec = lab.run().spec
    assert (spec.cluster.name, spec.parallel.bucket_mb, about_measurements(spec)) == ("fancy", 96, [])


def test_each_value_has_its_source(lab: Lab) -> None:
    resolved = lab.run()
    rows = {row["key"]: row for row in sources_of_values(resolved.spec, resolved.layers)}
    assert rows["parallel.bucket_mb"]["source"] == "a guess, by the model of docs/plan.md"
    assert rows["parallel.collectives"]["source"].endswith(f"{profile_path('lab')}:5")
    assert rows["rates of products"] == {"key": "rates of products", "value": "250 TFLOPS", "source": "a guess"}
    assert rows["rate of memory"]["source"] == "a published figure (arXiv 2511.17127)"
    later = {"date": "2026-11-27T00:00:00+00:00", "nodes": "node[0-7]"}
    lab.measured(
        measured__bucket_mb__2=stored(96.0),
        measured__bucket_mb__8=stored(256.0, **later),
        measured__collectives__2=stored("flat"),
    )
    resolved = lab.run()
    rows = {row["key"]: row for row in sources_of_values(resolved.spec, resolved.layers)}
    assert rows["parallel.bucket_mb"]["value"] == "96.0"
    assert rows["parallel.bucket_mb"]["source"].startswith("measured 2026-11-23 on node[0-3], ")
    assert rows["parallel.collectives"]["value"] == "flat"
    resolved = lab.run(parallel={"bucket_mb": 32})
    rows = {row["key"]: row for row in sources_of_values(resolved.spec, resolved.layers)}
    assert "run.yaml" in rows["parallel.bucket_mb"]["source"]


@pytest.mark.parametrize(
    ("others", "spread", "value"),
    [
        ({"": 1.2}, 0.05, "112"),
        ({"": 1.02}, 0.0, None),  # within 3 %
        ({"": 1.2}, 0.3, None),  # within the noise
    ],
)
def test_a_faster_value_is_set_if_the_gain_is_larger_than_the_noise(
    lab: Lab, others: dict[str, float], spread: float, value: str | None
) -> None:
    variable = MeasuredVariable(best="112", others=others, date="2026-11-23", spread=spread)
    lab.measured(measured__variables__NCCL_MIN_NCHANNELS=stored(variable))
    settings = {setting.name: setting for setting in environment(lab.run().spec.cluster)}
    if value is None:
        assert "NCCL_MIN_NCHANNELS" not in settings
    else:
        setting = settings["NCCL_MIN_NCHANNELS"]
        assert (setting.value, setting.origin) == (value, MEASURED)
        assert setting.reason == "measured here 2026-11-23: 1.20 times the bandwidth with no value"


def test_variables_of_cpus_or_another_card_are_not_set(lab: Lab) -> None:
    variable = MeasuredVariable(best="112", others={"": 1.2}, date="2026-11-23")
    for device in ("cpu", "AMD Instinct MI250X"):
        lab.measured(measured__variables__NCCL_MIN_NCHANNELS=stored(variable, device=device))
        assert "NCCL_MIN_NCHANNELS" not in {one.name for one in environment(lab.run().spec.cluster)}


def test_what_the_profile_sets_and_what_is_no_candidate_stay_as_they_are(lab: Lab) -> None:
    tree = MeasuredVariable(best="Tree", others={"Ring": 1.5, "": 1.5}, date="2026-11-23")
    channels = MeasuredVariable(best="112", others={"": 1.2, "64": 1.3}, date="2026-11-23")
    lab.measured(
        measured__variables__NCCL_ALGO=stored(tree), measured__variables__NCCL_MIN_NCHANNELS=stored(channels)
    )
    profile_path("lab").write_text(PROFILE + '  env: {NCCL_MIN_NCHANNELS: "64"}\n')
    values = {setting.name: setting.value for setting in environment(lab.run().spec.cluster)}
    assert values["NCCL_MIN_NCHANNELS"] == "64" and "NCCL_ALGO" not in values
