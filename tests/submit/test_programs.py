"""Runs whose trainer is another program: submitted, watched, started again, stopped, refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import programs
from tests.checkout import DOCS
from tests.submit.local_runs import LocalUser
from tests.waiting import wait_for

STEPS = 30


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def write(
    user: LocalUser,
    name: str,
    *words: str,
    steps: int = STEPS,
    ranks: int = 2,
    trainer: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """A run file of a run with the program of tests/programs, unless `trainer` has another command."""
    aegis = {"settle_s": 0.5} | sections.pop("aegis", {})
    return user.write_run(
        name, *words, steps=steps, ranks=ranks, save_every=10, trainer_section=trainer, aegis=aegis, **sections
    )


def roots(user: LocalUser, name: str) -> list[tuple[str, int]]:
    found = [event["root"] for event in user.events(name, "decision") if "root" in event]
    return [(root["kind"], root.get("rank")) for root in found]


def test_a_killed_rank_is_named_and_the_program_starts_again_from_what_it_saved(user: LocalUser) -> None:
    run = write(user, "killed", "--binary", "kill:14:1:1")
    messages = user.zslurm("submit", run, "--wait").stderr
    assert f"killed: step {STEPS}/{STEPS}  loss {4.2 * 0.99**STEPS:.4f}" in messages
    assert roots(user, "killed") == [("rank_killed", 1)]
    state = user.state("killed")
    assert (state["state"], state["attempt"], state["step"], state["checkpoint_step"]) == (
        "completed",
        2,
        STEPS,
        STEPS,
    )
    assert state["total_steps"] == STEPS
    assert min(row["step"] for row in user.steps("killed") if row["attempt"] == 2) >= 11
    (decision,) = user.events("killed", "decision")
    assert decision["committed_step"] == 10
    assert "has completed" in user.zslurm("submit", run, exit_code=1).stderr


def test_an_error_of_the_program_is_the_cause_with_its_message(user: LocalUser) -> None:
    run = write(user, "wrong", "raise:3:1:*", aegis={"retries": 1})
    user.zslurm("submit", run, "--wait", exit_code=93)
    cause = user.state("wrong")["cause"]
    assert (cause["rank"], cause["message"], cause["exit_code"]) == (
        1,
        "ValueError: a matrix has the wrong shape",
        1,
    )


def test_a_rank_that_hangs_is_noticed_by_its_progress(user: LocalUser) -> None:
    limits = {"hang": {"setup_s": 60.0, "step_s": 2.0}, "sensors": {"progress_s": 0.1}}
    slow = {"env": {"STEP_S": "0.15"}}  # so that the usual time of a step is known before it hangs
    run = write(user, "hangs", "hang:14:0:1", aegis=limits, trainer=slow)
    user.zslurm("submit", run, "--wait")
    assert [kind for kind, _ in roots(user, "hangs")] == ["rank_hang"]
    assert user.state("hangs")["attempt"] == 2


def test_it_is_asked_to_stop_and_continues_with_the_next_submission(user: LocalUser) -> None:
    run = write(user, "stops", steps=100_000)
    user.zslurm("submit", run)
    user.wait_for_step("stops", 15)
    user.zslurm("cancel", "stops", "--wait")
    state = user.state("stops")
    assert (state["state"], state["attempt"]) == ("cancelled", 1)
    last = programs.saved_step(user.run_dir("stops"))
    assert last > 10
    user.zslurm("submit", write(user, "stops", steps=last + 5))
    assert user.wait_for_end("stops")["state"] == "completed"
    assert [row["step"] for row in user.steps("stops")] == list(range(1, last + 6))


def test_a_program_that_ignores_the_signal_is_killed(user: LocalUser) -> None:
    run = write(user, "deaf", "--deaf", steps=100_000, ranks=1, trainer={"stop_s": 0.5})
    user.zslurm("submit", run)
    user.wait_for_step("deaf", 3)
    user.zslurm("cancel", "deaf", "--wait")
    assert user.state("deaf")["state"] == "cancelled"
    assert (
        b"did not stop within 0.5 s of the request (trainer.stop_s) and was killed"
        in user.run_dir("deaf").attempt(1).rank_log(0).read_bytes()
    )
    assert not user.processes()


def test_a_launcher_on_each_node_gets_placeholders_and_leaves_nothing_behind(user: LocalUser) -> None:
    """A shell as launcher: it starts a process in another session, and ends without it."""
    script = (
        "echo {nodes} {node_rank} {ranks_per_node} {world_size} {master_port} $NNODES"
        " ${ZSLURM_RECOVERY_FILE-none}; setsid sleep 9999 & exit 0"
    )
    run = write(user, "node", ranks=4, trainer={"command": ["sh", "-c", script], "launcher": "node"})
    user.zslurm("submit", run, "--wait")
    words = user.zslurm("logs", "node").stdout.split()
    assert words[:4] == ["1", "0", "4", "1"] and words[4].isdigit() and words[5:7] == ["1", "none"]
    wait_for(lambda: not user.processes(), "the process that was left behind to end")
    # The process has the name of setsid until it executes sleep.
    pattern = r"the program left 1 process behind, now killed: (sleep|setsid)\b"
    assert re.search(pattern, user.zslurm("logs", "node").stdout)


def test_a_pattern_over_the_log_shows_steps_too(user: LocalUser) -> None:
    lines = "for i in 1 2 3; do printf 'it %s/3 | loss 0.%s\\r' $i $i; sleep 0.3; done; echo"
    progress = {"pattern": r"it (?P<step>\d+)/3 \| loss (?P<loss>[\d.]+)"}
    run = write(user, "log", ranks=1, trainer={"command": ["sh", "-c", lines], "progress": progress})
    user.zslurm("submit", run, "--wait")
    assert (user.steps("log")[-1]["step"], user.steps("log")[-1]["loss"]) == (3, 0.3)


def test_the_examples_in_bash_and_in_c_show_their_steps(user: LocalUser) -> None:
    """Those of docs/programs.md: rank 0 is the one, rank 1 the other."""
    text = (DOCS / "programs.md").read_text()
    bash, c = (re.findall(rf"^```{kind} program\n(.*?)^```$", text, re.M | re.S)[0] for kind in ("bash", "c"))
    (user.directory / "show.sh").write_text(bash)
    (user.directory / "show.c").write_text(c)
    binary = user.directory / "show"
    subprocess.run(["cc", "-Wall", "-Werror", "-o", binary, user.directory / "show.c"], check=True)
    both = f'[ "$RANK" = 1 ] && exec {binary}; exec bash {user.directory / "show.sh"}'
    user.zslurm("submit", write(user, "others", ranks=2, trainer={"command": ["sh", "-c", both]}), "--wait")
    assert (user.steps("others")[-1]["step"], user.steps("others")[-1]["loss"]) == (3, 0.5)
    ends = [json.loads(user.run_dir("others").attempt(1).rank_end(rank).read_text()) for rank in range(2)]
    assert [(end["step"], end["exit_code"]) for end in ends] == [(3, 0), (3, 0)]


def test_the_command_line_alone_makes_a_run_of_a_program(user: LocalUser) -> None:
    (user.directory / "train.py").write_text("import helper\nprint(helper.WORD)\n")
    (user.directory / "helper.py").write_text("WORD = 'found beside the script'\n")
    words = ["submit", "--cluster", "local", "--wait", "--", sys.executable, "train.py", "--lr", "1e-3"]
    user.zslurm(*words)
    assert user.state("train")["state"] == "completed"
    assert "found beside the script" in user.zslurm("logs", "train").stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--", "no-such-program"], "trainer.command: there is no program `no-such-program` on your PATH"),
        (["--", "python3", "missing.py"], "missing.py is not there"),
        (["--", "./run.sh"], "run.sh is not there, or not executable"),
        ([], "give a RUN_FILE, or a program behind `--`"),
        (["--set", "trainer.directory=nowhere", "--", "true"], "there is no directory"),
        (["--set", "trainer.progress.pattern=step", "--", "true"], "needs a group (?P<step>...)"),
        (["--set", "aegis.recovery=memory", "--", "true"], "memory needs zslurm's own trainer"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(user: LocalUser, words: list[str], why: str) -> None:
    messages = user.zslurm("submit", "--cluster", "local", *words, exit_code=2).stderr
    assert why in messages
    assert len(messages.splitlines()) == 1
    assert not (user.directory / "runs").exists()


def test_a_program_that_cannot_be_started_in_the_job_stops_the_run(user: LocalUser) -> None:
    (user.directory / "broken").write_text("#!/no/such/interpreter\n")
    (user.directory / "broken").chmod(0o755)
    messages = user.zslurm("submit", "--cluster", "local", "--wait", "--", "./broken", exit_code=1).stderr
    assert "trainer.command cannot be started" in messages


def test_a_program_that_overwrites_the_files_of_its_run_starts_again_all_the_same(user: LocalUser) -> None:
    """As transformers does with output_dir=RUN_DIR: its own config.json. It prints and shows nothing either."""
    script = (
        'echo "{}" > {run_dir}/config.json; if [ {attempt} = 1 ]; then exit 3; fi; echo done > {output_dir}/result'
    )
    run = write(user, "writes", ranks=1, trainer={"command": ["sh", "-c", script], "checkpoints": None})
    user.zslurm("submit", run, "--wait")
    state = user.state("writes")
    assert (state["state"], state["attempt"], state["exit_code"]) == ("completed", 2, 0)
    assert len(user.events("writes", "config_restored")) == 2
    assert (user.run_dir("writes").path / "output" / "result").read_text() == "done\n"
    (first,) = user.events("writes", "decision")
    assert (first["action"], first["root"]["kind"]) == ("restart", "rank_exit")
    words = " ".join(user.zslurm("status", "writes").stdout.split())
    assert "not shown no steps (zslurm.progress.step was not called, and trainer.progress is not set)" in words
    assert "no checkpoints (trainer.checkpoints is not set)" in words
    for command in (
        ["why"],
        ["logs", "--events"],
        ["logs", "--errors"],
        ["report", "--out", user.directory / "page.html"],
    ):
        user.zslurm(command[0], "writes", *command[1:])
    assert "shows no steps" in (user.directory / "page.html").read_text()


def test_a_run_does_not_change_between_trainer_and_program(user: LocalUser) -> None:
    run = write(user, "ours", steps=3, ranks=1)
    user.zslurm("submit", run, "--wait")
    other = user.write_run("ours", steps=3, trainer="real")
    assert "was started with trainer.command" in user.zslurm("submit", other, exit_code=2).stderr


WARM = """
import sys, time
loaded = "xml.dom.minidom" in sys.modules  # before this program has imported it
from pathlib import Path
from zslurm import progress
import os, signal
import beside
rank, attempt, out = os.environ["RANK"], os.environ["ZSLURM_ATTEMPT"], Path(sys.argv[1])
parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
facts = [loaded, "warm_keeper" in parent, __name__, __file__, sys.path[0], beside.RANK, os.environ["MASTER_PORT"]]
(out / f"{attempt}-{rank}").write_text("\\n".join(map(str, facts)))
print("prints from attempt", attempt, flush=True)
import xml.dom.minidom
for step in range(1, 6):
    progress.step(step)
    while step == 3 and attempt == "1" and not (out / "prepared").exists():
        time.sleep(0.05)
    if step == 3 and attempt == "1" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 3 and attempt == "1":
        time.sleep(600)
