"""From results to the profile, and from the profile to runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.synthetic import collective, result
from zslurm.bench.results.apply import settings_from
from zslurm.config import yaml12
from zslurm.config.load import resolve
from zslurm.config.measured import MeasuredVariable
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.submit.checks.measured import off_measured

FILE = Path("/results/a.json")


def test_buckets_and_levels_of_each_number_of_nodes() -> None:
    rows = [
        *collective(1, 2e-5, 3e11),
        *collective(2, 1e-4, 3e11),
        *collective(2, 4e-5, 3.3e11, levels="two_level"),
        *collective(4, 1e-4, 3.02e11),
        *collective(4, 1.5e-4, 3e11, levels="two_level"),
    ]
    found = settings_from(result("collectives", rows), FILE)
    ways = {key: stored.value for key, stored in found.values.items() if "collectives" in key}
    assert ways == {"measured.collectives.2": "two_level", "measured.collectives.4": "flat"}
    expected = {1: 19 * 2e-5 * 3e11, 2: 19 * 4e-5 * 3.3e11, 4: 19 * 1e-4 * 3.02e11}
    buckets = {key: stored.value for key, stored in found.values.items() if "bucket" in key}
    assert buckets == {
        f"measured.bucket_mb.{nodes}": pytest.approx(size / 2**20, rel=0.06, abs=1)
        for nodes, size in expected.items()
    }
    stored = found.values["measured.bucket_mb.2"]
    assert (stored.result, stored.ranks_per_node, stored.nodes) == (str(FILE), 8, "n[0-3]")
    assert (stored.device, stored.versions) == ("AMD Instinct MI300X", {"torch": "2.10.0"})
    assert stored.command == "zslurm bench collectives"
    assert any("2 nodes: two level is 1." in line for line in found.lines)


def test_wrong_data_environments_and_parts_of_a_node_give_no_bucket() -> None:
    rows = [
        *collective(1, 2e-5, 3e11, wrong=3),
        *collective(2, 2e-5, 3e11, environment="NCCL_ALGO=Ring"),
        *collective(1, 2e-5, 3e11, ranks=4),
    ]
    found = settings_from(result("collectives", rows), FILE)
    assert found.values == {}
    assert "no bucket follows" in found.lines[-1]


def test_a_bandwidth_that_still_rises_is_named() -> None:
    rows = [row for row in collective(2, 1e-3, 3e11) if row["bytes"] <= 2**24]
    found = settings_from(result("collectives", rows), FILE)
    assert found.values == {}
    assert "2 nodes: the bandwidth still rises at 16.0 MiB; measure larger sizes" in found.lines
    assert not any("over four sizes" in line for line in found.lines), "there are enough of them"


def test_the_better_value_of_a_variable_is_kept_with_its_gain() -> None:
    rows = [
        *collective(2, 1e-4, 3e11, environment="NCCL_MIN_NCHANNELS=64"),
        *collective(2, 1e-4 / 1.3, 3.9e11, environment="NCCL_MIN_NCHANNELS=112"),
        *collective(2, 1e-4 / 1.1, 3.3e11, environment="NCCL_MIN_NCHANNELS=112"),
        *collective(2, 1e-4, 3e11, environment="NCCL_MIN_NCHANNELS=64"),
    ]
    stored = settings_from(result("collectives", rows), FILE).values["measured.variables.NCCL_MIN_NCHANNELS"]
    assert isinstance(stored.value, MeasuredVariable)
    assert stored.value.best == "112"
    assert stored.value.others == {"64": pytest.approx(1.2, abs=0.01)}
    assert stored.spread == pytest.approx(0.083, abs=0.01), "of repetitions: none for 64, 17 % for 112"


def test_a_comparison_that_was_not_repeated_gives_no_value() -> None:
    rows = [
        *collective(2, 1e-4, 3e11, environment="NCCL_MIN_NCHANNELS=64"),
        *collective(2, 1e-4, 3.9e11, environment="NCCL_MIN_NCHANNELS=112"),
    ]
    found = settings_from(result("collectives", rows, complete=False), FILE)
    assert found.values == {}
    assert "NCCL_MIN_NCHANNELS: its values were compared only once, so the noise is not known" in found.lines


def test_the_doctors_thresholds_are_below_healthy_medians() -> None:
    rows = [
        {"what": "product", "ranks_rate": [640.0] * 8},
        {"what": "memory", "ranks_rate": [4257.0, 4300.0, 4343.0]},
        {"what": "all_reduce", "ranks_rate": [313.0] * 8},
    ]
    found = settings_from(result("speed", rows), FILE).values
    assert {key: stored.value for key, stored in found.items()} == {
        "doctor.gemm_tflops": 576,
        "doctor.hbm_gb_s": 3870,
        "doctor.all_reduce_gb_s": 282,
    }
    assert found["doctor.hbm_gb_s"].spread == pytest.approx(0.01, rel=0.01), "of the three GPUs"


def test_figures_of_cpus_are_no_threshold_for_gpus() -> None:
    rows = [{"what": "memory", "ranks_rate": [20.0]}]
    found = settings_from(result("speed", rows, machine={"device": "cpu", "gpu": None}), FILE)
    assert found.values == {} and "nothing follows" in found.lines[0]


def test_the_budget_of_storage_is_the_best_rate_of_random_reads() -> None:
    rows = [
        {"operation": operation, "depth": depth, "how": "direct", "pages_per_s": rate}
        for operation, depth, rate in (("random_read", 1, 4e3), ("random_read", 64, 71_234.0), ("list", 0, None))
    ]
    found = settings_from(result("storage", rows), FILE)
    assert {key: stored.value for key, stored in found.values.items()} == {"storage_iops": 71_200}
    assert found.lines == ["storage_iops: 71,200 pages of 4 KiB a second in random reads at depth 64, direct"]


@pytest.mark.parametrize("damage", [{"bytes": "x"}, {"seconds": None}, {"levels": None, "nodes": None}])
def test_damaged_rows_get_one_line(damage: dict[str, Any]) -> None:
    rows = [row | damage for row in collective(2, 1e-4, 3e11)]
    with pytest.raises(ConfigError, match="rows are damaged") as caught:
        settings_from(result("collectives", rows), FILE)
    assert "\n" not in str(caught.value)


# --- runs -------------------------------------------------------------------------------------------------------

MEASURED = {
    "date": "2026-11-23",
    "device": "AMD Instinct MI300X",
    "ranks_per_node": 8,
    "bucket_mb": {1: 8, 2: 96, 8: 256},
    "collectives": {2: "two_level", 8: "flat"},
}


def run_on(tmp_path: Path, nodes: int, measured: dict[str, Any] = MEASURED, **parallel: Any) -> RunSpec:
    profile = {"gpus_per_node": 8, "launcher": "local", "measured": measured}
    document = yaml12.YamlDocument({"cluster": profile}, {})
    path = tmp_path / "run.yaml"
    body = {
        "extends": "zaya1-8b",
        "data": {"path": "t.h5"},
        "slurm": {"nodes": nodes},
        "parallel": {"device": "cuda"} | parallel,
    }
    path.write_text(json.dumps(body))
    return resolve(path, profile=[(document, "profile")]).spec


@pytest.mark.parametrize(
    ("nodes", "bucket_mb", "collectives"),
    [
        (1, 8, "auto"),
        (2, 96, "two_level"),
        (3, 96, "two_level"),
        (4, 256, "flat"),
        (16, 256, "flat"),
        (17, None, "flat"),
    ],
)
def test_a_run_takes_what_was_measured_for_about_as_many_nodes(
    tmp_path: Path, nodes: int, bucket_mb: float | None, collectives: str
) -> None:
    parallel = run_on(tmp_path, nodes).parallel
    assert (parallel.bucket_mb, parallel.collectives) == (bucket_mb, collectives)


def test_what_the_run_file_gives_wins_and_is_named_where_it_is_off(tmp_path: Path) -> None:
    spec = run_on(tmp_path, 2, bucket_mb=16, collectives="flat")
    assert (spec.parallel.bucket_mb, spec.parallel.collectives) == (16, "flat")
    bucket, way = off_measured(spec)
    assert bucket.startswith(
        "parallel.bucket_mb: 16, but 96 MiB is the smallest bucket with full bandwidth on 2 nodes"
    )
    assert "(measured 2026-11-23)" in bucket
    assert way.startswith("parallel.collectives: flat, but two_level is faster on 2 nodes")
    assert off_measured(run_on(tmp_path, 2)) == []
    assert off_measured(run_on(tmp_path, 2, bucket_mb=64)) == [], "within a power of two of the measured one"


def test_other_ranks_on_a_node_and_other_devices_take_nothing(tmp_path: Path) -> None:
    assert run_on(tmp_path, 2, MEASURED | {"ranks_per_node": 4}).parallel.bucket_mb is None
    assert run_on(tmp_path, 2, MEASURED | {"device": "cpu"}).parallel.bucket_mb is None
    assert run_on(tmp_path, 2, device="cpu").parallel.bucket_mb is None


def test_a_bucket_is_at_most_a_part_in_four_of_the_gradients(tmp_path: Path) -> None:
    spec = run_on(tmp_path, 2, MEASURED | {"bucket_mb": {2: 1e6}})
    assert spec.parallel.bucket_mb is not None
    assert 4 * spec.parallel.bucket_mb == pytest.approx(33_000, rel=0.1), "8.3e9 parameters in fp32"


def test_a_slower_value_of_a_variable_is_named(tmp_path: Path) -> None:
    variable = {"best": "112", "others": {"64": 1.2}, "date": "2026-11-23"}
    document = {"gpus_per_node": 8, "launcher": "local", "env": {"X_CHANNELS": "64"}}
    spec = run_on(tmp_path, 2, MEASURED | {"variables": {"X_CHANNELS": variable}})
    cluster = spec.cluster.model_copy(update={"env": document["env"]})
    (line,) = off_measured(spec.model_copy(update={"cluster": cluster}))
    why = "112 has 1.20 times its bandwidth here (measured 2026-11-23)"
    assert line == f"X_CHANNELS=64, but {why}; set cluster.env.X_CHANNELS"
