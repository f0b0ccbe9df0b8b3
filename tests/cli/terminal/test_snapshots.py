"""Every table at 80, 100 and 160 columns, as files that a person can read; and on poorer terminals."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_tools.saves import MUON, TENSORS, save
from tests.cli.terminal.pictures import Terminal, compare
from tests.fake_sysfs import mi300x_pollara
from tests.run.stories import Holder, Story
from zslurm.checkpoint_tools import Tensor
from zslurm.cli.cluster import doctor
from zslurm.cli.terminal.table import print_table
from zslurm.doctor.check import Check, failed, passed, warned
from zslurm.doctor.report import LOGIN, DoctorReport
from zslurm.run import index
from zslurm.run.index import new_entry

NOW = 1_780_003_600.0
WIDTHS = (80, 100, 160)
CAUSE = {
    "message": "RuntimeError: HIP error: an illegal memory access was encountered. HIP kernel errors might be "
    "asynchronously reported at some other API call, so the stacktrace below might be incorrect. For debugging "
    "consider passing AMD_SERIALIZE_KERNEL=3",
    "rank": 11,
    "node": "gpu-node-0017",
    "exit_code": 1,
    "step": 812,
}


@pytest.fixture
def terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Terminal]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.chdir(tmp_path)
    yield Terminal(monkeypatch, capsys)
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def four_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Four runs, one of which has failed for good in its third attempt."""
    with Holder() as holder:
        monkeypatch.setattr(time, "time", lambda: NOW)
        runs = tmp_path / "runs"
        runs.mkdir()
        stories = [
            Story(runs / "zaya1-8b-pretrain").submitted("local-101", process=holder.pid).started(),
            Story(runs / "fine-tune-math").submitted("local-102").started(),
            Story(runs / "ablation-muon-lr3").submitted("local-103").started(),
            Story(runs / "smoke").submitted("local-104").started(),
        ]
        for story in stories:
            index.record(new_entry(story.job_id, story.run, "local", "local"))
        stories[0].trained(*range(1, 31), saved=30, mfu=0.412)
        stories[1].trained(*range(1, 41), mfu=0.412).evaluated(40, 3.1).ended("completed", 0)
        fails(stories[2].trained(1, 2, 3, saved=3))
        stories[3].trained(1, 2, 3, saved=3).ended("interrupted", 75)
        yield runs


def fails(story: Story) -> None:
    """Three attempts fail with the same cause."""
    for attempt in (1, 2, 3):
        story.event("attempt_ended", attempt=attempt, outcome="failed", exit_code=1, cause=CAUSE)
        if attempt < 3:
            story.event("decision", attempt=attempt, action="restart", mode="act", reason="a rank has failed")
            story.started(attempt + 1)
    root = {"kind": "user_exception", "node": CAUSE["node"], "rank": 11, "line": CAUSE["message"]}
    why = "the same error three times without progress"
    story.event("decision", attempt=3, action="stop", mode="act", reason=why, root=root)
    story.event("run_ended", outcome="failed", exit_code=93, cause=CAUSE)


def within(text: str, width: int) -> str:
    """The text, whose lines are no longer than the terminal is wide."""
    assert max(map(len, text.splitlines())) <= width
    return text


def without_directory(text: str) -> str:
    return re.sub(r"(?m)^  directory\s+\S+$", "  directory   /runs/ablation-muon-lr3", text)


@pytest.mark.parametrize("width", WIDTHS)
def test_runs(terminal: Terminal, four_runs: Path, width: int) -> None:
    compare(f"status.{width}", within(terminal.show("status", width=width), width))
    one = without_directory(terminal.show("status", "ablation-muon-lr3", width=width))
    compare(f"status-of-a-run.{width}", within(one, width))
    compare(f"events.{width}", within(terminal.show("logs", "--events", "ablation-muon-lr3", width=width), width))
    replayed = terminal.show("dev", "replay", "ablation-muon-lr3", width=width)
    compare(f"replay.{width}", within(replayed, width))


def test_four_runs_of_which_one_failed_take_at_most_twelve_lines_and_the_cause_one(
    terminal: Terminal, four_runs: Path
) -> None:
    lines = terminal.show("status", width=80).splitlines()
    assert len(lines) <= 12
    (at,) = (number for number, line in enumerate(lines) if "RuntimeError" in line)
    assert lines[at - 1].startswith("ablation-muon-lr3  failed")


