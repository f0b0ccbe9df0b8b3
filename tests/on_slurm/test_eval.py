"""`zslurm eval --slurm` on a real Slurm: ranks on two nodes, and what happens where one, or the time, ends."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked
from tests.cli.trained import trained_run
from tests.on_slurm.as_user import COMMAND_EVERY_S
from tests.on_slurm.slurm_cluster import SlurmCluster
from tests.on_slurm.user import User, add_to_profile, at_work
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.errors import Exit

pytestmark = pytest.mark.slurm

WORDS = "The quick brown fox jumps over the lazy dog.".split()
TWO_NODES = ("--slurm", "--nodes", "2", "--ranks", "2")
ONE_RANK_EACH = ("--slurm", "--nodes", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that was really trained."""
    directory = tmp_path_factory.mktemp("trained")
    trained_run(directory)
    return directory


@pytest.fixture
def user(slurm_cluster: SlurmCluster, trained: Path) -> Iterator[User]:
    """The user with that run, and with tasks."""
    with at_work(slurm_cluster, "eval-test") as person:
        shutil.copytree(trained, person.directory, dirs_exist_ok=True)
        config = person.directory / "runs" / "first" / "config.json"
        config.write_text(config.read_text().replace(str(trained), str(person.directory)))
        begins = [
            {"begin": " ".join(WORDS[:cut]), "next": WORDS[cut], "no": "", "right": 0} for cut in range(2, 8)
        ]
        choice = {"output_type": "multiple_choice", "doc_to_text": "begin", "doc_to_target": "right"}
        write_task(person, "choice", begins, doc_to_choice='{{[next, "nothing of all this"]}}', **choice)
        write_task(person, "written", begins, doc_to_text="begin", doc_to_target="next", **_tokens(6))
        limits = {"isolation": "limits", "network": True}
        wrong = [*begins[:-1], begins[-1] | {"next": ""}]
        write_task(person, "wrong", wrong, doc_to_choice="{{[next, next]}}", target_delimiter="", **choice)
        write_task(
            person, "slow", begins, doc_to_text="begin", metric_list=[{"metric": "pass@1"}], **_tokens(1),
            execution=limits | {"command": "sleep 1000", "program": "{{completion}}", "time_s": 1000},
        )  # fmt: skip
        account = person.cluster.user
        for path in [person.directory, *person.directory.rglob("*")]:
            shutil.chown(path, account.pw_uid, account.pw_gid)
        yield person


@pytest.fixture
def quick(user: User) -> User:
    """The same user, whose jobs and their ranks are forked from a process that has torch."""
    env = user.cluster.forking([*forked.RANKS, *forked.OTHERS, "zslurm"], torch=True)
    add_to_profile(user.cluster, f"  env: {json.dumps(env)}\n")
    return user


