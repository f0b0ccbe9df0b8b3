"""Training, stopping, resuming: real processes; the run that others are compared with is torchrun's."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.train.ranks import asked_to_stop, forked, train_on
from tests.train.runs import (
    STEP_TOKENS,
    losses_of,
    make_corpus,
    make_run,
    steps_of,
    torchrun,
    train_alone,
)
from zslurm.checkpoint_tools import list_checkpoints
from zslurm.train.main import main
from zslurm.train.stop import Ending


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Six steps on two ranks without interruption, saved after steps 3 and 6."""
    run = make_run(tmp_path_factory.mktemp("runs") / "whole", corpus, steps=6)
    done = torchrun(run, ranks=2)
    assert done.returncode == 0, done.stderr
    return run


def _resumed_from_step_3(finished: Path, target: Path) -> Path:
    """A copy of the run as it was after step 3."""
    shutil.copytree(finished, target)
    shutil.rmtree(target / "checkpoints" / "step-00000006")
    (target / "metrics.jsonl").unlink()
    return target


def test_metrics_tell_every_step(finished: Path) -> None:
    rows = steps_of(finished)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["tokens"] for row in rows] == [STEP_TOKENS * step for step in range(1, 7)]
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["tokens_per_s"] > 0
        assert row["step_time_s"] > 0
        assert 0 <= row["skip_share"] <= 1
        assert 0 <= row["load_entropy"] <= 1
    assert [row["lr"] for row in rows[:2]] == [1.5e-3, 3e-3]
    assert rows[-1]["lr"] == pytest.approx(3e-4)


def test_the_loss_falls(tmp_path: Path, corpus: Path) -> None:
    run = make_run(
        tmp_path / "run", corpus, steps=60, phase={"lr": 1e-2, "micro_batch": 6}, checkpoint={"every_steps": 100}
    )
    assert train_on(run, ranks=1).returncode == 0
    losses = losses_of(run)
    assert losses[0] == pytest.approx(4.16, abs=0.1), "an untrained model is uniform: ln 64 = 4.16"
    assert losses[-1] < losses[0] - 1.0


