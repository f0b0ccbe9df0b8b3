"""`zslurm audit`: the chain of a run's checkpoints, and steps that are computed again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.cli.commands import Zslurm


def test_a_run_is_one_chain_and_a_step_computes_as_it_did(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    shown = zslurm.ok("audit", "first")
    assert shown.stdout.splitlines() == ["step 40: saved, by 1 rank", "step 80: saved, by 1 rank"]
    assert "one chain of 2 checkpoints, from step 40 to 80" in shown.stderr
    links = zslurm.ok("audit", "first", "--json").json["links"]
    assert [link["previous"] is None for link in links] == [True, False]

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    repeated = zslurm.ok("audit", copy / "checkpoints", "--recompute", "80")
    assert "step 80: computed again from step 40, 40 steps and the weights bit for bit" in repeated.stderr

    lines = (copy / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if row["kind"] == "step" and row["step"] == 42:
            row["grad_norm"] *= 1 + 1e-9
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    differs = zslurm("audit", copy / "checkpoints", "--recompute", "43")
    assert differs.code == 5
    assert "step 42: grad_norm was " in differs.stderr
    first = zslurm.ok("audit", copy / "checkpoints", "--recompute", "3")
    assert "step 3: computed again from step 0, 3 steps bit for bit" in first.stderr
    unknown = zslurm("audit", copy / "checkpoints", "--recompute", "81")
    assert unknown.code == 2
    assert "--recompute 81: needs a checkpoint before the step" in unknown.stderr


def test_a_gap_is_named(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    shutil.rmtree(root / "step-00000040")
    assert zslurm.ok("audit", root).stdout.splitlines()[0] == "step 40: deleted, by 1 rank"
    lines = (root.parent / "chain.jsonl").read_text().splitlines()
    (root.parent / "chain.jsonl").write_text(lines[1] + "\n")
    done = zslurm("audit", root)
    assert done.code == 5
    assert "step 80: the link before it, " in done.stderr
    assert "is not recorded" in done.stderr
