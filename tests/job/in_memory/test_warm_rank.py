from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import forked
from tests.checkout import TESTS
from tests.train.runs import clean_environment, make_corpus, make_run
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.files import read_json
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.run.run_dir import RunDir
from zslurm.train.recovery.generation import Generation


def forking(**variables: str) -> dict[str, str]:
    """The environment of processes that need not wait for torch; those of tests/faults are started as users do."""
    modules = [*forked.RANKS, *forked.BESIDE_RANKS]
    return forked.environment(forked.server(torch=True), modules, clean_environment() | variables, customized=True)


def start(module: str, run: RunDir, member: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = forking(ZSLURM_RECOVERY="memory", ZSLURM_MEMBER=member, **variables)
    attempt = run.attempt(1)
    with (attempt.logs / f"{member.replace('/', '-')}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(run.path), "1"], env=environment, stdout=log, stderr=log
        )


STEPS = 10


def test_a_warm_process_takes_the_place_of_a_killed_rank_0_in_a_real_run(tmp_path: Path) -> None:
    """Rank 0 kills itself in its sixth step; ranks wait before that until there is a process in its place."""
    path = make_run(tmp_path / "run", make_corpus(tmp_path / "corpus.h5"), steps=STEPS)
    plan = {"pace_s": 0, "hold": 5, "faults": [{"what": "kill_in_all_gather", "rank": 0, "step": 6}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    hook = {"PYTHONPATH": str(TESTS / "faults" / "in_ranks"), "ZSLURM_TEST_FAULTS": str(tmp_path)}
    run = RunDir(path)
    attempt = run.attempt(1)
    for folder in (attempt.ranks, attempt.logs, run.checkpoints):
        folder.mkdir(parents=True)
    server = StoreClient.start([sys.executable], host="127.0.0.1", attempt=attempt, environ=forking())
    ranks = [
        start(
            "zslurm.job.rank", run, f"here/{rank}",
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", **hook,
        )
        for rank in range(2)
    ]  # fmt: skip
    warm = start("zslurm.job.in_memory.warm_rank", run, "here/w0")
    events: list[dict[str, Any]] = []

    def event(kind: str) -> dict[str, Any] | None:
        events.extend(server.poll())
        return next((each for each in events if each["event"] == kind), None)

    try:
        assert wait_for(lambda: event("warm"), "the warm process") == {"event": "warm", "member": "here/w0"}
        (tmp_path / "go").touch()
        assert ranks[0].wait(DEADLINE_S) == -signal.SIGKILL
        server.generation(Generation(1, ("here/w0", "here/1"), lost=(0,), deadline_s=DEADLINE_S))
        wait_for(lambda: event("recovered") or event("failed"), "the outcome")
        assert event("failed") is None
        assert (ranks[1].wait(300), warm.wait(300)) == (0, 0), attempt.rank_log(0).read_text()
    finally:
        for process in (*ranks, warm):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        server.stop()
    assert "here/w0 takes the place of rank 0" in (attempt.logs / "here-w0.log").read_text()
    assert f"completed {STEPS} steps" in attempt.rank_log(0).read_text(), "it writes to the rank's log"
    ended = read_json(attempt.rank_end(0))
    assert ended is not None
    assert (ended["exit_code"], ended["step"]) == (0, STEPS)


def test_a_warm_process_ends_in_order_when_its_store_is_gone(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", make_corpus(tmp_path / "corpus.h5"))
    run = RunDir(path)
    attempt = run.attempt(1)
    attempt.logs.mkdir(parents=True)
    server = StoreClient.start([sys.executable], host="127.0.0.1", attempt=attempt, environ=forking())
    warm = start("zslurm.job.in_memory.warm_rank", run, "here/w0")
    wait_for(lambda: any(each["event"] == "warm" for each in server.poll()), "the warm process")
    server.stop()
    assert warm.wait(120) == 0
    assert "there is no place to take" in (attempt.logs / "here-w0.log").read_text()
