"""Straggler and hang detection need to know when a rank waits for its peers, and the time of its own work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import make_corpus, make_run
from zslurm.train.config import load_train_config
from zslurm.train.jsonl import read_jsonl
from zslurm.train.parallel.world import open_world
from zslurm.train.progress import ProgressWriter
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest

STEPS, MICROBATCHES = 4, 3


def test_each_step_reports_when_it_waits_and_the_time_of_its_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(ProgressWriter, "update", lambda self, **given: seen.append(given))
    run = make_run(tmp_path / "run", make_corpus(tmp_path / "tokens.h5"), steps=STEPS)
    config = load_train_config(run / "config.json")
    with open_world(config.parallel) as world:
        open_trainer(run, config, world, StopRequest()).run()

    updates = [("waits", 0) if given.get("waiting") else ("step", given["step"]) for given in seen if
             given.get("waiting") or "step" in given]  # fmt: skip
    assert updates == [update for step in range(1, STEPS + 1) for update in (("waits", 0), ("step", step))]
    works = [given["work_ns"] for given in seen if "step" in given]
    assert works[0] == 0, "a step is counted when the next one is done"
    assert works == sorted(set(works))
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "step"]
    own = [sum(row["time_split_s"][part] for part in ("data", "forward", "backward")) for row in rows]
    assert works[-1] / 1e9 == pytest.approx(sum(own[: STEPS - 1]) / MICROBATCHES, rel=1e-6)
