"""`zslurm status` of local runs in every state, from the files that such runs leave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.run.stories import STEPS, Holder, Story
from zslurm.aegis.core.policy.outcome import Cause
from zslurm.cli.run.run_rows import COLUMNS, as_json, as_row, waits_for_person
from zslurm.cli.run.status import details, details_as_json
from zslurm.core.units import show_time
from zslurm.run.state.run_state import RunState, look, look_all
from zslurm.train.jsonl import JsonLinesWriter

KILLED = Cause("Killed", rank=3, node="node1", exit_code=137)
NO_SPACE = Cause("OSError: No space left on device", rank=0, node="node0", exit_code=1, step=12)


PREEMPTED = show_time(1_800_000_000.0)


def cells(state: RunState) -> dict[str, str]:
    return dict(zip((column.title for column in COLUMNS), as_row(state), strict=True))


def lines_of(state: RunState, excluded: str | None = None) -> list[str]:
    return ["".join(text for text, _ in line) for line in details(state, excluded)]


ENDED: dict[str, tuple[Callable[[Story], Story], str, str, int | None]] = {
    "completed": (
        lambda s: s.submitted().started().trained(39, 40, saved=40).ended("completed", 0), "completed", "", 0,
    ),
    "interrupted": (
        lambda s: s.submitted().started().trained(9, saved=9).ended("interrupted", 75),
        "interrupted", "saved at step 9; submit again to continue", 75,
    ),
    "preempted for good": (
        lambda s: s.submitted().started().trained(9, saved=9).preempted("cancel").ended("interrupted", 75),
        "preempted",
        f"preempted at {PREEMPTED}: Slurm ended the job; saved at step 9; submit again to continue", 75,
    ),
    "completed in the grace time of a preemption": (
        lambda s: s.submitted().started().trained(40, saved=40).preempted("requeue").ended("completed", 0),
        "completed", "", 0,
    ),
    "cancelled in the grace time of a preemption": (
        lambda s: s.submitted().started().preempted("requeue").cancelled().ended("interrupted", 75),
        "cancelled", "", 75,
    ),
    "preempted, and then stopped for another reason": (
        lambda s: s.submitted().started().preempted("requeue").ended("interrupted", 75)
        .started(2).trained(9, attempt=2, saved=9).ended("interrupted", 75, attempt=2),
        "interrupted", "saved at step 9; submit again to continue", 75,
    ),
    "cancelled": (
        lambda s: s.submitted().started().trained(9, saved=9).cancelled().ended("interrupted", 75),
        "cancelled", "", 75,
    ),
    "cancelled before it began": (lambda s: s.submitted().cancelled(), "cancelled", "", None),
    "failed by a signal": (
        lambda s: s.submitted().started().trained(9).ended("failed", 137, KILLED),
        "failed", "rank 3 on node1: Killed", 137,
    ),
    "failed by an error": (
        lambda s: s.submitted().started().trained(12).ended("failed", 1, NO_SPACE),
        "failed", "rank 0 on node0 after step 12: OSError: No space left on device", 1,
    ),
    "failed although it was cancelled": (
        lambda s: s.submitted().started().cancelled().ended("failed", 137, KILLED),
        "failed", "rank 3 on node1: Killed", 137,
    ),
    "lost": (
        lambda s: s.submitted().started().trained(9),
        "lost", "job local-1 is gone and did not record its outcome; see `zslurm logs --supervisor`", None,
    ),
    "completed although it was cancelled": (
        lambda s: s.submitted().started().trained(40, saved=40).cancelled().ended("completed", 0),
        "completed", "", 0,
    ),
    "failed, then submitted again and gone": (
        lambda s: s.submitted().started().ended("failed", 1, NO_SPACE).submitted("local-2"),
        "lost", "job local-2 is gone and did not record its outcome; see `zslurm logs --supervisor`", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDED)
def test_a_run_that_rests(tmp_path: Path, name: str) -> None:
    tell, state_name, note, exit_code = ENDED[name]
    state = look(tell(Story(tmp_path / "tiny")).run)
    assert (state.state, state.active, state.exit_code) == (state_name, False, exit_code)
    assert cells(state)["note"] == note
    assert cells(state)["left"] == "-"
    assert lines_of(state)[0] == f"tiny: {state_name} (job {state.job_id} on local)"
    assert as_json(state)["active"] is False


def test_a_run_that_was_never_accepted_by_a_launcher(tmp_path: Path) -> None:
    state = look(Story(tmp_path / "tiny").run)
    assert state.state == "prepared"
    assert as_row(state) == ["tiny", "prepared", "-", "-", "0/?", "-", "-", "-", "-", "-", "-", ""]
    assert lines_of(state) == ["tiny: prepared", f"  directory   {tmp_path}/tiny"]


def test_a_running_run(tmp_path: Path) -> None:
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started().trained(1, 2, 10, saved=8)
        state = look(story.run)
        assert state.active
        shown = cells(state)
        assert shown.pop("last event").startswith("attempt started ")
        assert shown == {
            "run": "tiny",
            "state": "running",
            "job": "local-1",
            "attempt": "1",
            "step": f"10/{STEPS}",
            "loss": "3.9000",
            "validation": "-",
            "tokens/s": "1.23k",
            "MFU": "-",
            "left": "1m 00s",
            "note": "",
        }
        lines = lines_of(state)
        assert "  nodes       node[0-1]" in lines
        assert f"  step        10 of {STEPS}, loss 3.9000, 1m 00s left" in lines
        assert "  checkpoint  step 8" in lines
        assert lines[-1].split()[-3:] == ["running", "-", "node[0-1]"]
        story.ended("completed", 0)
        assert look(story.run).state == "completing", "the outcome is there, and its job is about to end"
        holder.end()
        assert look(story.run).state == "completed"


def test_as_json_everything_is_there(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(11, 12, saved=10).ended("failed", 1, NO_SPACE)
    found = as_json(look(story.run))
    assert found.pop("submitted") > 1_700_000_000
    assert found.pop("last_event")["event"] == "run_ended"
    assert found.pop("last_cause").pop("time") > 1_700_000_000
    assert found == {
        "run": "tiny",
        "run_dir": str(tmp_path / "tiny"),
        "state": "failed",
        "active": False,
        "job_id": "local-1",
        "cluster": "local",
        "launcher": "local",
        "reason": None,
        "reason_words": None,
        "expected_start": None,
        "as_of": None,
        "successor": None,
        "nodes": "node[0-1]",
        "restarts": 0,
        "damaged_events": 0,
        "attempt": 1,
        "step": 12,
        "total_steps": STEPS,
        "loss": 3.88,
        "tokens_per_s": 1234.5,
        "mfu": None,
        "evaluation_step": None,
        "evaluation_loss": None,
        "sources": {},
        "not_shown": (),
        "checkpoint_step": 10,
        "best_step": None,
        "exit_code": 1,
        "cause": {
            "message": "OSError: No space left on device",
            "rank": 0,
            "node": "node0",
            "exit_code": 1,
            "step": 12,
        },
        "last_decision": None,
        "excluded": [],
        "restarts_in_place": 0,
        "recovered_in_memory": 0,
        "planned_moves": 0,
        "helpers": [],
        "preempted": None,
        "postponed": None,
    }


def test_what_was_trained_on_of_each_source_is_shown(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(9, 10)
    sources = {"web": {"tokens": 2_500_000, "epochs": 0.1234}, "code": {"tokens": 900, "epochs": 2}, "maths": {}}
    with JsonLinesWriter(story.run.metrics) as lines:
        lines.append({"kind": "sources", "attempt": 1, "step": 10, "sources": sources, "time": 1.0})
    assert "  data        web 2.5M tokens (0.123 epochs), code 900 tokens (2 epochs)" in lines_of(look(story.run))


def test_speed_and_validation_loss_are_shown_where_they_are_known(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(9, 10, mfu=0.4123).evaluated(10, 3.25)
    state = look(story.trained(11, 12, saved=12, mfu=0.4123).ended("completed", 0).run)
    assert (cells(state)["validation"], cells(state)["tokens/s"], cells(state)["MFU"]) == (
        "3.2500",
        "1.23k",
        "41.2 %",
    )
    lines = lines_of(state)
    assert "  speed       1.23k tokens/s, MFU 41.2 %" in lines
    assert "  validation  loss 3.2500 at step 10" in lines
    assert "  checkpoint  step 12, the best: step 10" in lines
    found = as_json(state)
    assert (found["mfu"], found["evaluation_step"], found["evaluation_loss"], found["best_step"]) == (
        0.4123,
        10,
        3.25,
        10,
    )


def test_one_slow_step_does_not_change_what_is_left(tmp_path: Path) -> None:
    """A step's time may hold a checkpoint."""
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started().trained(*range(1, 10))
        with JsonLinesWriter(story.run.metrics) as lines:
            lines.append({"kind": "step", "attempt": 1, "step": 10, "loss": 3.9, "step_time_s": 600.0})
        assert cells(look(story.run))["left"] == "1m 00s"


