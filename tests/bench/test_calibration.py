"""A calibration: parts in order within a time, kept one by one, continued after whatever ended it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.synthetic import result
from tests.cluster.test_measurements import stored
from zslurm.bench import calibration as module
from zslurm.bench.calibration import CalibrationProgress, CalibrationRun, Part, Place
from zslurm.bench.result import BenchResult, ResultWriter, read_result
from zslurm.bench.results.apply import Found
from zslurm.bench.run.request import BenchRequest
from zslurm.checkpoint_tools import acquire
from zslurm.cluster.measurements import Measurements, read_measurements, write_measurements
from zslurm.cluster.site import Site
from zslurm.core.errors import ConfigError, ZslurmError

COPIES = [{"what": "memory", "ranks_rate": [4300.0]}]
PARTS = (
    Part("nodes", "all at once", 1.0, "mlp", keeps_values=False),
    Part("memory", "copies", 1.0, "speed"),
    Part("kernels", "kernels", 1.0, "kernels", needs_gpu=True, on_one_gpu=True),
    Part("storage", "storage", 2.0, "storage"),
)
READS = [{"operation": "random_read", "depth": 1, "how": "direct", "pages_per_s": 5000.0, "spread": 0.1}]
ROWS = {"mlp": [], "speed": COPIES, "storage": READS}


class Heard(CalibrationProgress):
    """Every call, as a line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def began(self, number: int, parts: int, part: Part, minutes: float) -> None:
        self.lines.append(f"{number}/{parts} {part.name} {minutes:.1f}")

    def skipped(self, part: Part, reason: str) -> None:
        self.lines.append(f"{part.name} skipped: {reason}")

    def ended(self, part: Part, result: BenchResult, found: Found | None) -> None:
        self.lines.append(f"{part.name} ended")

    def failed(self, part: Part, reason: str) -> None:
        self.lines.append(f"{part.name} failed: {reason}")


class Launches:
    """Stands for `launch`: every benchmark takes a minute, and what `ends` names ends otherwise."""

    def __init__(self) -> None:
        self.requests: list[BenchRequest] = []
        self.now = 0.0
        self.ends: dict[str, Callable[[], BenchResult]] = {}

    def __call__(self, request: BenchRequest, site: Site, writer: ResultWriter, progress: object) -> BenchResult:
        self.requests.append(request)
        self.now += 60.0
        end = self.ends.pop(request.benchmark, lambda: result(request.benchmark, ROWS[request.benchmark]))
        ended = end()
        writer.finish(ended)
        return ended


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(module, "launch", launches)
    return launches


class Calibrations:
    """Calls of the command, one after the other, on the same file."""

    def __init__(self, path: Path, launches: Launches) -> None:
        self.path, self.launches = path, launches

    def run(self, parts: Sequence[Part] = PARTS, **changes: Any) -> tuple[bool, list[str]]:
        heard = Heard()
        fields: dict[str, Any] = {"minutes": 10.0, "anew": False} | changes
        place = Place(Site(), fields.pop("nodes", ("n0", "n1")), fields.pop("has_gpus", False))
        calibration = CalibrationRun(self.path, "ours", parts, place, clock=lambda: self.launches.now, **fields)
        return calibration.measure(heard), heard.lines


@pytest.fixture
def calibrations(tmp_path: Path, launches: Launches) -> Calibrations:
    return Calibrations(tmp_path / "ours.measured.json", launches)


def measured(run: tuple[bool, list[str]]) -> list[str]:
    """Return the parts that a run measured, after which nothing is left."""
    over, lines = run
    assert over
    return [line.split()[0] for line in lines if line.endswith(" ended")]


def test_parts_share_the_time_that_is_left_and_values_are_kept(
    calibrations: Calibrations, launches: Launches
) -> None:
    over, lines = calibrations.run()
    assert over
    assert lines == [
        "kernels skipped: it needs a GPU",
        "2/4 nodes 2.5",  # a part in four of 10 minutes
        "nodes ended",
        "3/4 memory 3.0",  # a third of the 9 that are left
        "memory ended",
        "4/4 storage 8.0",
        "storage ended",
    ]
    assert [request.nodelist for request in launches.requests] == ["n[0-1]"] * 3
    kept = read_measurements(calibrations.path, "ours")
    assert kept is not None
    assert {key: stored.value for key, stored in kept.values.items()} == {
        "doctor.hbm_gb_s": 3870.0,
        "storage_iops": 5000.0,
    }
    assert kept.values["storage_iops"].result == str(calibrations.path.with_suffix("") / "storage.json")
    assert set(kept.parts) == {"nodes", "memory", "storage"}, "kernels are measured as soon as there is a GPU"


