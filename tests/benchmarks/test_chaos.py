"""The benchmark of training stacks under faults: plans, trials with processes instead of jobs, scores, page."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import trial as trials
from benchmarks.chaos.__main__ import main
from benchmarks.chaos.contenders import CONTENDERS, PROGRAMS, Contender, Start
from benchmarks.chaos.plans import FAULTS, SITE, Plan, PlannedFault, drawn, named, pairs
from benchmarks.chaos.report import BadTable, page, read
from benchmarks.chaos.score import score, summary
from benchmarks.chaos.site import BadSite, Site
from benchmarks.chaos.table import measure
from benchmarks.chaos.trial import Trial, play

_PROGRAM = f"""\
import sys
from pathlib import Path
sys.path.insert(0, {str(PROGRAMS)!r})
from injector import Injector
saved = Path(sys.argv[1])
injector = Injector(1)
for step in range(int(saved.read_text()) + 1 if saved.exists() else 1, 9):
    if step % 3 == 0:
        injector.before_save(step)
        saved.write_text(str(step))
    injector.after_step(step, 1.0 / step)
"""
_ALWAYS = "until {program}; do :; done"


class Processes(Site):
    """A site that starts processes instead of jobs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, start: Start, shell: str) -> None:
        program = start.directory / "program.py"
        program.write_text(_PROGRAM)
        line = shell.format(program=f"{sys.executable} {program} {start.directory}/saved")
        variables = {"CHAOS_DIR": str(start.directory), "SLURMD_NODENAME": "n1"}
        self.started.append(
            subprocess.Popen(["setsid", "bash", "-c", line], env=variables, stderr=subprocess.DEVNULL)
        )

    def jobs(self) -> dict[str, str]:
        return {str(each.pid): "RUNNING" for each in self.started if each.poll() is None}

    def clear(self, deadline_s: float = 120.0) -> None:
        for each in self.started:
            subprocess.run(["pkill", "--signal", "KILL", "--session", str(each.pid)], check=False)
            each.wait()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.setattr(trials, "_USER_S", 0.0)
    monkeypatch.setattr(trials, "_QUEUE_EVERY_S", 0.1)
    monkeypatch.setattr(trials, "_EVERY_S", 0.05)
    cluster = Processes(tmp_path / "site")
    yield cluster
    cluster.clear()


def contender(site: Processes, shell: str = "{program}") -> Contender:
    return Contender("processes", "here", lambda start: site.start(start, shell), needs="json", nodes=1)


def plan_of(fault: str, again: bool = False) -> Plan:
    return Plan(fault, (PlannedFault(fault, 5, again=again),), steps=8, pace_s=0.01, completes=not again)


def test_a_program_without_faults_survives(site: Processes) -> None:
    figures = score(play(site, contender(site), Plan("none", (), steps=8, pace_s=0.01), site.directory / "1", 1))
    assert (figures["outcome"], figures["kept_steps"], figures["steps_lost"]) == ("survived", 8, 0)
    assert (figures["user_actions"], figures["starts"], figures["nodes_idle"]) == (0, 1, 0)


@pytest.mark.parametrize("fault", ["process_killed", "full_disk"])
def test_a_job_that_ended_too_early_is_submitted_again(site: Processes, fault: str) -> None:
    figures = score(play(site, contender(site), plan_of(fault), site.directory / "1", 1))
    assert (figures["outcome"], figures["user_actions"], figures["starts"]) == ("survived with help", 1, 2)
    assert (figures["kept_steps"], figures["steps_lost"]) == (8, 2)


def test_a_contender_that_starts_its_program_again_survives(site: Processes) -> None:
    figures = score(play(site, contender(site, _ALWAYS), plan_of("process_killed"), site.directory / "1", 1))
    assert (figures["outcome"], figures["user_actions"], figures["steps_lost"]) == ("survived", 0, 2)
    assert figures["first_new_step_s"] > 0 and figures["all_ranks_s"] == figures["first_new_step_s"]


def test_a_contender_that_hangs_is_ended(site: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "HANG_LIMIT_S", 2.0)
    figures = score(play(site, contender(site), plan_of("hang"), site.directory / "1", 1))
    assert (figures["outcome"], figures["kept_steps"], figures.get("first_new_step_s")) == ("hangs", 5, None)


@pytest.mark.parametrize(("shell", "outcome"), [("{program}", "stopped"), (_ALWAYS, "restarts for ever")])
def test_a_bug_of_the_program_is_to_stop_the_run(
    site: Processes, shell: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "LIMIT_S", 2.0)
    figures = score(play(site, contender(site, shell), plan_of("user_bug", again=True), site.directory / "1", 1))
    assert (figures["outcome"], figures["user_actions"]) == (outcome, 0)


