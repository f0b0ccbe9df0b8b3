"""All ranks choose the same kernels, whatever their nodes have measured, installed or built."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.train.ranks import in_group, train_on
from tests.train.runs import make_corpus, make_run, steps_of
from zslurm.kernels import dispatch
from zslurm.kernels.cache import TABLES_VARIABLE
from zslurm.kernels.dispatch import operations
from zslurm.train.optim.stability import StepGuard
from zslurm.train.parallel.kernel_agreement import leave_out_together, share_tables

CPU = torch.device("cpu")
PRODUCT = "symmetric_product.product"


def tables_in(file: Path, use: str) -> None:
    file.write_text(json.dumps({"symmetric_product": {"product": {"gfx942": [{"use": use}]}}}))


def tables_before_and_after(group: dist.ProcessGroup, base: str) -> list[Any]:
    os.environ[TABLES_VARIABLE] = f"{base}/{dist.get_rank(group)}"
    dispatch.forget_tables()
    found = [dict(operations()[PRODUCT].table())]
    share_tables(group, CPU)
    return [*found, dict(operations()[PRODUCT].table()), dict(operations()["muon.update"].table())]


def test_every_rank_chooses_by_the_tables_of_the_first(tmp_path: Path) -> None:
    """The second has measured something else, the third nothing."""
    tables_in(tmp_path / "0", "triton")
    tables_in(tmp_path / "1", "reference")
    found = in_group(tables_before_and_after, 3, str(tmp_path))
    first = {"gfx942": [{"use": "triton"}]}
    assert [before for before, _, _ in found] == [first, {"gfx942": [{"use": "reference"}]}, {}]
    assert [after for _, after, _ in found] == [first] * 3
    assert [others for _, _, others in found] == [{}] * 3


def test_one_rank_alone_reads_its_files(tmp_path: Path) -> None:
    tables_in(tmp_path / "0", "triton")
    ((before, after, _),) = in_group(tables_before_and_after, 1, str(tmp_path))
    assert before == after == {"gfx942": [{"use": "triton"}]}


def left_out(group: dist.ProcessGroup) -> list[Any]:
    """Rank 1 finds no compiler, rank 0 alone has a package, and none has another one."""
    rank, grouped = dist.get_rank(group), operations()["grouped_gemm.multiply"]
    package = grouped.implementation("aiter")
    grouped.put(replace(package, lacks_here=lambda: None if rank == 0 else "a package"))
    leave_out_together(group, CPU)
    at_start = dict(grouped.unavailable)
    if rank == 1:
        operations()["muon.update"].leave_out("hip", "cannot start here (no compiler)")
    leave_out_together(group, CPU)
    return [at_start, *(dict(operations()[name].unavailable) for name in ("grouped_gemm.multiply", "muon.update"))]


def test_what_one_rank_cannot_start_all_leave_out() -> None:
    first, second = in_group(left_out, 2)
    assert first == [*[{"aiter": "another rank cannot start"}] * 2, {"hip": "another rank cannot start"}]
    assert second == [{}, {}, {"hip": "cannot start here (no compiler)"}]


def break_the_experts_of_the_second_rank() -> None:
    def run(*_: Any) -> Any:
        raise ImportError("built for another machine")

    if os.environ["RANK"] == "1":
        network = operations()["experts.network"]
        network.put(replace(network.implementation("cpu"), run=run))


def test_a_kernel_that_fails_on_one_rank_is_left_out_in_training(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus.h5")
    run = make_run(tmp_path / "run", corpus, steps=3, parallel={"device": "cpu"})
    done = train_on(run, 2, break_the_experts_of_the_second_rank)
    assert done.returncode == 0, done.stderr
    logged = done.stdout + done.stderr
    assert logged.count("experts.network runs without cpu, which another rank cannot start") == 1
    assert "which cannot start here (ImportError: built for another machine)" in logged
    assert len(steps_of(run)) == 3


def skip_the_first_step_and_break_the_update_of_the_second_rank() -> None:
    decide, update = StepGuard.why_skip, operations()["muon.update"]
    steps = iter(["a spike"])

    def why_skip(self: StepGuard, *numbers: float, **about: bool) -> str | None:
        return decide(self, *numbers, **about) or next(steps, None)

    StepGuard.why_skip = why_skip  # type: ignore[assignment, method-assign]

    def run(*_: Any, **__: Any) -> Any:
        raise ImportError("built for another machine")

    if os.environ["RANK"] == "1":
        update.put(replace(update.implementation("torch"), run=run))


def test_where_the_first_step_is_skipped_the_first_update_counts(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus.h5")
    run = make_run(tmp_path / "run", corpus, steps=3, parallel={"device": "cpu"})
    done = train_on(run, 2, skip_the_first_step_and_break_the_update_of_the_second_rank)
    assert done.returncode == 0, done.stderr
    logged = done.stdout + done.stderr
    assert "step 1 is skipped: a spike" in logged
    assert logged.count("muon.update runs without torch, which another rank cannot start") == 1
