"""The pictures of `zslurm watch`: one run, many runs, poor metrics, small terminals, keys."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal.pictures import compare
from tests.run.stories import Holder, Story
from zslurm.cli.run.dashboard import RunPicture, bar, draw_run, draw_runs, heat_map, sparkline
from zslurm.cli.run.watch import _View as View
from zslurm.cli.terminal.screen import Line
from zslurm.run.metrics.rank_times import RankTimes, read_rank_times, write_rank_times
from zslurm.run.state.run_state import look, look_all

NODES = tuple(f"gpu-n{node:02d}" for node in range(12) for _ in range(8))


def plain(lines: Sequence[Line]) -> str:
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def seconds_of(rank: int) -> float:
    """Rank 77 is slow, and all of node 3 a little."""
    return 0.2 * (1.5 if rank == 77 else 1.1 if rank // 8 == 3 else 1.0)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(time, "time", lambda: 1_780_000_100.0)
    time.tzset()
    with Holder() as holder:
        story = Story(tmp_path / "zaya1-8b").submitted("local-101", process=holder.pid).started()
        with story.run.metrics.open("w") as file:
            for step in range(1, 31):
                row = {"kind": "step", "attempt": 1, "step": step, "loss": 4 * 0.98**step, "lr": 3e-4 * step / 30}
                row |= {"grad_norm": 1 + math.sin(step) / 4, "tokens_per_s": 1.2e6 + 1e4 * (step % 5)}
                file.write(json.dumps(row | {"step_time_s": 2.0, "mfu": 0.412}) + "\n")
        times = RankTimes(1_780_000_090.0, NODES, tuple(map(seconds_of, range(96))))
        write_rank_times(story.run.attempt(1), times)
        story.logged(0, "".join(f"step {step} loss 3.5\n" for step in range(9)))
        yield story
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 20)])
def test_a_run_fits_the_screen(running: Story, width: int, height: int) -> None:
    lines = draw_run(RunPicture.read(look(running.run)), width, height, keys="q quit   e events   l log")
    text = plain(lines)
    assert len(lines) <= height
    assert max(map(len, text.splitlines())) <= width
    compare(f"watch-run.{width}x{height}", text)


def test_the_log_takes_the_place_of_the_events(running: Story) -> None:
    text = plain(draw_run(RunPicture.read(look(running.run)), 80, 24, panel="log"))
    assert "step 8 loss 3.5" in text
    assert "attempt 1 started" not in text


def test_a_low_terminal_has_no_heat_map_and_keeps_its_keys(running: Story) -> None:
    lines = draw_run(RunPicture.read(look(running.run)), 80, 8, keys="q quit")
    assert len(lines) <= 8
    assert plain(lines).splitlines()[-1] == "q quit"
    assert "rail" not in plain(lines)


def test_many_runs_fit_the_screen_around_the_chosen_one(tmp_path: Path) -> None:
    states = look_all([Story(tmp_path / f"run-{index:02d}").submitted().started().run for index in range(40)])
    for chosen in (0, 20, 39):
        lines = draw_runs(states, 80, 24, interval_s=5, chosen=chosen, keys="q quit")
        assert len(lines) <= 24
        text = plain(lines)
        assert f"run-{chosen:02d} " in text
        assert "more runs" in text


def test_a_run_without_metrics_and_one_whose_lines_are_damaged(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started()
    assert "no steps yet" in plain(draw_run(RunPicture.read(look(story.run)), 80, 24))
    good = {"kind": "step", "attempt": 1, "step": 1, "loss": 3.5, "step_time_s": 1.0}
    odd = {**good, "step": 2, "loss": None, "lr": "x", "grad_norm": float("nan")}
    story.run.metrics.write_text(f'{json.dumps(good)}\n{{"kind":"st\n\x00\x00\n{json.dumps(odd)}\n[1]\n')
    text = plain(draw_run(RunPicture.read(look(story.run)), 80, 24))
    assert "3.5000" in text
    assert "nan" not in text
    story.run.attempt(1).rank_times.write_text('{"time": 1, "nodes": ["a"], "seconds": ["x"]}')
    assert read_rank_times(story.run.attempt(1)) is None


def test_of_steps_that_were_repeated_the_last_attempts_are_drawn(tmp_path: Path) -> None:
    story = (
        Story(tmp_path / "tiny").submitted().started().trained(*range(1, 11)).started(2).trained(4, 5, attempt=2)
    )
    steps = RunPicture.read(look(story.run)).steps
    assert [(row["step"], row["attempt"]) for row in steps] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_keys_choose_a_run_open_it_and_go_back(tmp_path: Path) -> None:
    view = View(5.0, None)
    view.states = look_all([Story(tmp_path / name).submitted().run for name in ("a", "b", "c")])
    for key in ("down", "down", "down", "up"):
        view.handle(key)
    assert view.chosen == 1
    assert view.handle("open")
    assert view.picture is not None
    assert view.picture.state.run.name == "b"
    assert view.handle("l")
    assert view.panel == "log"
    assert view.handle("back")
    assert view.open_run is None
    assert not view.handle("x")


def test_a_bar_and_a_sparkline() -> None:
    assert plain([bar(0.5, 10)]) == "█████░░░░░\n"
    assert plain([bar(7.0, 4)]) == "████\n"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█", "means of what shares a place"
    assert sparkline([2.0, 2.0], 9) == "▅▅"
    assert sparkline([math.nan, math.inf], 9) == ""


def test_a_heat_map_shows_the_slowest_of_what_shares_a_cell() -> None:
    assert plain(heat_map([[1.0, 1.1, 1.2, 2.0]], 4)) == "░▒▓█\n"
    assert plain(heat_map([[1.0, 1.1, 1.2, 2.0], [None, None, 1.0, 1.0]], 2)) == "▒█\n ░\n"


def test_ranks_by_rail_and_node() -> None:
    times = RankTimes(0.0, ("a", "a", "b", "b"), (1.0, 1.0, 3.0, None))
    assert times.by_rail() == [[1.0, 3.0], [1.0, None]]
    assert (times.slowest, times.median) == (2, 1.0)
    assert RankTimes(0.0, ("a",), (None,)).by_rail() == [[None]]
