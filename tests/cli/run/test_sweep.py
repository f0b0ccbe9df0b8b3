"""`zslurm submit --sweep` against a Slurm in scripts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Shell
from tests.submit.scripted_slurm import BAD_TIME, NO_CONTROLLER, ScriptedSlurm
from zslurm.core.errors import Exit

CLUSTER = {"name": "local", "launcher": "slurm"}
LR = "phases[0].lr=1e-3,2e-3,3e-3"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """Gives job ids 101, 102, ...; keeps each script as submitted.ID."""
    scripted = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    gives(scripted)
    return scripted


def gives(slurm: ScriptedSlurm, refuse: str = "", words: str = BAD_TIME) -> None:
    """sbatch accepts, but not the script that has `refuse` in it."""
    place = slurm.directory
    (place / "count").write_text("100")
    slurm.write_program(
        "sbatch",
        f'text=$(cat "$1"); n=$(( $(cat {place}/count) + 1 ))\n'
        f'case "$text" in *"{refuse or "no such text"}"*) printf %s {shlex.quote(words)} >&2; exit 1;; esac\n'
        f'echo $n > {place}/count; echo "$text" > {place}/submitted.$n; echo Submitted batch job $n',
    )


def submitted(slurm: ScriptedSlurm, job_id: str) -> str:
    return (slurm.directory / f"submitted.{job_id}").read_text()


def found(shell: Shell, *arguments: str) -> list[dict[str, Any]]:
    done = shell.zslurm("submit", "run.yaml", *arguments, "--json")
    return list(json.loads(done.stdout))


def test_each_member_is_a_run_of_its_own(shell: Shell, slurm: ScriptedSlurm) -> None:
    shell.write_run(cluster=CLUSTER)
    rows = found(shell, "--sweep", LR)
    assert [(row["run"], row["job_id"], row["error"]) for row in rows] == [
        ("tiny-lr1e-3", "101", None),
        ("tiny-lr2e-3", "102", None),
        ("tiny-lr3e-3", "103", None),
    ]
    for row, lr in zip(rows, (1e-3, 2e-3, 3e-3), strict=True):
        config = json.loads((Path(row["run_dir"]) / "config.json").read_text())
        assert (config["phases"][0]["lr"], config["run"]["name"]) == (lr, row["run"])
        assert row["values"] == {"phases[0].lr": f"{lr * 1000:.0f}e-3"}


def test_the_table_has_a_column_for_each_key_and_quiet_prints_ids(shell: Shell, slurm: ScriptedSlurm) -> None:
    shell.write_run(cluster=CLUSTER)
    done = shell.zslurm("submit", "run.yaml", "--sweep", "phases[0].lr=1e-3", "--sweep", "run.seed=1,2")
    assert done.stdout.splitlines() == [
        "run\tjob\tphases[0].lr\trun.seed\terror",
        "tiny-lr1e-3-seed1\t101\t1e-3\t1\t",
        "tiny-lr1e-3-seed2\t102\t1e-3\t2\t",
    ]
    quiet = shell.zslurm("submit", "run.yaml", "--sweep", "run.seed=7,8", "--quiet")
    assert quiet.stdout == "103\n104\n"


def test_a_member_that_fails_is_named_and_the_others_are_submitted(shell: Shell, slurm: ScriptedSlurm) -> None:
    shell.write_run(cluster=CLUSTER)
    gives(slurm, refuse="job-name=tiny-lr2e-3")
    done = shell.zslurm("submit", "run.yaml", "--sweep", LR)
    assert done.code == Exit.FAILED
    assert [line.split("\t")[1] for line in done.stdout.splitlines()] == ["job", "101", "-", "102"]
    assert done.stderr == (
        "zslurm: 1 of 3 members was not submitted: tiny-lr2e-3: sbatch refused the job: "
        "Invalid --time specification\n"
    )


def test_without_an_answer_the_rest_is_not_tried(shell: Shell, slurm: ScriptedSlurm) -> None:
    shell.write_run(cluster=CLUSTER)
    gives(slurm, refuse="job-name=tiny-lr2e-3", words=NO_CONTROLLER)
    rows = found(shell, "--sweep", LR)
    assert [row["job_id"] for row in rows] == ["101", None, None]
    assert rows[2]["error"] == "not tried: Slurm does not answer"


def test_a_member_that_is_not_valid_keeps_all_back(shell: Shell, slurm: ScriptedSlurm) -> None:
    shell.write_run(cluster=CLUSTER)
    code, line = shell.fails("submit", "run.yaml", "--sweep", "model.layers=2,two")
    assert code == Exit.USAGE
    assert "model.layers" in line
    assert not list(slurm.directory.glob("submitted.*"))


def test_members_wait_for_those_ahead_where_few_may_run_at_once(shell: Shell, slurm: ScriptedSlurm) -> None:
    shell.write_run(cluster=CLUSTER)
    found(shell, "--sweep", "run.seed=1,2,3,4,5", "--max-concurrent", "2", "--dependency", "afterany:9")
    waits = [
        next(line for line in submitted(slurm, str(job)).splitlines() if "--dependency" in line).partition("=")[2]
        for job in range(101, 106)
    ]
    assert waits == [
        *("afterany:9", "afterany:9"),
        *("afterany:9,afterany:101", "afterany:9,afterany:102", "afterany:9,afterany:103"),
    ]


def test_a_dry_run_submits_none(shell: Shell, slurm: ScriptedSlurm) -> None:
    shell.write_run(cluster=CLUSTER)
    rows = found(shell, "--sweep", LR, "--dry-run")
    assert [row["job_id"] for row in rows] == [None, None, None]
    assert not list(slurm.directory.glob("submitted.*"))
    assert not (shell.directory / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sweep", LR, "--wait"), "--wait follows one run"),
        (("--max-concurrent", "2"), "--max-concurrent limits a sweep"),
        (
            ("--sweep", LR, "--max-concurrent", "2", "--cluster", "local"),
            "--max-concurrent: only jobs of Slurm",
        ),
        (("--sweep-file", "nonesuch"), "nonesuch: cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused(
    shell: Shell, slurm: ScriptedSlurm, arguments: tuple[str, ...], message: str
) -> None:
    shell.write_run(cluster={"name": "local"} if "local" in arguments else CLUSTER)
    code, line = shell.fails("submit", "run.yaml", *arguments)
    assert code == Exit.USAGE
    assert message in line