def test_every_attempt_is_reported_with_its_end(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started(1).ended("interrupted", 75, attempt=1)
    story.submitted("local-2").started(2).ended("failed", 137, KILLED, attempt=2).submitted("local-3").started(3)
    lines = lines_of(look(story.run))
    attempts = [line.split(maxsplit=3) for line in lines[lines.index("  attempts") + 2 :]]
    assert [(number, " ".join(rest.split())) for number, _, _, rest in attempts] == [
        ("1", "interrupted 75 node[0-1]"),
        ("2", "failed 137 node[0-1] rank 3 on node1: Killed"),
        ("3", "no end recorded - node[0-1]"),
    ]


def test_of_steps_that_were_repeated_the_last_attempt_counts(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(9, 10, 11, saved=9)
    story.started(2).trained(10, attempt=2)
    assert (look(story.run).step, look(story.run).attempt) == (10, 2)


@pytest.mark.parametrize("torn", [b'{"kind":"step","step":99', b'{"event":"attempt_en', b"\x00\x00\x00"])
def test_a_torn_last_line_hides_nothing_that_is_whole(tmp_path: Path, torn: bytes) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(12, saved=12).ended("failed", 1, NO_SPACE)
    before = as_json(look(story.run))
    for path in (story.run.metrics, story.run.events, story.run.submissions):
        with path.open("ab") as file:
            file.write(torn)
    assert as_json(look(story.run)) == before


def test_a_run_of_another_machine_is_not_declared_dead(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started()
    text = story.run.submissions.read_text().replace('"host":"', '"host":"another-')
    story.run.submissions.write_text(text)
    state = look(story.run)
    assert (state.state, state.active) == ("unknown", True)
    assert (state.reason or "").startswith("it was started on another-")
    story.ended("completed", 0)
    assert look(story.run).state == "completed", "an outcome in the shared directory counts"


def test_many_runs_are_looked_at_together(tmp_path: Path) -> None:
    stories = [Story(tmp_path / name) for name in ("a", "b")]
    stories[1].submitted().started().ended("completed", 0)
    assert [state.state for state in look_all([story.run for story in stories])] == ["prepared", "completed"]


def test_one_run_in_full_as_json_has_attempts_and_checkpoints(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started(1).ended("interrupted", 75, attempt=1)
    story.submitted("local-2").started(2).ended("failed", 137, KILLED, attempt=2)
    for step in (20, 8):
        folder = story.run.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").touch()
    (story.run.checkpoints / "step-00000024").mkdir()
    found = details_as_json(look(story.run), "node7")
    assert (found["checkpoints"], found["excluded_nodes"]) == ([8, 20], "node7"), "uncommitted ones are none"
    assert [(row["attempt"], row["nodes"], row["outcome"], row["exit_code"]) for row in found["attempts"]] == [
        (1, "node[0-1]", "interrupted", 75),
        (2, "node[0-1]", "failed", 137),
    ]
    assert found["attempts"][1]["cause"]["message"] == "Killed"


def test_kept_checkpoints_and_excluded_nodes_are_listed(tmp_path: Path) -> None:
    story = Story(tmp_path / "tiny").submitted().started().trained(20, saved=20)
    for step in (8, 20):
        folder = story.run.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").touch()
    lines = list(lines_of(look(story.run), "node[3,7]"))
    assert "  checkpoint  step 20; kept: 8, 20" in lines
    assert "  excluded    node[3,7]" in lines


ECC = {
    "kind": "gpu_ras_uncorrectable", "role": "root", "scope": "gpu", "time": 1.0, "source": "gpu",
    "line": "umc: 1 new uncorrectable error", "node": "node1", "gpu": "3",
}  # fmt: skip


def swapped(story: Story, attempt: int, **fields: object) -> Story:
    """An attempt fails for a bad GPU, and the next starts without its node."""
    story.event("attempt_ended", attempt=attempt, outcome="failed", exit_code=1, cause={"message": "Killed"})
    decision = {"attempt": attempt, "action": "swap", "reason": "bad GPU", "root": ECC, "exclude": ["node1"]}
    story.event("decision", **(decision | {"nodes": ["node0", "node2"], "mode": "act"} | fields))
    story.event("nodes_excluded", nodes=["node1"], reason="bad GPU", expires=4e9)
    return story


def test_what_a_running_run_survived_is_reported_while_it_runs(tmp_path: Path) -> None:
    with Holder() as holder:
        story = swapped(Story(tmp_path / "tiny").submitted(process=holder.pid).started(), 1)
        assert look(story.run).state == "running", "an attempt's end is not the run's where it continues"
        state = look(swapped(story.started(2).trained(10, attempt=2), 2).started(3).run)
        assert state.state == "running"
        note = cells(state)["note"]
        assert note.startswith("started again 2 times; last cause ")
        assert note.endswith(" ago: GPU RAS uncorrectable on node1, GPU 3: umc: 1 new uncorrectable error")
        lines = [line.split(maxsplit=3) for line in lines_of(state)]
        said = {words[0]: words[-1] for words in lines if words[0] in ("last", "decision", "restarts", "excluded")}
        assert said["decision"].endswith(
            "attempt 2: decided to start again with a spare node on node[0,2], without node1 from now on: bad GPU"
        )
        assert "  excluded    node1" in lines_of(state)
        assert "  excluded    node[1,7]" in lines_of(state, "node[1,7]"), "Slurm has its own list"
        assert "  excluded    node7; by Aegis: node1" in lines_of(state, "node7"), "only the supervisor knows"
        assert "  restarts    2 in place, 0 by Slurm" in lines_of(state)
        found = as_json(state)
        assert (found["excluded"], found["restarts_in_place"]) == (["node1"], 2)
        cause = found["last_cause"]
        assert (cause["kind"], cause["node"], cause["gpu"], cause["attempt"]) == (ECC["kind"], "node1", "3", 2)
        assert cause["message"] == "umc: 1 new uncorrectable error"
        assert found["last_decision"]["action"] == "swap"
        assert (found["cause"], found["exit_code"]) == (None, None), "it has not ended"


def test_what_was_only_observed_is_no_restart_and_the_run_has_ended(tmp_path: Path) -> None:
    story = swapped(Story(tmp_path / "tiny").submitted().started(), 1, mode="observe")
    state = look(story.ended("failed", 1, NO_SPACE).run)
    assert (state.state, state.aegis.restarts_in_place) == ("failed", 0)
    assert any(
        line.startswith("  decision  ") and "attempt 1: would (mode observe) start" in line
        for line in lines_of(state)
    )


def test_a_run_that_completed_after_all_has_no_note_but_its_story(tmp_path: Path) -> None:
    story = swapped(Story(tmp_path / "tiny").submitted().started(), 1).started(2).ended("completed", 0, attempt=2)
    state = look(story.run)
    assert (state.state, cells(state)["note"]) == ("completed", "")
    assert any(line.startswith("  last cause  ") for line in lines_of(state))


def test_runs_are_chosen_by_state_and_by_time(shell: Shell) -> None:
    runs = shell.directory / "runs"
    Story(runs / "old").submitted().started().ended("failed", 1, NO_SPACE)
    Story(runs / "done").submitted("local-2").started().ended("completed", 0)
    Story(runs / "new").submitted("local-3").started().ended("failed", 1, NO_SPACE)
    submissions = runs / "old" / "submissions.jsonl"
    row = json.loads(submissions.read_text())
    submissions.write_text(json.dumps(row | {"time": 1_000_000_000.0}) + "\n")
    (runs / "old" / "events.jsonl").write_text(
        (runs / "old" / "events.jsonl").read_text().replace("17800", "10000")
    )

    def names(*arguments: str) -> set[str]:
        return {row["run"] for row in shell.zslurm.ok("status", "--json", *arguments).json}

    assert names() == {"old", "done", "new"}
    assert names("--state", "failed") == {"old", "new"}
    assert names("--state", "failed,completed", "--since", "1h") == {"new", "done"}
    assert names("--state", "failed", "--since", "2020-01-01") == {"new"}
    assert shell.zslurm.ok("status", "--state", "running").stderr == "no such runs\n"
    assert "did you mean failed" in shell.fails("status", "--state", "faled")[1]
    assert "expected 30m" in shell.fails("status", "--since", "yesterday")[1]


@pytest.mark.parametrize("options", [(), ("--json",), ("--state", "completed")])
def test_damaged_lines_of_events_are_named_and_the_rest_counts(
    tmp_path: Path, shell: Shell, options: tuple[str, ...]
) -> None:
    story = Story(tmp_path / "tiny").submitted().started().ended("completed", 0)
    whole = shell.zslurm.ok("status", story.run.path, *options).stdout
    text = story.run.events.read_text()
    story.run.events.write_text("\0" * 40 + "\n" + text.replace("\n", "\n[]\n", 1))
    done = shell.zslurm.ok("status", story.run.path, *options)
    assert done.stdout == whole.replace('"damaged_events": 0', '"damaged_events": 2')
    assert done.stderr == f"{story.run.events}: 2 damaged lines are left out: what they tell is missing here\n"


def test_a_run_that_waits_for_a_person_is_shown_first(tmp_path: Path, shell: Shell) -> None:
    well = look(Story(tmp_path / "well").submitted().started().trained(9, saved=9).ended("interrupted", 75).run)
    story = Story(tmp_path / "failed").submitted().started().trained(9).ended("failed", 137, KILLED)
    with JsonLinesWriter(story.run.events) as events:
        events.append({"event": "exclusion_failed", "time": time.time(), "nodes": "node1"})
    failed = look(story.run)
    assert not waits_for_person(well)
    assert waits_for_person(failed)
    assert waits_for_person(replace(well, state="held", reason="JobHeldUser"))
    old = {"event": "run_ended", "time": time.time() - 10 * 86400}
    assert not waits_for_person(replace(failed, last_event=old)), "it is history"
    shown = shell.zslurm.ok("status", well.run.path, failed.run.path).stdout
    assert shown.index("failed") < shown.index("well")


def test_a_job_that_cannot_start_its_ranks_says_why_until_an_attempt_starts(tmp_path: Path) -> None:
    full = {"reason": "/runs: No space left on device", "needs_person": True}
    story = Story(tmp_path / "tiny").submitted().event("start_postponed", **full)
    story.event("spare_checked", node="node1", ok=True)
    waits = replace(look(story.run), state="running")
    assert waits_for_person(waits)
    assert cells(waits)["note"] == "no ranks run: /runs: No space left on device"
    started = replace(look(story.started().run), state="running")
    assert not waits_for_person(started)
    assert "no ranks run" not in cells(started)["note"]


def test_a_fault_after_which_no_step_was_finished_is_noted(tmp_path: Path) -> None:
    line = "torch has tried for 68 s to resolve the name node9: gai error: -2 - Name or service not known"
    fault = {"attempt": 1, "kind": "net_config", "scope": "node", "source": "log", "node": "node1", "line": line}
    story = Story(tmp_path / "tiny").submitted().started().event("fault_detected", role="root", **fault)
    fault_only = cells(replace(look(story.run), state="running", reason=None))["note"]
    assert "ago, no step since: net config on node1: torch has tried for 68 s" in fault_only
    assert "no step since" not in cells(replace(look(story.trained(3).run), state="running", reason=None))["note"]
    story.event("fault_detected", role="root", cleared=True, **fault)
    assert "no step since" not in cells(replace(look(story.run), state="running", reason=None))["note"]


def test_a_start_that_is_postponed_until_slurm_answers_waits_for_nobody(tmp_path: Path) -> None:
    reason = "the job cannot be requeued yet: the Slurm controller does not answer"
    story = Story(tmp_path / "tiny").submitted().event("start_postponed", reason=reason)
    waits = replace(look(story.run), state="running")
    assert not waits_for_person(waits)
    assert cells(waits)["note"] == f"no ranks run: {reason}"


def test_a_run_that_was_cancelled_and_still_saves_is_stopping(tmp_path: Path, shell: Shell) -> None:
    with Holder() as holder:
        story = Story(tmp_path / "tiny").submitted(process=holder.pid).started().trained(9)
        assert look(story.run).state == "running"
        state = look(story.cancelled().run)
        assert (state.state, state.active, waits_for_person(state)) == ("stopping", True, False)
        assert lines_of(state)[-1].split()[-3:] == ["running", "-", "node[0-1]"]
        assert "tiny" in shell.zslurm.ok("status", story.run.path, "--state", "stopping").stdout
        story.ended("interrupted", 75)
        holder.end()
        assert look(story.run).state == "cancelled"