def write_task(user: User, name: str, documents: list[dict[str, Any]], **keys: Any) -> None:
    (user.directory / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    (user.directory / f"{name}.yaml").write_text(json.dumps({"task": name, "data": f"{name}.jsonl", **keys}))


def _tokens(most: int) -> dict[str, Any]:
    return {"generation_kwargs": {"max_gen_toks": most}}


def samples(user: User, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (user.directory / f"{name}.jsonl").read_text().splitlines()]


def started(user: User, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The command in the background, and its job once it is there; the rest of stderr is still to be read.

    Both are forked from a process that has torch; the ranks are not.
    """
    account = user.cluster.user
    forks = user.cluster.forking([*forked.OTHERS, "zslurm"], torch=True)
    argv = [str(user.cluster.installation().python), "-P", "-m", "zslurm", "eval", "first", *arguments]
    process = subprocess.Popen(
        argv, env=user.cluster.environment | forks, cwd=user.directory, user=account.pw_uid, group=account.pw_gid,
        extra_groups=[], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    line = process.stderr.readline()
    job = re.search(r" runs as job (\d+); Ctrl-C cancels it", line)
    assert job is not None, line + process.communicate(timeout=DEADLINE_S)[1]
    return process, job[1]


def ranks_of(job_id: str) -> dict[int, psutil.Process]:
    """The processes of the ranks of a job that run the program of the task `slow`."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if "zslurm.job.evaluation_rank" in (process.info["cmdline"] or [])[2:4]:  # srun's own has it further on
            try:
                environ = process.environ()
                programs = [child.cmdline()[-2:] for child in process.children()]  # others check the sandbox
                if environ["SLURM_JOB_ID"] == job_id and ["sleep", "1000"] in programs:
                    found[int(environ["SLURM_PROCID"])] = process
            except psutil.Error:
                continue
    return found


def wait_for_ranks(job_id: str) -> dict[int, psutil.Process]:
    def both() -> dict[int, psutil.Process] | None:
        found = ranks_of(job_id)  # one look: a rank may be between two programs at the next
        return found if found.keys() == {0, 1} else None

    return wait_for(both, "all ranks to run a program", every_s=COMMAND_EVERY_S)


def test_four_ranks_on_two_nodes_find_what_one_process_finds(quick: User) -> None:
    user = quick
    tasks = ("--tasks", "choice.yaml", "written.yaml")
    alone = json.loads(user.zslurm("eval", "first", *tasks, "--json", "--samples", "alone.jsonl", torch=True))
    words = ("eval", "first", *tasks, *TWO_NODES, "--json", "--samples", "shared.jsonl", "--out", "out.json")
    done = user.cluster.zslurm(*words, cwd=user.directory, torch=True)
    shared = json.loads(done.stdout)
    assert json.loads((user.directory / "out.json").read_text()) == shared
    assert shared["complete"] is True
    for one, two in zip(alone["results"], shared["results"], strict=True):
        for name in ("task", "metrics", "stderr", "documents"):
            assert one[name] == two[name]
    assert alone["results"][0]["metrics"] == {"acc": 1.0, "acc_norm": 1.0}
    for one, two in zip(*(samples(user, name) for name in ("alone", "shared")), strict=True):
        likely = [each.pop("log_likelihoods", []) for each in (one, two)]
        assert one == two, "the same questions in the same order, with the same answers"
        assert likely[1] == pytest.approx(likely[0], rel=1e-4), "ranks have fewer threads, which round differently"
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"zslurm eval first .* runs as job \d+; Ctrl-C cancels it", lines[0])
    assert [line.partition(":")[0] for line in lines[1:]] == ["choice", "written"]
    tools = user.cluster.instance.user / "home" / ".local" / "state" / "zslurm" / "tools"
    assert list(tools.iterdir()) == [], "nothing is left of the job's files"


def test_what_is_wrong_with_a_task_is_one_line_before_the_job_and_from_its_ranks(quick: User) -> None:
    user = quick
    code, said = user.fails("eval", "first", "--tasks", "nothing.yaml", *TWO_NODES, torch=True)
    assert (code, said.count("\n")) == (Exit.USAGE, 1), "no job"
    assert said.startswith("zslurm: nothing.yaml: no such task file; shipped tasks: ")
    (user.directory / "torn.yaml").write_text(
        json.dumps({"task": "torn", "data": "torn.jsonl", "doc_to_text": "x"})
    )
    (user.directory / "torn.jsonl").write_text('{"x": "a"}\n{"x": ')
    code, said = user.fails("eval", "first", "--tasks", "torn.yaml", *TWO_NODES, torch=True)
    assert (code, said) == (Exit.USAGE, f"zslurm: {user.directory}/torn.jsonl, line 2: is not JSON\n"), "no job"
    code, said = user.fails("eval", "first", "--tasks", "wrong.yaml", *TWO_NODES, torch=True)
    assert code == Exit.USAGE, said
    assert said.splitlines()[1:] == [
        f"zslurm: {user.directory}/wrong.jsonl, line 6: choice 1 ('') adds no token to its question"
    ]
    code, said = user.fails("eval", "first", "--tasks", "choice.yaml", "--nodes", "2", torch=True)
    assert (code, said) == (
        Exit.USAGE,
        "zslurm: --nodes 2 needs --slurm, or a job of so many nodes around this command\n",
    )


def test_a_rank_that_is_killed_ends_the_command_and_is_named(user: User) -> None:
    out = user.directory / "part.json"
    process, job_id = started(user, "--tasks", "choice.yaml,slow.yaml", *ONE_RANK_EACH, "--out", str(out))
    ranks = wait_for_ranks(job_id)
    node = ranks[1].environ()["SLURMD_NODENAME"]
    ranks[1].send_signal(signal.SIGKILL)
    said = process.communicate(timeout=DEADLINE_S)[1].splitlines()
    assert process.returncode == Exit.FAILED, said
    assert said[-1] == f"zslurm: rank 1 on {node}: Killed; is there memory for all ranks?"
    part = json.loads(out.read_text())
    assert (part["complete"], [each["task"] for each in part["results"]]) == (False, ["choice"])


def test_at_the_time_limit_what_was_scored_is_kept(user: User) -> None:
    process, job_id = started(user, "--tasks", "choice.yaml,slow.yaml", *ONE_RANK_EACH, "--time", "30", "--json")
    wait_for_ranks(job_id)
    user.cluster.run_as_root(["scontrol", "update", f"jobid={job_id}", "endtime=now"])
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == Exit.INTERRUPTED, err
    assert err.splitlines()[-1].startswith("not complete: ")
    assert err.splitlines()[-1].endswith("; 1 of 2 tasks scored")
    assert "Traceback" not in err
    (only,) = json.loads(out)["results"]
    assert only["metrics"] == {"acc": 1.0, "acc_norm": 1.0}