def test_a_program_runs_until_its_time_limit_is_reached() -> None:
    """It is reached once: half of the program and a new start fit into it, the whole program does not."""
    plan = named("time_limit")
    program_s, limit_s = plan.steps * plan.pace_s, 60 * plan.minutes
    assert limit_s + 25 < program_s < 2 * (limit_s - 30)
    rows = [
        {"moment": "step", "rank": 0, "step": step, "time": 100.0 + step, "pid": 1, "loss": 1.0} for step in (1, 9)
    ]
    rows += [{"moment": "start", "rank": 0, "time": 200.0, "node": "n0"}]
    rows += [{"moment": "step", "rank": 0, "step": 10, "time": 205.0, "pid": 2, "loss": 1.0}]
    trial = Trial(CONTENDERS[0], plan, rows, [{"fault": "time_limit", "node": "n0", "time": 101.5}], over=True)
    assert score(trial)["first_new_step_s"] == 96.0


def test_what_a_program_did_not_meet_it_did_not_survive(site: Processes) -> None:
    faults = (PlannedFault("process_killed", 5, rank=7), PlannedFault("node_killed", 50))
    figures = score(play(site, contender(site), Plan("p", faults, steps=8, pace_s=0.01), site.directory / "1", 1))
    assert (figures["outcome"], set(figures["not_injected"])) == ("not tried", {"process_killed", "node_killed"})


def test_a_program_that_trains_on_nan_did_not_survive() -> None:
    trial = _trial(("step", 1.0, 0, 1, 1), ("done", 2.0, 0, 1, 1), over=True)
    trial.rows[0]["loss"] = math.nan
    assert score(trial)["outcome"] == "not a number"


def test_a_stopped_benchmark_has_the_trials_so_far_and_leaves_no_job(
    site: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Site, trial: Trial, __: float | None) -> None:
        if trial.plan.name == "hang":
            raise KeyboardInterrupt

    monkeypatch.setattr(trials, "_left_since", interrupted)
    plans = [Plan("none", (), steps=8, pace_s=0.01), plan_of("hang"), plan_of("full_disk")]
    table = measure(site, [contender(site)], plans, 1, 1.0, "")
    assert [row["outcome"] for row in table["trials"]] == ["survived"]
    assert [row["why"] for row in table["not_tried"]] == ["stopped: Ctrl-C"] * 2
    assert not site.jobs()


def test_options_of_the_site_reach_every_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, calls = Site(tmp_path, sbatch=["--partition=debug", "--reservation=spring", "--no-kill"]), []

    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(" ".join(argv))
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(site, "run", run)
    for each in CONTENDERS:
        each.start(Start(site, Plan("p", ()), tmp_path, 1))
        if each.name.startswith("zslurm"):
            slurm = json.loads((tmp_path / "run.yaml").read_text())["slurm"]
            assert slurm["partition"] == "debug"
            assert slurm["flags"] == {"reservation": "spring", "no-kill": True}
        else:
            assert "debug" in calls[-1] and "spring" in calls[-1] and "no-kill" in calls[-1]


def test_only_jobs_of_trials_are_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "1 RUNNING chaos\n2 RUNNING chaos-trial-261129-0001\n3 RUNNING chaos-monkey\n4 RUNNING my chaos\n"
    site = Site(tmp_path)
    monkeypatch.setattr(site, "run", lambda argv: subprocess.CompletedProcess(argv, 0, rows, ""))
    assert set(site.jobs()) == {"1", "2"}


def test_commands_of_the_site_keep_other_braces(tmp_path: Path) -> None:
    site = Site(tmp_path, inject={"link_down": "sh -c 'echo {node} {x} >&2; exit 3'"})
    with pytest.raises(RuntimeError, match=r"n1 \{x\}"):
        site.strike("link_down", "n1", "7")


def test_what_cannot_be_submitted_says_why(site: Processes) -> None:
    def refuse(_: Start) -> None:
        raise RuntimeError("sbatch: error: invalid account")

    refused = Contender("refused", "here", refuse)
    figures = score(play(site, refused, plan_of("hang"), site.directory / "1", 1))
    assert (figures["outcome"], figures["error"]) == ("not started", "sbatch: error: invalid account")


def test_random_plans_have_the_published_shares_and_repeat() -> None:
    assert drawn(3) == drawn(3) != drawn(4)
    faults = [fault.fault for seed in range(400) for fault in drawn(seed).faults]
    assert 0.72 < faults.count("node_killed") / len(faults) < 0.81  # 321 of 419
    assert {plan.name for plan in pairs()} <= {f"{first}+{second}" for first in FAULTS for second in FAULTS}
    assert named("random-3") == drawn(3)


def _trial(*rows: tuple[str, float, int, int, int], **fields: Any) -> Trial:
    names = ("moment", "time", "rank", "pid", "step")
    content = [dict(zip(names, row, strict=True)) | {"node": f"n{row[2]}", "loss": 1.0} for row in rows]
    return Trial(Contender("c", "s", lambda _: None), Plan("p", ()), content, began=0.0, ended=20.0, **fields)


