"""`zslurm eval --slurm` on a real Slurm: ranks on two nodes, and what happens if one, or the time, ends."""

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
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, add_to_profile, at_work
from tests.train.evaluation import harness_tasks
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.errors import Exit

pytestmark = [pytest.mark.slurm, harness_tasks.with_harness]

SLOW = [{"metric": "SLOW", "aggregation": "mean", "higher_is_better": True}]
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
        choice = {"doc_to_choice": "{{[next, 'nothing of all this']}}", "doc_to_target": "{{right}}"}
        write_task(person, "choice", begins, output_type="multiple_choice", **choice)
        written = {"output_type": "generate_until", "doc_to_target": "{{next}}"}
        write_task(person, "written", begins, **written, **_tokens(6))
        write_task(person, "wrong", begins, output_type="loglikelihood", doc_to_target="", target_delimiter="")
        write_task(person, "slow", begins, **written, **_tokens(1), metric_list=SLOW)
        slow = person.directory / "slow.yaml"
        slow.write_text(slow.read_text().replace('"SLOW"', "!function waiting.wait"))
        (person.directory / "waiting.py").write_text(
            "import time\ndef wait(references, predictions):\n    time.sleep(1000)\n"
        )
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
    harness_tasks.write_task(user.directory, documents, task=name, doc_to_text="{{begin}}", **keys)


def _tokens(most: int) -> dict[str, Any]:
    return {"generation_kwargs": {"max_gen_toks": most, "until": []}}


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
    """The processes of the ranks of a job."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if "zslurm.job.evaluation_rank" in (process.info["cmdline"] or [])[2:4]:  # srun's own has it further on
            try:
                environ = process.environ()
                if environ["SLURM_JOB_ID"] == job_id:
                    found[int(environ["SLURM_PROCID"])] = process
            except psutil.Error:
                continue
    return found


def wait_for_ranks(job_id: str) -> dict[int, psutil.Process]:
    def both() -> dict[int, psutil.Process] | None:
        found = ranks_of(job_id)
        return found if found.keys() == {0, 1} else None

    return wait_for(both, "both ranks to start", every_s=COMMAND_EVERY_S)


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
        answers = [each.pop(key) for key in ("resps", "filtered_resps") for each in (one, two)]
        assert one == two, "the same questions in the same order, with the same scores"
        if one["task"] == "written":
            assert answers[0] == answers[1]
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"zslurm eval first .* runs as job \d+; Ctrl-C cancels it", lines[0])
    assert [line.partition(":")[0] for line in lines[1:]] == ["choice.yaml", "written.yaml"]
    tools = user.cluster.instance.user / "home" / ".local" / "state" / "zslurm" / "tools"
    assert list(tools.iterdir()) == [], "nothing is left of the job's files"


def test_what_is_wrong_with_a_task_is_one_line_before_the_job_and_from_its_ranks(quick: User) -> None:
    user = quick
    (user.directory / "torn.yaml").write_text("task: torn\noutput_type: [")
    code, said = user.fails("eval", "first", "--tasks", "torn.yaml", *TWO_NODES, torch=True)
    assert (code, said.count("\n")) == (Exit.USAGE, 1), "no job"
    assert said.startswith("zslurm: torn.yaml: ")
    code, said = user.fails("eval", "first", "--tasks", "wrong.yaml", *TWO_NODES, torch=True)
    assert code == Exit.USAGE, said
    assert said.splitlines()[1:] == [
        "zslurm: wrong.yaml: a choice ('') adds no token to its question (...'The quick')"
    ]


def test_a_rank_that_is_killed_ends_the_command_and_is_named(user: User) -> None:
    process, job_id = started(user, "--tasks", "choice.yaml", *ONE_RANK_EACH)
    ranks = wait_for_ranks(job_id)  # they import torch now
    node = ranks[1].environ()["SLURMD_NODENAME"]
    ranks[1].send_signal(signal.SIGKILL)
    said = process.communicate(timeout=DEADLINE_S)[1].splitlines()
    assert process.returncode == Exit.FAILED, said
    assert said[-1] == f"zslurm: rank 1 on {node}: Killed; is there memory for all ranks?"


def test_at_the_time_limit_what_was_scored_is_kept(user: User) -> None:
    process, job_id = started(user, "--tasks", "choice.yaml,slow.yaml", *ONE_RANK_EACH, "--time", "30", "--json")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("choice.yaml: "), "the other task waits now"
    user.cluster.run_as_root(["scontrol", "update", f"jobid={job_id}", "endtime=now"])
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == Exit.INTERRUPTED, err
    assert err.splitlines()[-1].startswith("not complete: ")
    assert err.splitlines()[-1].endswith("; 1 task scored")
    assert "Traceback" not in err
    (only,) = json.loads(out)["results"]
    assert only["metrics"] == {"acc": 1.0, "acc_norm": 1.0}
