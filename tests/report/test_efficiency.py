"""What a job used of what it asked for, and the advice that follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import TimedStory, failed_once, step_row, submitted_at_zero
from zslurm.job.rank import own_usage
from zslurm.report.efficiency import Efficiency, efficiency
from zslurm.report.run_facts import read_runs
from zslurm.report.timeline import timeline
from zslurm.run.metrics.columns import read_metrics
from zslurm.slurm.accounting import StepUsage
from zslurm.train.jsonl import JsonLinesWriter

GIB = 1 << 30


def measured(story: TimedStory, **slurm: Any) -> Efficiency:
    """The efficiency of a run that asked Slurm for this."""
    config = json.loads(story.run.config.read_text())
    config["slurm"] |= slurm
    story.run.config.write_text(json.dumps(config))
    return read_runs([story.run])[0].efficiency


def ended_ranks(story: TimedStory, *, cpu_s: float, max_rss: int, attempt: int = 1, node: str = "node0") -> None:
    """Both ranks of an attempt left their records: each ran for 100 s."""
    usage = {"cpu_s": cpu_s, "wall_s": 100.0, "max_rss_bytes": max_rss, "cores": 16}
    for rank in range(2):
        record = {"rank": rank, "node": node, "exit_code": 0, "usage": usage}
        story.run.attempt(attempt).rank_end(rank).write_text(json.dumps(record))


def share(found: Efficiency, resource: str) -> float | None:
    return next(use.share for use in found.uses if use.resource == resource)


def test_cores_that_were_idle_are_advised_against(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    ended_ranks(story, cpu_s=200, max_rss=GIB, attempt=2)
    found = measured(story, cpus_per_task=8)
    assert share(found, "CPU cores") == pytest.approx(0.25)
    assert any("slurm.cpus_per_task: 3" in text for text in found.advice)
    found = measured(story, cpus_per_task=2)
    assert share(found, "CPU cores") == pytest.approx(1.0)
    assert any("more of them" in text for text in found.advice)
    assert not any("cpus_per_task" in text for text in measured(story, cpus_per_task=3).advice)


def test_cores_that_nobody_asked_for_are_those_of_the_machine(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    ended_ranks(story, cpu_s=400, max_rss=GIB)
    found = measured(story)
    assert share(found, "CPU cores") == pytest.approx(0.5), "16 cores for two ranks, 8 busy"
    assert not any("cpus_per_task" in text for text in found.advice)


@pytest.mark.parametrize(
    ("mem", "expected", "advice"),
    [("100G", 0.08, "`slurm.mem: 11G` would have been enough"), ("8500M", 0.964, "ask for more"), ("0", None, "")],
)
def test_memory_of_the_fullest_node_is_compared_with_what_was_asked(
    tmp_path: Path, mem: str, expected: float | None, advice: str
) -> None:
    story = failed_once(tmp_path / "run")
    ended_ranks(story, cpu_s=200, max_rss=4 * GIB)
    found = measured(story, mem=mem)
    assert share(found, "memory") == (None if expected is None else pytest.approx(expected, abs=1e-3))
    assert not advice or any(advice in text for text in found.advice)


def test_without_records_of_ranks_rank_0_is_known_from_its_metrics(tmp_path: Path) -> None:
    found = measured(failed_once(tmp_path / "run"), mem="100G")
    (memory,) = [use for use in found.uses if use.resource == "memory"]
    assert (memory.used, memory.share) == ("500 MiB at most, by rank 0", None)
    assert not any(use.resource == "CPU cores" for use in found.uses)


def test_a_damaged_record_of_a_rank_is_passed_over(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    ended_ranks(story, cpu_s=200, max_rss=GIB)
    story.run.attempt(1).rank_end(0).write_text("{")
    story.run.attempt(1).rank_end(1).write_text(json.dumps({"usage": {"cpu_s": "much", "wall_s": None}}))
    assert not any(use.resource == "CPU cores" for use in measured(story).uses)


def test_a_time_limit_that_is_far_too_long_costs_time_in_the_queue(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    found = measured(story, time="1:00:00")
    assert share(found, "time") == pytest.approx(435 / 3600)
    assert any("`slurm.time: 0:10:00` would have been enough" in text for text in found.advice)
    assert not any("slurm.time" in text for text in measured(story, time="0:10:00").advice)
    assert not any(use.resource == "time" for use in measured(story, time="UNLIMITED").uses)


def test_steps_that_were_lost_lead_to_young_s_interval(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    story.at(30).steps(range(1, 1001))
    story.at(190).saved(80)
    story.at(2030).event("attempt_ended", attempt=1, outcome="failed", exit_code=1, cause=None)
    story.at(2031).event("decision", attempt=1, action="restart", mode="act", committed_step=80, nodes=["node0"])
    story.at(2032).started(2)
    story.at(2040).steps(range(81, 161), attempt=2)
    story.at(2200).event("attempt_ended", attempt=2, outcome="completed", exit_code=0, cause=None)
    story.at(2200).event("run_ended", outcome="completed", exit_code=0, cause=None)
    # One failure in 2,200 s, 0.01 s for a save, 2 s for a step: sqrt(2 * 0.01 * 2200) / 2 = 3.3 steps.
    assert any("save about every 3 steps " in text for text in measured(story).advice)


def test_a_short_run_gets_no_advice_on_how_often_to_save(tmp_path: Path) -> None:
    assert not any("were lost with a fault" in text for text in measured(failed_once(tmp_path / "run")).advice)


def test_gpu_memory_waiting_for_data_and_stalls_are_noted(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    with JsonLinesWriter(story.run.metrics) as lines:
        for step in range(1, 50):
            row = step_row(step, 1, story.clock + 2 * step)
            row["time_split_s"] |= {"data": 0.4, "checkpoint": 0.2, "forward": 0.1}
            row |= {"memory_reserved_bytes": 20 * GIB, "memory_total_bytes": 80 * GIB}
            lines.append(row)
    found = measured(story)
    assert share(found, "GPU memory") == pytest.approx(0.25)
    assert share(found, "GPUs") == pytest.approx(0.4)
    for advice in ("GPU memory was left", "Steps waited for data in 20%", "stood still for checkpoints in 10%"):
        assert any(advice in text for text in found.advice), advice


def test_a_rank_knows_what_it_used() -> None:
    before = own_usage()
    total = sum(number * number for number in range(300_000))
    after = own_usage()
    assert total > 0
    assert after["cpu_s"] > before["cpu_s"]
    assert after["wall_s"] >= before["wall_s"] > 0
    assert after["max_rss_bytes"] > 10 << 20
    assert after["cores"] >= 1


def _step(name: str, **figures: float) -> StepUsage:
    given = {"elapsed_s": 100, "cpu_s": 200, "max_rss": GIB, "tasks": 4, "cores": 16, "nodes": 2, "energy_j": 0}
    return StepUsage("7", name, "0" if name.startswith("attempt") else "", **(given | figures))  # type: ignore[arg-type]


def _accounted(story: TimedStory, *steps: StepUsage) -> Efficiency:
    config = json.loads(story.run.config.read_text())
    config["slurm"] |= {"cpus_per_task": 4, "mem": "8G"}
    metrics = read_metrics(story.run.path)
    return efficiency(story.run, config, metrics, timeline([], metrics), [], steps)


def test_accounting_answers_where_all_ranks_were_killed(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    steps = (_step("first", energy_j=7.2e6), _step("attempt-1"), _step("attempt-2", elapsed_s=1, cpu_s=1))
    found = _accounted(story, *steps, _step("agents", elapsed_s=200))
    assert share(found, "CPU cores") == pytest.approx(2 / 16), "of the longest attempt"
    assert share(found, "memory") == pytest.approx(2 / 8), "two ranks a node"
    (energy,) = [use for use in found.uses if use.resource == "energy"]
    assert energy.used == "2 kWh (Slurm's accounting)"


def test_what_ranks_recorded_wins_over_accounting(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    ended_ranks(story, cpu_s=400, max_rss=GIB)
    found = _accounted(story, _step("attempt-1"))
    assert share(found, "CPU cores") == pytest.approx(8 / 8)
    assert not any("accounting" in use.used for use in found.uses)