def test_figures_of_a_trial() -> None:
    struck = [{"fault": "node_killed", "node": "n1", "time": 12.0}]
    rows = [
        *(("start", 9.0, 0, 1, 0), ("start", 9.0, 1, 2, 0)),
        *(("step", 10.0, 0, 1, 1), ("step", 10.0, 1, 2, 1), ("step", 11.0, 0, 1, 2), ("step", 11.1, 1, 2, 2)),
        *(("step", 12.2, 0, 1, 2), ("start", 15.0, 1, 3, 0)),  # the other rank reports the step of the fault
        *(("step", 16.0, 0, 1, 3), ("step", 17.0, 1, 3, 3), ("step", 17.0, 0, 1, 4), ("step", 18.0, 1, 3, 4)),
    ]
    figures = score(_trial(*rows, struck=struck, over=True, excluded={"n1", "n7"}))
    assert (figures["first_new_step_s"], figures["all_ranks_s"]) == (4.0, 5.0)
    assert (figures["steps_lost"], figures["kept_steps"], figures["ettr"]) == (1, 4, 0.5)
    assert (figures["wrong_exclusions"], figures["nodes_idle"]) == (["n7"], 0)


def test_the_best_contender_is_the_one_that_survives_most() -> None:
    rows = [
        {"contender": name, "outcome": outcome, "ettr": ettr, "steps_lost": 5, "user_actions": 0}
        | {"wrong_exclusions": [], "nodes_idle": 0}
        for name, outcome, ettr in [
            ("fast", "survived", 0.9), ("fast", "hangs", 0.5), ("sure", "survived", 0.6), ("sure", "stopped", 0.1),
        ]
    ]  # fmt: skip
    assert [(row["contender"], row["survived"], row["ettr"]) for row in summary(rows)] == [
        ("sure", 2, 0.6), ("fast", 1, 0.45),
    ]  # fmt: skip


def test_a_table_is_as_its_schema_says_and_has_a_page(site: Processes, tmp_path: Path) -> None:
    absent = Contender("absent", "nowhere", lambda _: None, needs="no_such_module")
    plans = [plan_of("process_killed"), named("link_down")]
    table = measure(site, [contender(site, _ALWAYS), absent], plans, 1, 1.0, "<one> machine")
    path = tmp_path / "chaos.json"
    path.write_text(json.dumps(table))
    assert [row["what"] for row in read(path)["not_tried"]] == ["absent", "link_down"]
    assert "No module named 'no_such_module'" in table["not_tried"][0]["why"]
    html = page(table)
    assert "&lt;one&gt; machine" in html and 'class="survived"' in html and "process killed" in html
    path.write_text(json.dumps(table | {"version": 2}))
    with pytest.raises(BadTable, match="version: 1 was expected"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "no 'directory': name a directory that all nodes share"),
        ('{"directory": "/x", "pyhton": "p"}', "unexpected keyword argument 'pyhton'"),
        (
            '{"directory": "/x", "inject": {"node": "true"}}',
            f"no fault is called node; there are {', '.join(SITE)}",
        ),
        ("{", "Expecting property name"),
        ("[]", "expected an object with `directory`"),
        ('{"directory": "/x", "sbatch": "--qos=a"}', "sbatch is not as in the README"),
        ('{"directory": "/x", "sbatch": ["-p", "a"]}', "sbatch: -p: write it as --NAME=VALUE"),
    ],
)
def test_a_bad_site_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    path.write_text(content)
    with pytest.raises(BadSite) as error:
        Site.read(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_unknown_plans_and_contenders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "s.json"), "--plan", "fire"]) == 2
    assert main(["run", str(tmp_path / "s.json"), "--contender", "k8s"]) == 2
    assert main(["page", str(tmp_path / "no.json")]) == 2
    assert main(["run", str(tmp_path / "s.json"), "--out", str(tmp_path / "no" / "table.json")]) == 2
    errors = capsys.readouterr().err
    assert "no plan is called fire" in errors and "no contender is called k8s; there are sbatch" in errors
    assert "no.json" in errors


def test_only_the_adapter_of_zslurm_knows_zslurm() -> None:
    folder = PROGRAMS.parent
    importing = [
        path.name
        for path in folder.rglob("*.py")
        if any(line.startswith(("import zslurm", "from zslurm")) for line in path.read_text().splitlines())
    ]
    assert importing == ["ddp_zslurm.py"]


def test_it_is_a_package_that_works_without_this_repository(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=PROGRAMS.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("slurm_chaos-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "slurm_chaos", "list"],
        env={"PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert set(FAULTS) < {line.split()[0] for line in shown.stdout.splitlines()}
