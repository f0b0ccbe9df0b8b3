"""`python -m benchmarks gpu`: parts that end, fail, hang and are not reached, on a simulated card; and no card."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import command
from benchmarks.gpu.muon_step import shares
from benchmarks.gpu.parts import GROUPS, PARTS, files_of_tests, rows_of_report
from tests.checkout import ROOT
from zslurm.kernels.cache import measured_tables
from zslurm.train.allocator import DEFAULT, VARIABLES

CARD = {"card": "Simulated MI300X (1/8)", "driver": "6.12.12", "torch": "2.13.0"}
PROCESS = """
import sys, time
out = open(sys.argv[2], "a")
for number in range(2):
    print('{"row": %d}' % number, file=out, flush=True)
print('{"half a', end="", file=out, flush=True)
if sys.argv[1] == "check":
    sys.exit("muon: hip is wrong")
if sys.argv[1] == "figures":
    time.sleep(1000)
"""


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card, and parts that are processes of the test: `check` fails and `figures` hangs."""
    monkeypatch.setattr(command, "describe", lambda device: CARD)
    monkeypatch.setattr(
        command, "command_of", lambda name, device, rows: [sys.executable, "-c", PROCESS, name, str(rows)]
    )


def result_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    assert file.name == "gpu-simulated-mi300x-1-8.json"
    body: dict[str, Any] = json.loads(file.read_text())
    return body


@pytest.mark.usefixtures("simulated")
def test_a_part_that_fails_leaves_its_rows_and_the_next_part_runs(tmp_path: Path) -> None:
    asked = ["gpu", "--results", str(tmp_path), *(f"--only={name}" for name in ("check", "build"))]
    assert main(asked) == 1
    body = result_of(tmp_path)
    assert {key: body[key] for key in CARD} == CARD
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", body["date"])
    assert list(body["parts"]) == ["check", "build"]
    for part, status in zip(body["parts"].values(), ("failed", "done"), strict=True):
        assert part["status"] == status
        assert part["rows"] == [{"row": 0}, {"row": 1}]
    assert body["parts"]["check"]["log"] == ["muon: hip is wrong"]


@pytest.mark.usefixtures("simulated")
def test_a_part_that_hangs_is_ended_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had is kept, and the parts behind it are named."""
    wait = command.subprocess.Popen.wait

    def until_both_rows(child: Any, timeout: float | None = None) -> int:
        if timeout is not None and child.args[3] == "figures":
            rows = Path(child.args[4])
            while rows.read_text().count("\n") < 2:
                assert child.poll() is None
            raise command.subprocess.TimeoutExpired(child.args, timeout)
        return int(wait(child, timeout))

    clock = iter([0.0, 0.0, 0.0, 1.0, 599.0, 599.0, 599.0, 599.0, 599.0])
    monkeypatch.setattr(command.subprocess.Popen, "wait", until_both_rows)
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock, 599.0))
    assert main(["gpu", "--results", str(tmp_path), "--only=figures", "--only=tests"]) == 0
    parts = result_of(tmp_path)["parts"]
    assert parts["figures"]["status"] == "out of time"
    assert parts["figures"]["rows"] == [{"row": 0}, {"row": 1}]
    assert parts["tests"] == {"status": "no time", "rows": [], "seconds": 0.0}


@pytest.mark.usefixtures("simulated")
def test_a_second_call_continues_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of results, or where results are committed; a result of another driver is left alone."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["gpu", "--results", str(first), "--only=build", "--only=memory"]) == 0
    monkeypatch.setattr(command, "RESULTS", first)
    monkeypatch.setattr(command, "SHORTEST_S", 1e6)
    assert main(["gpu", "--results", str(second), "--only=build", "--only=tests"]) == 0
    statuses = {name: part["status"] for name, part in result_of(second)["parts"].items()}
    assert statuses == {"build": "done", "memory": "done", "tests": "no time"}
    assert result_of(second)["parts"]["build"]["date"] == result_of(first)["date"]
    monkeypatch.setattr(command, "describe", lambda device: {**CARD, "driver": "7.0"})
    main(["gpu", "--results", str(second), "--only=tests"])
    assert list(result_of(second)["parts"]) == ["tests"]


@pytest.mark.usefixtures("simulated")
def test_groups_have_a_time_limit_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run_parts(names: Any, device: str, budget_s: float, file: Path, about: dict[str, Any]) -> dict[str, Any]:
        calls.append((list(names), budget_s))
        return {**about, "date": "2026-11-28", "parts": {}}

    monkeypatch.setattr(command, "run_parts", run_parts)
    kernels, training = ([name for name, part in PARTS.items() if part.group == each] for each in GROUPS)
    assert main(["gpu", "--results", str(tmp_path), "training"]) == 0
    assert calls == [(training, 540)]
    calls.clear()
    assert main(["gpu", "--results", str(tmp_path), "--minutes", "2"]) == 0
    assert calls == [(kernels, 120), (training, 120)]
    assert kernels.index("products") < kernels.index("figures"), "figures use the measured tables"


def test_measured_tables_are_kept_for_later_parts_and_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file that the dispatch reads; a later call writes them there from the result."""
    table = {"gfx942": [{"use": "triton"}]}
    rows = [{"operation": "symmetric_product"}, {"tables": {"symmetric_product": table}, "architecture": "gfx942"}]

    def run_part(name: str, device: str, limit_s: float, keep: Any) -> dict[str, Any]:
        if name == "figures":
            file = measured_tables()
            assert file is not None and json.loads(file.read_text()) == {"symmetric_product": table}
        return {"status": "done", "rows": rows if name == "products" else [], "seconds": 0.0}

    monkeypatch.setattr(command, "run_part", run_part)
    for machine, names in (("first", ["products", "figures"]), ("second", ["figures"])):
        monkeypatch.setenv("ZSLURM_KERNEL_TABLES", str(tmp_path / machine / "tables.json"))
        command.run_parts(names, "gpu", 600, tmp_path / "result.json", CARD)