def test_of_one_run_the_whole_cause_is_there_once(terminal: Terminal, four_runs: Path) -> None:
    shown = terminal.show("status", "ablation-muon-lr3", width=80)
    assert " ".join(shown.split()).count(" ".join(str(CAUSE["message"]).split())) == 1
    assert shown.count("RuntimeError") == 1


def test_a_terminal_of_forty_columns(terminal: Terminal, four_runs: Path) -> None:
    compare("status.40", within(terminal.show("status", width=40), 40))
    for command in (("logs", "--events", "ablation-muon-lr3"), ("config", "recipes"), ("cluster", "ls")):
        within(terminal.show(*command, width=40), 40)


def test_colours_are_those_of_states_and_none_where_none_are_wanted(
    terminal: Terminal, four_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = terminal.show("status", width=80, colour=True)
    for state, code in {"failed": "1;31", "running": "32", "completed": "32", "interrupted": "33"}.items():
        assert re.search(rf"\x1b\[{code}m{state} *\x1b\[0m", shown), state
    assert "\x1b[31m    rank 11" in shown or "\x1b[31mrank 11" in shown
    plain = terminal.show("status", width=80)
    assert "\x1b" not in plain, "TERM=dumb"
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[([\d]+;)?3\d", terminal.show("status", width=80, colour=True)), (
        "bold is no colour"
    )


def test_without_unicode(four_runs: Path, monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    terminal.show("status", width=60)
    output.flush()
    compare("status-without-unicode.60", output.buffer.getvalue().decode("ascii"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_there_is(terminal: Terminal, width: int) -> None:
    for words in (("config", "recipes"), ("cluster", "ls"), ("config", "template", "ls"), ("doctor", "--list")):
        text = terminal.show(*words, width=width)
        if words[1] == "template":
            text = re.sub(r"\S*/(sbatch_templates)", r"/\1", text)
            assert max(map(len, text.splitlines())) <= width
        compare(f"{'-'.join(words).replace('---', '-').replace('config-template', 'template')}.{width}", text)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_checkpoint(terminal: Terminal, tmp_path: Path, width: int) -> None:
    path = save(tmp_path, 400, (*TENSORS, Tensor("layers.79.mlp.experts.63.down_proj.weight", (3, 2), MUON)), 4)
    compare(f"checkpoint-show.{width}", within(terminal.show("checkpoint", "show", path, width=width), width))


@pytest.mark.parametrize("width", WIDTHS)
def test_rails(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("ZSLURM_SYSROOT", str(tmp_path / "%n"))
    monkeypatch.setenv("SLURMD_NODENAME", "node0")
    mi300x_pollara(tmp_path / "node0", down={3})
    shown = terminal.show("cluster", "rails", "--here", "--cluster", "mi300x-pollara", width=width)
    compare(f"rails.{width}", within(shown, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    def check(name: str) -> Check:
        return Check(name, "gpu", "", "node", lambda sources: None)

    report = DoctorReport("mi", [check("gpu-ecc"), check("disk"), check("clock")], asked=("node0", "node1"))
    bad = "GPU 2: 1 uncorrectable error since the driver was loaded; the GPU's memory pages were retired at 04:12"
    nodes = [f"gpu-rack{rack}-n{node:02d}" for rack in range(4) for node in range(0, 32, 3)]
    report.add("gpu-ecc", {**dict.fromkeys(nodes, passed("no error")), "node1": failed(bad, "exclude it")})
    report.add("disk", {LOGIN: passed("70 GiB free"), "node1": warned("1 GiB free", "clean")})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    print_table(doctor.COLUMNS, doctor.table(report))
    compare(f"doctor.{width}", within(capsys.readouterr().out, width))


def test_what_does_not_fit_is_continued_below_with_the_first_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "dumb")
    cells: dict[str, Any] = {f"column{number}": f"value{number}" for number in range(5)}
    print_table(["name", *cells], [["a", *cells.values()]])
    assert capsys.readouterr().out.splitlines() == [
        "name  column0  column1",
        "a     value0   value1",
        "name  column2  column3",
        "a     value2   value3",
        "name  column4",
        "a     value4",
    ]
