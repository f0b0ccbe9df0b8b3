"""The supervisor's side of the agents: real child processes, on this machine and behind an srun that is a script.

tests/on_slurm/test_agent_link.py has the real srun.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.checkout import ROOT
from tests.submit.specs import run_spec
from tests.waiting import DEADLINE_S, wait_for
from zslurm.aegis.core import agents as core_agents
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.messages import NodeAskedAbout, ReportReceived
from zslurm.aegis.core.step import step
from zslurm.aegis.protocol import AgentReport, Answer, Command, Heartbeat, ProgressReport, Stamp, decode_command
from zslurm.aegis.supervisor.agents import agents, keeper
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.agents.step import AGENT, STEP_PREFIX, agent_step
from zslurm.config.aegis import AegisSection
from zslurm.config.spec import RunSpec
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.run.supervisor_lease import read, take

FAKES = ("tests.aegis.fake_agent", "tests.aegis.fake_srun")
NODES = ["node0", "node1", "node2"]
SILENT_S = 4.0
"""Many times longer than what lies between two reports, also where they share the processors with much else."""


class SteeredAgents:
    """A run with agents that a test steers."""

    def __init__(self, directory: Path, *, slurm: bool, program: tuple[str, ...] | None = None) -> None:
        self.directory = directory
        cluster = {"name": "lab", "launcher": "slurm", "gpus_per_node": 8} if slurm else {}
        self.spec: RunSpec = run_spec(directory, cluster=cluster, aegis={"heartbeat_timeout_s": SILENT_S})
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        self.run.config.write_text(self.spec.model_dump_json())
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.heard: list[ReportReceived] = []
        self.state = AttemptState(self.spec.aegis, 1, tuple(NODES), list(NODES), Detector(self.spec.aegis))
        self.environ = forked.environment(forked.server(), FAKES, os.environ)
        self.program = program or (sys.executable, "-u", "-m", "tests.aegis.fake_agent", str(directory))
        self.agents = Agents(self.spec.aegis, self._record, self.program)
        self.nodes = NODES if slurm else ["here"]

    def _record(self, event: Event) -> None:
        self.events.append((event.NAME, event.fields()))

    def start(self) -> None:
        self.agents.start(self.spec, self.run, "12", self.nodes, self.environ)

    def stop(self) -> None:
        """End the agents, also those that a test has blocked."""
        self.agents.stop()
        for file in self.directory.glob("blocked-*"):
            file.unlink()

    def look(self) -> list[ReportReceived]:
        news = self.agents.news()
        for event in news:
            step(self.state, event)
        reports = [event for event in news if isinstance(event, ReportReceived)]
        self.heard += reports
        return reports

    def trouble(self) -> dict[str, str]:
        """What the core knows of nodes that may be dead by what Slurm does or reports."""
        self.look()
        return self.state.nodes_heard.trouble(time.monotonic())

    def event(self, kind: str) -> list[dict[str, Any]]:
        self.look()
        return [fields for name, fields in self.events if name == kind]

    def wait_for_event(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        wait_for(lambda: len(self.event(kind)) >= count, f"the event {kind}; so far {self.events}")
        return self.event(kind)

    def ask_for(self, what: str, node: str = "all", text: str = "") -> None:
        (self.directory / f"{what}-{node}").write_text(text)

    def no_more(self, what: str, node: str = "all") -> None:
        (self.directory / f"{what}-{node}").unlink()

    def pid(self, node: str = "here") -> int:
        return int((self.directory / f"pid-{node}").read_text())

    def received(self, node: str = "here") -> list[Heartbeat | Command]:
        path = self.directory / f"told-{node}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [command for line in lines if (command := decode_command(line)) is not None]

    def wait_for_report(self, node: str) -> None:
        """Wait for the next progress report of a node."""

        def came() -> bool:
            return any(
                isinstance(heard.report, ProgressReport) and heard.report.stamp.node == node
                for heard in self.look()
            )

        wait_for(came, f"a word of {node}; events: {self.events}")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[SteeredAgents]:
    steered = SteeredAgents(tmp_path, slurm=False)
    yield steered
    steered.stop()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteeredAgents]:
    """Behind a script that is called srun; squeue knows its version, scontrol no step, and sinfo no node."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, line in (
        ("srun", f'exec {sys.executable} -m tests.aegis.fake_srun "$@"'),
        ("squeue", '[ "$1" = --version ] && echo slurm-wlm 22.05.8'),
        ("scontrol", "echo 'Job step 12. not found'; exit 1"),
        ("sinfo", ":"),
        ("scancel", ":"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SRUN", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "24")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    steered = SteeredAgents(tmp_path, slurm=True)
    yield steered
    steered.stop()


def step_line(number: str, name: str) -> str:
    """A line of `scontrol --oneliner show step`."""
    return f"StepId={number} UserId=1 State=RUNNING Tasks=1 Name={name} Network=(null) TRES=(null)\n"


# --- on this machine --------------------------------------------------------------------------------------------


def test_an_agent_starts_hears_the_heartbeat_and_is_heard(here: SteeredAgents) -> None:
    here.agents.attempt = 3
    here.start()
    assert here.wait_for_event("agents_started") == [{"generation": here.agents.generation, "nodes": "here"}]
    wait_for(lambda: len(here.received()) >= 2, "two heartbeats")
    beat = here.received()[0]
    assert isinstance(beat, Heartbeat)
    assert (beat.attempt, beat.generation) == (3, here.agents.generation)
    here.wait_for_report("here")
    assert any(isinstance(heard.report, AgentReport) and heard.report.event == "started" for heard in here.heard)
    assert here.agents.liveness.any_responding()
    times = [heard.now for heard in here.heard]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic()


def test_a_killed_agent_is_started_again(here: SteeredAgents) -> None:
    here.start()
    here.wait_for_event("agents_started")
    first = here.pid()
    os.kill(first, signal.SIGKILL)
    (lost,) = here.wait_for_event("agent_lost")
    assert lost["node"] == "here"
    assert here.wait_for_event("agent_restarted") == [{"nodes": "here"}]
    assert here.pid() != first
    here.wait_for_report("here")


def test_garbage_is_not_heard_and_does_no_harm(here: SteeredAgents) -> None:
    here.ask_for("garbage")
    here.start()
    here.wait_for_event("agents_started")
    for _ in range(3):
        here.wait_for_report("here")
    assert {type(heard.report) for heard in here.heard} <= {AgentReport, ProgressReport}
    assert here.event("agent_lost") == []
    assert here.wait_for_event("agent_reports_ignored")[0].items() >= {"damaged": True, "count": 1}.items()


def test_a_kind_of_report_that_only_another_version_knows_is_named_once(here: SteeredAgents) -> None:
    here.ask_for("weather")
    here.start()
    here.wait_for_event("agents_started")
    for _ in range(3):
        here.wait_for_report("here")
    (ignored,) = here.wait_for_event("agent_reports_ignored")
    assert ignored == {"node": "here", "count": 1, "reason": "Invalid value 'weather' - at `$.kind`"}


def test_an_answer_comes_back(here: SteeredAgents) -> None:
    here.agents.attempt = 7
    here.start()
    here.wait_for_event("agents_started")
    answers = here.agents.ask("clean_up", timeout_s=DEADLINE_S)
    assert answers["here"].values == {"attempt": 7}
    assert any(isinstance(event.report, Answer) for event in [*here.heard, *here.look()]), (
        "it shows that the node lives"
    )
    assert here.agents.ask("stacks", ["nowhere"], timeout_s=DEADLINE_S) == {}


def test_of_too_many_reports_the_oldest_goes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_KEPT_REPORTS", 2)
    idle = Agents(AegisSection(), lambda event: None, ("true",))
    asked = NodeAskedAbout("here", None)
    idle._tell(asked)
    reports = [ReportReceived(ProgressReport(Stamp("here", n, 0.0, 0.0), 1), float(n), 0.0) for n in range(4)]
    for report in reports:
        idle._add_report(report)
    assert idle.news() == [asked, *reports[2:]]
    idle._add_report(reports[0])
    assert idle.news() == [reports[0]]


def test_who_does_not_answer_is_missing_and_nobody_waits_for_ever(here: SteeredAgents) -> None:
    here.start()
    here.wait_for_event("agents_started")
    here.ask_for("mute")
    assert here.agents.ask("stacks", timeout_s=0.3) == {}


def test_a_blocked_agent_does_not_block_the_supervisor_and_is_replaced(here: SteeredAgents) -> None:
    """It neither reads nor speaks; far more is sent to it than a pipe holds."""
    here.start()
    here.wait_for_event("agents_started")
    first = here.pid()
    here.ask_for("blocked")
    wait_for(lambda: not here.agents.send(Command("check", nodes=("x" * 4000,))), "the pipe to be full")
    here.wait_for_event("agent_lost")
    here.no_more("blocked")
    here.wait_for_event("agent_restarted")
    assert here.pid() != first
    here.wait_for_report("here")


def test_agents_that_cannot_live_are_said_to_be_unavailable_and_tried_again(here: SteeredAgents) -> None:
    here.ask_for("exit", text="3")
    here.start()
    (unavailable,) = here.wait_for_event("agents_unavailable")
    assert "exit code 3" in unavailable["reason"]
    assert not here.agents.liveness.any_responding()
    here.no_more("exit")
    here.wait_for_event("agents_started")
    assert here.event("agents_unavailable") == [unavailable], "said once"


def test_the_real_agent_speaks_and_does_what_it_is_told(tmp_path: Path) -> None:
    steered = SteeredAgents(tmp_path, slurm=False, program=AGENT)
    steered.start()
    steered.wait_for_event("agents_started")
    steered.wait_for_report("here")
    answer = steered.agents.ask("clean_up", timeout_s=DEADLINE_S, attempt=1)["here"]
    assert answer.ok, answer.why
    steered.agents.stop()
    wait_for(lambda: not steered.agents.liveness.any_responding(), "it to be gone")


def test_a_program_that_is_missing_is_said_once_and_nothing_else_happens(tmp_path: Path) -> None:
    steered = SteeredAgents(tmp_path, slurm=False, program=(str(tmp_path / "no-such-program"),))
    steered.start()
    (unavailable,) = steered.wait_for_event("agents_unavailable")
    assert "no-such-program" in unavailable["reason"]
    assert steered.agents.ask("stacks", timeout_s=0.1) == {}
    assert steered.agents.news() == []
    steered.agents.stop()


def test_it_quits_when_told_and_leaves_no_process(here: SteeredAgents) -> None:
    here.start()
    here.wait_for_event("agents_started")
    pid = here.pid()
    here.agents.stop()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the agent to be gone")
    assert isinstance(here.received()[-1], Command)
    assert not (here.run.path / "agent.json").exists()


def test_the_agent_of_an_earlier_supervisor_is_ended(here: SteeredAgents, tmp_path: Path) -> None:
    here.ask_for("blocked")  # or it would leave by itself, at the end of its input
    here.start()
    wait_for(lambda: (here.directory / "pid-here").exists(), "the first agent")
    first = here.pid()
    wait_for(lambda: (here.run.path / "agent.json").exists(), "its record")
    second = Agents(here.spec.aegis, lambda event: None, here.program)
    second.start(here.spec, here.run, "12", ["here"], here.environ)
    wait_for(lambda: here.pid() != first, "the second agent")
    wait_for(lambda: not _alive(first), "the first to be ended")
    here.no_more("blocked")
    second.stop()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- behind srun ------------------------------------------------------------------------------------------------


def test_one_step_holds_an_agent_on_every_node(slurm: SteeredAgents) -> None:
    slurm.start()
    (started,) = slurm.wait_for_event("agents_started")
    assert started["nodes"] == "node[0-2]"
    (call,) = (slurm.directory / "calls").read_text().splitlines()
    name = f"--job-name=agents-{slurm.agents.generation}"
    for option in (name, "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--mem=0", "--nodes=3", "--ntasks=3"):
        assert option in call.split()
    assert "--gpus-per-node=8" in call.split()
    answers = slurm.agents.ask("stacks", ["node0", "node2"], timeout_s=DEADLINE_S)
    assert set(answers) == {"node0", "node2"}
    commands = [command for command in slurm.received("node1") if isinstance(command, Command)]
    assert commands[-1].nodes == ("node0", "node2"), "everybody hears it, and who is meant is said"


def test_one_killed_agent_is_replaced_by_a_step_of_its_own(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    os.kill(slurm.pid("node1"), signal.SIGKILL)
    (lost,) = slurm.wait_for_event("agent_lost")
    assert lost == {"node": "node1", "reason": "the agent ended: Killed"}
    assert slurm.wait_for_event("agent_restarted") == [{"nodes": "node1"}]
    second = (slurm.directory / "calls").read_text().splitlines()[1]
    assert "--nodelist=node1" in second.split()
    assert f"--job-name=agents-{slurm.agents.generation}-2" in second.split()
    assert set(slurm.agents.ask("clean_up", timeout_s=DEADLINE_S)) == set(NODES)


def test_a_silent_agent_is_replaced_and_not_heard_any_more(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    slurm.ask_for("mute", "node2")
    (lost,) = slurm.wait_for_event("agent_lost")
    assert lost["node"] == "node2"
    assert "no heartbeat of the agent" in lost["reason"]
    slurm.no_more("mute", "node2")
    slurm.wait_for_event("agent_restarted")
    slurm.wait_for_report("node2")


def test_a_node_that_cannot_be_reached_is_known_as_such(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    (slurm.directory / "down").write_text("node1")
    os.kill(slurm.pid("node1"), signal.SIGKILL)
    slurm.wait_for_event("agent_lost")
    wait_for(slurm.trouble, "the word of srun")
    assert slurm.trouble() == {"node1": "tasks cannot be started: Communication connection failure"}
    (slurm.directory / "down").unlink()
    slurm.wait_for_event("agent_restarted")
    assert slurm.trouble() == {}


def test_a_node_that_left_the_job_keeps_no_other_from_its_agent(
    slurm: SteeredAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses any step with it, whatever other nodes that has."""
    monkeypatch.setattr(core_agents, "STARTUP_TIMEOUT_S", 3.0)
    monkeypatch.setattr(keeper, "STARTUP_TIMEOUT_S", 3.0)
    slurm.nodes = [f"node{index}" for index in range(9)]
    (slurm.directory / "gone").write_text("node5")
    slurm.start()
    (started,) = slurm.wait_for_event("agents_started")
    assert started["nodes"] == "node[0-4,6-8]"
    assert slurm.event("agents_unavailable") == []
    (slurm.directory / "gone").unlink()
    slurm.wait_for_report("node5")


def test_steps_that_slurm_refuses_whatever_their_nodes_do_not_become_ever_more(
    slurm: SteeredAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_agents, "PARTS_BEFORE_FIRST_REPORT", 2)
    slurm.nodes = [f"node{index}" for index in range(8)]
    (slurm.directory / "gone").write_text(" ".join(slurm.nodes))
    slurm.start()
    slurm.wait_for_event("agents_unavailable")
    calls = (slurm.directory / "calls").read_text()
    assert {word for word in calls.split() if word.startswith("--nodelist=")} == {
        "--nodelist=node[0-7]", "--nodelist=node[0-3]", "--nodelist=node[4-7]"
    }  # fmt: skip
    (slurm.directory / "gone").unlink()
    assert slurm.wait_for_event("agents_started")[0]["nodes"] == "node[0-7]"


def test_a_forgotten_node_gets_no_agent(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    slurm.agents.liveness.forget(["node1"])
    os.kill(slurm.pid("node1"), signal.SIGKILL)
    os.kill(slurm.pid("node2"), signal.SIGKILL)
    slurm.wait_for_event("agent_restarted")
    assert [fields["node"] for fields in slurm.event("agent_lost")] == ["node2"]
    assert set(slurm.agents.ask("check", timeout_s=DEADLINE_S)) == {"node0", "node2"}


def test_what_slurm_says_of_a_silent_node_is_known(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    record = "\x1f".join(["node1", "down*+drain", "gpu:8", "96", "1000", "main", ""]) + "\x1e"
    (slurm.directory / "tools" / "sinfo").write_text(f"#!/bin/sh\nprintf '{record}'\n")
    slurm.ask_for("blocked", "node1")
    wait_for(slurm.trouble, "the word of sinfo")
    assert slurm.trouble() == {"node1": "Slurm reports down not responding"}


@pytest.mark.parametrize("state", ["unknown*", "allocated*", "idle"])
def test_where_no_agent_speaks_only_a_node_that_is_down_is_in_trouble(slurm: SteeredAgents, state: str) -> None:
    """A controller that has just come back has heard of no node yet."""
    slurm.start()
    slurm.wait_for_event("agents_started")
    rows = [(node, "down*" if node == "node1" else state) for node in NODES]
    record = "".join("\x1f".join([node, word, "gpu:8", "96", "1000", "main", ""]) + "\x1e" for node, word in rows)
    (slurm.directory / "tools" / "sinfo").write_text(f"#!/bin/sh\nprintf '{record}'\n")
    slurm.ask_for("blocked")
    said = {"node1": "Slurm reports down not responding"}
    wait_for(
        lambda: not slurm.agents.liveness.any_responding() and slurm.trouble() == said,
        "the word of sinfo",
    )


def test_what_is_unknown_to_slurm_is_no_trouble_while_others_speak(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    asked = slurm.directory / "asked"
    record = "\x1f".join(["node1", "unknown*", "gpu:8", "96", "1000", "main", ""]) + "\x1e"
    (slurm.directory / "tools" / "sinfo").write_text(f"#!/bin/sh\nprintf '{record}'\necho asked >> {asked}\n")
    slurm.ask_for("blocked", "node1")
    wait_for(lambda: asked.exists() and len(asked.read_text().split()) > 1, "Slurm to be asked twice")
    assert slurm.trouble() == {}


def test_agents_of_an_srun_that_gave_up_are_ended_as_soon_as_slurm_answers(slurm: SteeredAgents) -> None:
    ended, away = slurm.directory / "ended", slurm.directory / "away"
    steps = slurm.directory / "steps"
    steps.touch()
    (slurm.directory / "tools" / "scontrol").write_text(
        "#!/bin/sh\n"
        f"[ -e {away} ] && {{ echo 'scontrol: error: Unable to contact slurm controller' >&2; exit 1; }}\n"
        f"cat {steps}\n"
    )
    (slurm.directory / "tools" / "scancel").write_text(f'#!/bin/sh\necho "$*" >> {ended}\n')
    slurm.start()
    slurm.wait_for_event("agents_started")
    away.touch()
    steps.write_text(step_line("12.1", f"agents-{slurm.agents.generation}"))
    (link,) = slurm.agents.liveness.present_links()
    os.kill(link.pid, signal.SIGKILL)
    slurm.wait_for_event("agent_lost")
    assert not ended.exists()
    away.unlink()
    wait_for(ended.exists, "the step that was left behind to be ended")
    assert ended.read_text().split()[-1] == "12.1"


def test_the_lease_names_the_generation_before_an_agent_starts_and_is_renewed(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    lease = read(slurm.run)
    assert lease is not None
    assert lease.generation == slurm.agents.generation
    wait_for(lambda: (now := read(slurm.run)) and now.renewed > lease.renewed, "the lease to be renewed")
    take(slurm.run, "another")
    (lost,) = slurm.wait_for_event("lease_lost")
    assert lost == {"generation": "another"}


def test_agents_that_replace_others_know_which_attempt_was_watched(slurm: SteeredAgents) -> None:
    slurm.start()
    slurm.wait_for_event("agents_started")
    slurm.agents.attempt = 4
    os.kill(slurm.pid("node1"), signal.SIGKILL)
    slurm.wait_for_event("agent_restarted")
    words = [(slurm.directory / f"words-{node}").read_text().split() for node in ("node0", "node1")]
    assert ["--attempt=0" in words[0], "--attempt=4" in words[1]] == [True, True]


def test_an_old_slurm_has_no_agents_and_the_supervisor_goes_on(slurm: SteeredAgents) -> None:
    (slurm.directory / "tools" / "squeue").write_text('#!/bin/sh\n[ "$1" = --version ] && echo slurm 20.11.9\n')
    slurm.start()
    (unavailable,) = slurm.wait_for_event("agents_unavailable")
    assert unavailable["reason"] == (
        "agents need Slurm 22.05 or newer, where steps can share a job's GPUs; this is 20.11.9"
    )
    assert not slurm.agents.liveness.any_responding()
    assert slurm.agents.send(Command("quit"))


def test_a_slow_controller_delays_nothing(slurm: SteeredAgents) -> None:
    """If scontrol and sinfo hang, agents still start, send heartbeats and are replaced."""
    (slurm.directory / "tools" / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    (slurm.directory / "tools" / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    slurm.start()
    slurm.wait_for_event("agents_started")
    slurm.ask_for("mute", "node2")
    slurm.wait_for_event("agent_lost")
    slurm.no_more("mute", "node2")
    slurm.wait_for_event("agent_restarted")
    beats = len(slurm.received("node0"))
    wait_for(lambda: len(slurm.received("node0")) > beats, "the next heartbeat")


def test_steps_of_earlier_supervisors_are_ended_and_no_others(slurm: SteeredAgents) -> None:
    steps = {"12.0": "attempt-1", "12.1": "agents-older", "12.2": f"agents-{slurm.agents.generation}", "12.3": "x"}
    (slurm.directory / "steps").write_text("".join(step_line(number, name) for number, name in steps.items()))
    (slurm.directory / "tools" / "scontrol").write_text(f"#!/bin/sh\ncat {slurm.directory}/steps\n")
    ended = slurm.directory / "ended"
    (slurm.directory / "tools" / "scancel").write_text(f'#!/bin/sh\necho "$*" >> {ended}\n')
    slurm.start()
    wait_for(ended.exists, "the older step to be ended")
    slurm.wait_for_event("agents_started")
    assert ended.read_text().split()[-1] == "12.1"


def test_the_agents_see_the_gpus_of_the_job(tmp_path: Path) -> None:
    cluster = {"name": "lab", "launcher": "slurm", "gpus_per_node": 4, "gpu_type": "mi300x"}
    words = agent_step(run_spec(tmp_path, cluster=cluster), ["a1", "a2"], "agents-x")
    assert "--gpus-per-node=mi300x:4" in words
    assert "--nodelist=a[1-2]" in words
    assert STEP_PREFIX == "agents-"