def test_resume_is_bit_exact(finished: Path, tmp_path: Path) -> None:
    """Losses, weights, moments, balancing state and RNG after a resume equal the uninterrupted run's bits."""
    resumed = _resumed_from_step_3(finished, tmp_path / "resumed")
    done = train_on(resumed, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "resuming tiny from step-00000003" in done.stdout
    assert losses_of(resumed) == losses_of(finished)[3:]
    for shard in sorted((finished / "checkpoints" / "step-00000006").glob("shard-*.safetensors")):
        again = resumed / "checkpoints" / "step-00000006" / shard.name
        assert again.read_bytes() == shard.read_bytes(), shard.name


def test_a_checkpoint_of_two_ranks_continues_on_three_and_on_one(finished: Path, tmp_path: Path) -> None:
    whole = losses_of(finished)[3:]
    on_three = _resumed_from_step_3(finished, tmp_path / "three")
    assert train_on(on_three, ranks=3).returncode == 0
    on_one = _resumed_from_step_3(finished, tmp_path / "one")
    assert train_on(on_one, ranks=1).returncode == 0
    for other in (on_three, on_one):
        # The first loss comes from equal weights and sequences; only the order of sums differs.
        assert losses_of(other)[0] == pytest.approx(whole[0], rel=1e-5)
        assert losses_of(other) == pytest.approx(whole, rel=1e-3)
        newest = list_checkpoints(other / "checkpoints")[0]
        assert newest.step == 6


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Six steps on one rank, started as `python -m zslurm.train`."""
    run = make_run(tmp_path_factory.mktemp("runs") / "alone", corpus, steps=6)
    assert train_alone(run).returncode == 0
    return run


def test_the_number_of_ranks_does_not_change_the_first_steps(finished: Path, alone: Path) -> None:
    assert losses_of(alone)[:3] == pytest.approx(losses_of(finished)[:3], rel=1e-5)


def test_the_size_of_a_microbatch_does_not_change_the_first_steps(
    finished: Path, tmp_path: Path, corpus: Path
) -> None:
    run = make_run(tmp_path / "three-at-once", corpus, steps=6, phase={"micro_batch": 3})
    assert train_on(run, ranks=1).returncode == 0
    assert losses_of(run)[:3] == pytest.approx(losses_of(finished)[:3], rel=1e-5)


def test_more_ranks_than_microbatches_work(tmp_path: Path, corpus: Path) -> None:
    """One rank has nothing to compute, and still takes its part in every collective."""
    phase = {"micro_batch": 3, "global_batch": 6}
    run = make_run(tmp_path / "run", corpus, steps=2, phase=phase)
    done = train_on(run, ranks=3)
    assert done.returncode == 0, done.stderr
    assert len(losses_of(run)) == 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_asked_to_stop_it_saves_and_continues_bit_exactly(
    alone: Path, tmp_path: Path, corpus: Path, signum: signal.Signals
) -> None:
    run = make_run(tmp_path / "stopped", corpus, steps=6, checkpoint={"every_steps": 1000})
    assert train_on(run, 1, partial(asked_to_stop, signum, 4)).returncode == Ending.INTERRUPTED
    assert len(losses_of(run)) == 4, "the step is finished"
    assert list_checkpoints(run / "checkpoints")[0].step == 4
    assert train_on(run, ranks=1).returncode == 0
    assert losses_of(run) == losses_of(alone)
    assert {row["attempt"] for row in steps_of(run)} == {1, 2}


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(finished, run)
    (run / "metrics.jsonl").unlink()
    shard = run / "checkpoints" / "step-00000006" / "shard-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x10
    shard.write_bytes(content)
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "step-00000006 is passed over" in done.stdout
    assert "shard-00001-of-00002.safetensors" in done.stdout
    assert losses_of(run) == losses_of(finished)[3:]


def test_only_damaged_checkpoints_stop_the_run_instead_of_starting_over(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "ruined"
    shutil.copytree(finished, run)
    for shard in run.glob("checkpoints/*/shard-00000-of-00002.safetensors"):
        content = bytearray(shard.read_bytes())
        content[-100] ^= 1
        shard.write_bytes(content)
    done = train_on(run, ranks=1)
    assert done.returncode == 1
    assert "none of its 2 checkpoints can be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_of_another_model_is_refused(finished: Path, tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "other", corpus, model={"layers": 3})
    shutil.copytree(finished / "checkpoints", run / "checkpoints")
    done = train_on(run, ranks=1)
    assert done.returncode == 2
    assert "model.layers is 3, the weights have 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_tokenizer_is_refused(finished: Path, tmp_path: Path) -> None:
    other = make_corpus(tmp_path / "other.h5", tokenizer="b" * 64)
    run = make_run(tmp_path / "run", other)
    shutil.copytree(finished / "checkpoints", run / "checkpoints")
    done = train_on(run, ranks=1)
    assert done.returncode == 2
    assert "another tokenizer" in done.stderr


def test_a_diverged_run_stops_before_it_spoils_a_checkpoint(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=30, phase={"lr": 1e18, "warmup_steps": 0})
    done = train_on(run, ranks=1)
    assert done.returncode == 1
    assert "not finite" in done.stderr
    assert "Traceback" not in done.stderr


def test_bf16_trains_and_keeps_fp32_masters(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=6, parallel={"dtype": "bf16"})
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    whole = losses_of(run)
    assert whole[-1] < whole[0]
    resumed = _resumed_from_step_3(run, tmp_path / "resumed")
    assert train_on(resumed, ranks=2).returncode == 0
    assert losses_of(resumed) == whole[3:]


def test_phases_follow_each_other(tmp_path: Path, corpus: Path) -> None:
    import json

    run = make_run(tmp_path / "run", corpus, steps=2, phase={"micro_batch": 1})
    config = json.loads((run / "config.json").read_text())
    longer = config["phases"][0] | {"name": "long", "context": 32, "global_batch": 3, "rope_base": 1e6, "lr": 1e-3}
    config["phases"] = [config["phases"][0] | {"name": "short"}, longer]
    (run / "config.json").write_text(json.dumps(config))
    assert train_on(run, ranks=1).returncode == 0
    assert [row["phase"] for row in steps_of(run)] == ["short", "short", "long", "long"]
    assert steps_of(run)[-1]["tokens"] == 4 * STEP_TOKENS


@pytest.mark.parametrize("arguments", [[], ["--help"], ["one", "two"]])
def test_wrong_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("usage: python -m zslurm.train RUN_DIR")
    assert len(message.splitlines()) == 1


def refused(directory: Path, errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(main([str(directory)]))


def test_a_directory_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    assert forked(refused, tmp_path / "nowhere", errors) == 2
    assert errors.read_text() == (
        f"error: {tmp_path}/nowhere/config.json: no such file; a run directory holds config.json\n"
    )