def test_what_was_measured_is_not_measured_again_unless_that_is_asked(
    calibrations: Calibrations, launches: Launches
) -> None:
    def interrupt() -> BenchResult:
        raise KeyboardInterrupt

    launches.ends["storage"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        calibrations.run()
    assert measured(calibrations.run()) == ["storage"]
    assert measured(calibrations.run()) == [], "all is measured"
    launches.ends["speed"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        calibrations.run(anew=True)
    assert measured(calibrations.run()) == ["memory", "storage"], "the rest of what was to be measured again"
    only_memory = [part for part in PARTS if part.name == "memory"]
    assert measured(calibrations.run(only_memory, anew=True)) == ["memory"]
    assert measured(calibrations.run()) == [], "the other parts stay measured"


def test_other_options_nodes_or_software_are_measured_anew(
    calibrations: Calibrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrations.run()
    other = [replace(part, options={"path": "/elsewhere"}) if part.name == "storage" else part for part in PARTS]
    assert measured(calibrations.run(other)) == ["storage"]
    assert measured(calibrations.run(other, nodes=("n0",))) == ["nodes", "memory", "storage"]
    monkeypatch.setattr(module, "torch_version", lambda cluster: "3.0")
    assert measured(calibrations.run(other, nodes=("n0",))) == ["nodes", "memory", "storage"]


def test_a_partial_result_replaces_no_whole_one(calibrations: Calibrations, launches: Launches) -> None:
    calibrations.run()
    slower = [COPIES[0] | {"ranks_rate": [1000.0]}]
    launches.ends["speed"] = lambda: result("speed", slower, complete=False)
    over, _ = calibrations.run(anew=True)
    assert not over
    kept = read_measurements(calibrations.path, "ours")
    assert kept is not None and kept.values["doctor.hbm_gb_s"].value == 3870.0
    assert read_result(calibrations.path.with_suffix("") / "memory.json").rows == COPIES


def test_what_others_write_meanwhile_stays(calibrations: Calibrations, launches: Launches) -> None:
    def apply() -> BenchResult:
        write_measurements(
            calibrations.path, Measurements(profile="ours", values={"doctor.gemm_tflops": stored(576.0)})
        )
        return result("speed", COPIES)

    launches.ends["speed"] = apply
    calibrations.run()
    kept = read_measurements(calibrations.path, "ours")
    assert kept is not None
    assert set(kept.values) == {"doctor.gemm_tflops", "doctor.hbm_gb_s", "storage_iops"}


def test_two_at_once_are_refused(calibrations: Calibrations, launches: Launches) -> None:
    (calibrations.path.with_suffix("")).mkdir()
    with (
        acquire(calibrations.path.with_suffix("")),
        pytest.raises(ZslurmError, match=r"ours\.measured\.json: .*process"),
    ):
        calibrations.run()
    assert launches.requests == []


def test_if_all_nodes_are_lost_nothing_is_measured_elsewhere(
    calibrations: Calibrations, launches: Launches
) -> None:
    launches.ends["mlp"] = lambda: result("mlp", [], complete=False, lost_nodes=["n0", "n1"])
    with pytest.raises(ZslurmError, match="all nodes of the job are lost"):
        calibrations.run()
    assert [request.benchmark for request in launches.requests] == ["mlp"]


def test_a_part_that_fails_does_not_end_the_others_and_is_tried_again(
    calibrations: Calibrations, launches: Launches
) -> None:
    def fail() -> BenchResult:
        raise ZslurmError("nothing was measured: a rank ended")

    launches.ends["speed"] = fail
    over, lines = calibrations.run()
    assert not over
    assert "memory failed: nothing was measured: a rank ended" in lines and lines[-1] == "storage ended"
    assert measured(calibrations.run()) == ["memory"]


def test_a_lost_node_is_left_out_and_its_part_is_measured_again(
    calibrations: Calibrations, launches: Launches
) -> None:
    launches.ends["speed"] = lambda: result("speed", COPIES, complete=False, lost_nodes=["n1"])
    over, _ = calibrations.run()
    assert not over
    assert [request.nodelist for request in launches.requests] == ["n[0-1]", "n[0-1]", "n0"]
    kept = read_measurements(calibrations.path, "ours")
    assert kept is not None and "doctor.hbm_gb_s" in kept.values, (
        "a partial result counts until there is a whole one"
    )
    assert measured(calibrations.run()) == ["memory"]


def test_a_benchmark_that_an_interruption_ends_early_ends_the_calibration(
    calibrations: Calibrations, launches: Launches
) -> None:
    came = [False]

    def interrupted() -> BenchResult:
        came[0] = True
        return result("speed", COPIES, complete=False)

    launches.ends["speed"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        calibrations.run(stopped=lambda: came[0])
    assert [request.benchmark for request in launches.requests] == ["mlp", "speed"]
    assert measured(calibrations.run()) == ["memory", "storage"], "the part that was cut short is measured again"


def test_without_time_nothing_begins(calibrations: Calibrations) -> None:
    over, lines = calibrations.run(minutes=1.5)
    assert not over
    assert lines[-1] == f"storage failed: {module.NO_TIME}"
    assert calibrations.run()[0]


def test_slow_nodes_are_kept_with_their_part(calibrations: Calibrations, launches: Launches) -> None:
    launches.ends["mlp"] = lambda: result("mlp", [], slow=["n1 GPU 3"], exclude=["n1"])
    calibrations.run()
    kept = read_measurements(calibrations.path, "ours")
    assert kept is not None
    nodes = kept.parts["nodes"]
    assert (nodes.slow, nodes.exclude, nodes.nodes) == (("n1 GPU 3",), ("n1",), "n[0-1]")


def test_one_gpu_of_the_first_node_measures_kernels(calibrations: Calibrations, launches: Launches) -> None:
    row = {"operation": "muon.update", "architecture": "cpu", "fastest": "hip"}
    launches.ends["kernels"] = lambda: result("kernels", [row])
    kernels = [part for part in PARTS if part.name == "kernels"]
    assert measured(calibrations.run(kernels, has_gpus=True)) == ["kernels"]
    (request,) = launches.requests
    assert (request.nodelist, request.nodes, request.ranks) == ("n0", 1, 1)
    assert measured(calibrations.run(kernels, has_gpus=True, nodes=("n0", "n1", "n2"))) == [], (
        "the number of nodes changes nothing for one GPU"
    )


def test_a_file_that_cannot_be_used_is_refused_before_anything_is_measured(
    calibrations: Calibrations, launches: Launches
) -> None:
    calibrations.path.write_text("{}")
    with pytest.raises(ConfigError, match=r"ours\.measured\.json"):
        calibrations.run()
    assert launches.requests == []
