"""`zslurm plan run`: what a run will cost with faults, from its run file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.cli.test_help import modules_of
from tests.cli.test_output import json_of
from zslurm.core.errors import Exit
from zslurm.plan.simulate import PARTS

LONG = {"tokens": 12 * 10**6, "context": 16, "global_batch": 6, "micro_batch": 2, "lr": 1e-3}
FEW = ("--runs", "4")


def test_it_advises_an_interval_and_spares(shell: Shell) -> None:
    shell.write_run(phases=[LONG], slurm={"nodes": 16}, checkpoint={"every_steps": 5000})
    arguments = (
        "--node-mtbf",
        "200",
        "--step-time",
        "2",
        "--stall",
        "5",
        "--restart",
        "300",
        "--queue-wait",
        "9000",
        *FEW,
    )
    found = json_of(shell.zslurm("plan", "run", "run.yaml", *arguments, "--price", "2", "--json"))
    (plan,) = found["plans"]
    run, advised = plan["run"], plan["advised"]
    assert plan["hours_between_faults"] == pytest.approx(200 / 16)
    assert run["every_steps"] == 5000 and run["spares"] == 0
    assert advised["every_steps"] < 1000 and advised["spares"] > 0
    assert advised["goodput"]["mean"] > run["goodput"]["mean"]
    assert sum(run["parts"].values()) == pytest.approx(1)
    assert set(run["parts"]) == set(PARTS)
    assert run["cost"] == pytest.approx(2 * run["gpu_hours"])
    assert plan["inputs"]["restart_s"] == {"value": 300, "from": "option"}
    assert plan["inputs"]["wait_s"] == {"value": 9000, "from": "option"}
    assert plan["inputs"]["write_s"]["from"] == "assumed"
    assert run["goodput"]["low"] <= run["goodput"]["mean"] <= run["goodput"]["high"]


def test_goodput_at_the_other_published_rates_is_shown(shell: Shell) -> None:
    shell.write_run(phases=[LONG], slurm={"nodes": 64})
    arguments = ("plan", "run", "run.yaml", "--step-time", "2", "--failures", "llama3", *FEW)
    (plan,) = shell.zslurm.ok(*arguments, "--json").json["plans"]
    others = plan["goodput_at_other_rates"]
    assert list(others) == ["meta-research", "databricks"]
    assert others["meta-research"] < plan["advised"]["goodput"]["mean"] < others["databricks"]
    shown = shell.zslurm.ok(*arguments).stderr
    assert f"as advised, goodput {100 * others['meta-research']:.1f} % at meta-research" in shown
    (without,) = shell.zslurm.ok(*arguments, "--failures", "none", "--json").json["plans"]
    assert without["goodput_at_other_rates"] == {}


def test_ways_to_replace_a_lost_node_are_compared(shell: Shell) -> None:
    (shell.directory / "run.yaml").write_text(
        "extends: zaya1-8b\nrun: {name: big}\ndata: {path: tokens.h5}\nslurm: {nodes: 64}\n"
        "cluster: {name: mi300x-pollara}\nphases: [{tokens: 9e12, context: 4096, global_batch: 4096, "
        "micro_batch: 1, lr: 1e-3}]\n"
    )
    arguments = ("plan", "run", "run.yaml", "--node-mtbf", "3000", *FEW)
    memory = ("--set", "aegis.recovery=memory")
    (plan,) = shell.zslurm.ok(*arguments, *memory, "--json").json["plans"]
    with_spare, *ways = plan["heals"]
    assert with_spare["heal"] == "requeue" and with_spare["spares"] == max(1, plan["advised"]["spares"])
    assert [(row["heal"], row["spares"]) for row in ways] == [("helper", 0), ("shrink", 0), ("requeue", 0)]
    goodput = {row["heal"]: row["goodput"]["mean"] for row in ways}
    assert goodput["helper"] > goodput["requeue"]
    assert with_spare["of_held_nodes"] < with_spare["goodput"]["mean"]
    done = shell.zslurm.ok(*arguments, *memory)
    assert "note: aegis.heal helper with slurm.spares 0 is better than what is advised" in done.stderr
    (restarts,) = shell.zslurm.ok(*arguments, "--set", "aegis.recovery=restart", "--json").json["plans"]
    assert restarts["heals"] == []


def test_the_same_seed_gives_the_same_plan_and_another_one_another(shell: Shell) -> None:
    shell.write_run(phases=[LONG])
    arguments = ("--step-time", "9", "--node-mtbf", "50", "--json", "--start", "2026-12-01", *FEW)
    first, again, other = (
        shell.zslurm("plan", "run", "run.yaml", *arguments, "--seed", seed) for seed in ("1", "1", "2")
    )
    assert first.stdout == again.stdout != other.stdout


def test_tables_have_a_row_for_each_number_of_nodes_and_its_advice(shell: Shell) -> None:
    shell.write_run(phases=[LONG])
    times = ("--step-time", "4", "--step-time", "2.5")
    done = shell.zslurm.ok("plan", "run", "run.yaml", "--nodes", "1", "--nodes", "2", *times, *FEW)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [
        "nodes", "1", "1 advised", "2", "2 advised",
    ]  # fmt: skip
    assert "419 interruptions in 54 days on 16,384 H100" in done.stderr


def test_measured_times_come_from_a_run(shell: Shell) -> None:
    run = shell.directory / "runs" / "before"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    rows, now = [], 1000.0
    for attempt, steps in ((1, range(1, 31)), (2, range(21, 41))):
        for step in steps:
            now += 2.5 if step == 10 else 2.0
            split = {"checkpoint": 0.5 if step == 10 else 0.0}
            rows.append({"kind": "step", "attempt": attempt, "step": step, "step_time_s": 2 + split["checkpoint"],
                         "time_split_s": split, "time": now})  # fmt: skip
            if step == 10:
                rows.append({"kind": "checkpoint", "attempt": 1, "state": "COMMITTED", "stall_s": 0.5,
                             "seconds": 12.0, "step": 10, "time": now})  # fmt: skip
        now += 40.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"event": "attempt_started", "attempt": number, "job_id": "7", "time": 1.0} for number in (1, 2)]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    shell.write_run(phases=[LONG])
    found = json_of(shell.zslurm("plan", "run", "run.yaml", "--measured", run, *FEW, "--json"))
    inputs = found["plans"][0]["inputs"]
    expected = {"step_s": 2.0, "stall_s": 0.5, "write_s": 12.0, "restart_s": 40.0, "detect_s": 0.0}
    assert {name: inputs[name]["value"] for name in expected} == pytest.approx(expected)
    assert all(inputs[name]["from"] == "measured" for name in expected)


def test_the_plot_is_a_file_and_without_matplotlib_a_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.write_run(phases=[LONG])
    arguments = ("plan", "run", "run.yaml", "--step-time", "9", *FEW, "--plot")
    shell.zslurm.ok(*arguments, "plan.svg")
    drawn = (shell.directory / "plan.svg").read_text()
    assert "goodput, %" in drawn and "419 interruptions" in drawn
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = shell.zslurm.ok(*arguments, "other.png")
    assert "other.png is not drawn: matplotlib is not installed; pip install 'zslurm-train[plots]'" in done.stderr
    assert done.stdout.startswith("nodes\t")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--failures", "mars"), "--failures mars: there are llama3,"),
        (("--nodes", "2", "--nodes", "3", "--step-time", "1"), "--step-time: give one for each --nodes: 2, not 1"),
        (("--cluster-nodes", "1", "--nodes", "2", "--step-time", "1"), "--cluster-nodes 1: the run needs 2"),
        (("--step-time", "1", "--plot", "plan.txt"), "must end in .png, .svg or .pdf"),
        ((), "on CPUs no time of a step can be expected: give --step-time or --measured"),
        (("--step-time=1", "--set", "slurm.time=00:06:00", "--restart=90"), "slurm.time: a job trains for 1m 00s"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line(shell: Shell, arguments: tuple[str, ...], line: str) -> None:
    shell.write_run(phases=[LONG])
    code, message = shell.fails("plan", "run", "run.yaml", *FEW, *arguments)
    assert code == Exit.USAGE
    assert line in message


def test_a_run_of_ours_at_flagship_size_needs_neither_torch_nor_numbers(shell: Shell, tmp_path: Path) -> None:
    """zaya1-8b on 2,048 nodes of MI300X: the time of a step is expected, faults come every three hours."""
    (shell.directory / "run.yaml").write_text(
        "extends: zaya1-8b\nrun: {name: big}\ndata: {path: tokens.h5}\nslurm: {nodes: 2048, spares: 8}\n"
        "aegis: {recovery: memory}\ncluster: {name: mi300x-pollara}\n"
        "phases: [{tokens: 9e12, context: 4096, global_batch: 16384, micro_batch: 1, lr: 1e-3}]\n"
    )
    done = shell.zslurm.ok("plan", "run", "run.yaml", *FEW, "--json")
    (plan,) = done.json["plans"]
    assert plan["hours_between_faults"] == pytest.approx(54 * 24 / 419)
    assert plan["inputs"]["step_s"]["from"] == "as `zslurm plan size` expects it, with assumed rates"
    assert plan["run"]["actions"]["memory"] > 0
    assert "torch" not in modules_of("plan", "run", "run.yaml", *FEW, cwd=shell.directory)