@pytest.mark.usefixtures("simulated")
def test_rows_of_a_part_under_way_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are in the result if all processes are ended at once."""
    monkeypatch.setattr(command, "BETWEEN_WRITES_S", 0.01)

    class SeenError(Exception):
        pass

    def keep(part: dict[str, Any]) -> None:
        assert part["status"] == "running"
        if len(part["rows"]) == 2:
            raise SeenError

    with pytest.raises(SeenError):
        command.run_part("figures", "cpu", 600, keep)


def test_no_part_takes_more_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}

    def run_part(name: str, device: str, limit_s: float, keep: Any) -> dict[str, Any]:
        limits[name] = limit_s
        return {"status": "done", "rows": [], "seconds": 0.0}

    monkeypatch.setattr(command, "run_part", run_part)
    command.run_parts(PARTS, "cpu", 600, tmp_path / "result.json", CARD)
    assert limits.keys() == PARTS.keys()
    assert all(limits[name] <= 600 * part.share for name, part in PARTS.items())
    assert limits["build"] <= 150, "later parts get their time"


def test_parts_train_with_the_allocator_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert command.environment_of_parts()["PYTORCH_ALLOC_CONF"] == DEFAULT
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert "PYTORCH_ALLOC_CONF" not in command.environment_of_parts()


def test_an_allocator_that_does_not_work_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that what is set is undone
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    asked = []

    def ask(device: str) -> Any:
        asked.append(command.environment_of_parts()["PYTORCH_ALLOC_CONF"])
        failed = asked[-1] == DEFAULT
        out, error = ("", "Traceback\nRuntimeError: not supported") if failed else (json.dumps(CARD), "")
        return command.subprocess.CompletedProcess([], int(failed), out, error)

    monkeypatch.setattr(command, "ask_device", ask)
    assert command.describe("gpu") == CARD
    assert asked == [DEFAULT, "expandable_segments:False"]
    assert capsys.readouterr().err == f"{DEFAULT} does not work here: RuntimeError: not supported\n"


def test_packages_that_are_missing_are_named(
    tmp_path: Path, simulated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PACKAGES", ("json", "not_there_at_all"))
    assert main(["gpu", "--results", str(tmp_path), "--only=build"]) == 0
    assert ": not_there_at_all; parts that need them fail" in capsys.readouterr().err


def test_tests_are_collected_where_the_mark_is_alone() -> None:
    """Other files may import what a machine with a GPU lacks."""
    files = files_of_tests()
    assert {"tests/kernels/harness/test_checks.py", "tests/train/model/test_host_waits.py"} <= set(files)
    assert "tests/train/model/test_parity.py" not in files


def test_parts_run_on_a_cpu_and_no_table_of_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones, with small sizes, each in its process."""
    monkeypatch.setenv("ZSLURM_KERNEL_TABLES", str(tmp_path / "tables"))
    asked = ["gpu", "--device", "cpu", "--results", str(tmp_path), "--only", "muon_step", "--only", "products"]
    assert main(asked) == 0
    assert not (tmp_path / "tables").exists()
    (file,) = tmp_path.glob("*.json")
    parts = json.loads(file.read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"done"}
    part = parts["muon_step"]
    assert [row["peer"] for row in part["rows"]] == ["torch.optim.Muon", "batched"]
    assert all(row["ratio"] == row["peer_s"] / row["seconds"] > 0 for row in part["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--results", str(tmp_path)]) == command.NO_GPU
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("no GPU: torch finds none on this machine")
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--only", "muons"]) == 2
    assert "no part called muons; there are: build, check, " in capsys.readouterr().err
    for minutes in ("0", "-1", "nan", "many"):
        with pytest.raises(SystemExit, match="2"):
            main(["gpu", "--minutes", minutes])


def test_the_parts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PARTS)


def test_the_share_of_a_rank_is_that_of_the_recipe() -> None:
    assert sum(count for count, _, _ in shares(64)) > 10
    assert all(min(rows, columns) >= 16 for _, rows, columns in shares(64))


def test_a_report_of_tests_is_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad">'
        '<failure message="1 != 2"/></testcase>'
        '<testcase classname="a" name="left"><skipped message="no"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert list(rows_of_report(report)) == [
        {"test": "a::bad", "status": "failed", "message": "1 != 2"},
        {"test": "a::left", "status": "skipped", "message": "no"},
        {"passed": 1, "failed": 1, "skipped": 1},
    ]


def test_every_test_that_needs_a_gpu_has_the_mark() -> None:
    """So `make gpu` runs it."""
    condition = "skipif(not torch.cuda." + "is_available()"
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            beside = lines[max(0, number - 2) : number + 3]
            marked = any("pytest.mark.gpu" in each for each in beside)
            assert condition not in line or marked, f"{file}:{number + 1} has no mark"