"""


def test_after_a_fault_warm_programs_start_with_the_modules_of_the_last_start(user: LocalUser) -> None:
    work = user.directory / "warm-work"
    work.mkdir()
    (work / "warm.py").write_text(WARM)
    (work / "beside.py").write_text("import os\nRANK = os.environ['RANK']\n")
    changes = {"command": [sys.executable, "warm.py", str(work)], "directory": str(work), "warm": True, "steps": 5}
    user.zslurm("submit", write(user, "warm", ranks=2, trainer=changes))

    def waiting() -> bool:
        """Return whether both ranks' keepers have a child that waits."""
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        modules = str(user.run_dir("warm").warm_modules({"LOCAL_RANK": ""})).rpartition("-warm-")[0]
        return sum(any(word.startswith(modules) for word in command) for command in commands) == 2

    wait_for(waiting, "two warm programs")
    (work / "prepared").touch()
    assert user.wait_for_end("warm")["state"] == "completed"
    first, second = ((work / f"{attempt}-1").read_text().splitlines() for attempt in (1, 2))
    assert first[:3] == ["False", "False", "__main__"]
    assert second[:3] == ["True", "True", "__main__"]
    assert first[3:6] == second[3:6] == [str(work / "warm.py"), str(work), "1"]
    assert first[6] != second[6]
    run = user.run_dir("warm")
    assert "prints from attempt 2" in run.attempt(2).rank_log(1).read_text()
    left = run.warm_socket({"LOCAL_RANK": ""})
    wait_for(
        lambda: not list(left.parent.glob(f"{left.name.rpartition('-warm-')[0]}-warm-*")), "the keepers to end"
    )
