"""Mixtures, reading ahead and masked targets in real runs: what the losses must say of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.train.ranks import train_on
from tests.train.runs import VOCAB, losses_of, make_corpus, make_run, steps_of
from zslurm.checkpoint_tools import Checkpoint, list_checkpoints
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import BundleHeader
from zslurm.train.jsonl import read_jsonl

CONTEXT = 16
HEADER = BundleHeader(VOCAB, "a" * 64, 1, "tests")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("data")
    return {
        "web": str(make_corpus(directory / "web.h5", 4000)),
        "code": str(make_corpus(directory / "code.h5", 700)),
    }


def mixed_run(directory: Path, sources: dict[str, str], *mixes: dict[str, float], **data: Any) -> Path:
    """A run of one phase of three steps for each mix, saved after every third step."""
    run = make_run(directory, Path("-"), steps=3, data={"sources": sources, **data})
    config = json.loads((run / "config.json").read_text())
    config["phases"] = [config["phases"][0] | {"name": f"phase {i}", "mix": mix} for i, mix in enumerate(mixes)]
    (run / "config.json").write_text(json.dumps(config))
    return run


MIXES = ({"web": 1, "code": 1}, {"web": 1}, {"web": 1, "code": 3})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, str]) -> Path:
    run = mixed_run(tmp_path_factory.mktemp("runs") / "mixed", sources, *MIXES)
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    return run


def resumed_from(finished: Path, step: int, target: Path) -> Path:
    shutil.copytree(finished, target)
    for saved in list_checkpoints(target / "checkpoints"):
        if saved.step > step:
            shutil.rmtree(saved.path)
    (target / "metrics.jsonl").unlink()
    return target


@pytest.mark.parametrize("prefetch", [0, 7])
def test_reading_ahead_changes_no_bit(
    finished: Path, tmp_path: Path, sources: dict[str, str], prefetch: int
) -> None:
    run = mixed_run(tmp_path / "run", sources, *MIXES, prefetch=prefetch)
    assert train_on(run, ranks=2).returncode == 0
    assert losses_of(run) == losses_of(finished)


@pytest.mark.parametrize("step", [3, 6])
def test_a_mixed_run_resumes_bit_exactly(finished: Path, tmp_path: Path, step: int) -> None:
    run = resumed_from(finished, step, tmp_path / "run")
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "note:" not in done.stdout
    assert losses_of(run) == losses_of(finished)[step:]


def test_a_checkpoint_records_what_was_taken_of_each_source(finished: Path) -> None:
    with Checkpoint.open(list_checkpoints(finished / "checkpoints")[0].path) as checkpoint:
        cursor = checkpoint.manifest.cursor
    assert set(cursor["sources"]) == {"code", "web"}
    (counts,) = cursor["sequences"].values()
    assert sum(counts.values()) == 9 * 6
    assert counts["code"] > 6


def test_tokens_and_epochs_of_each_source_are_recorded(finished: Path) -> None:
    rows = [row for row in read_jsonl(finished / "metrics.jsonl") if row["kind"] == "sources"]
    last = rows[-1]
    assert last["step"] == 9, "the last step always"
    with Checkpoint.open(list_checkpoints(finished / "checkpoints")[0].path) as checkpoint:
        (counts,) = checkpoint.manifest.cursor["sequences"].values()
    sizes = {"web": 3999 // CONTEXT, "code": 699 // CONTEXT}
    assert last["sources"] == {
        name: {"tokens": count * CONTEXT, "epochs": round(count / sizes[name], 6)}
        for name, count in counts.items()
    }


def test_a_source_that_would_be_repeated_too_often_is_refused(tmp_path: Path, sources: dict[str, str]) -> None:
    run = mixed_run(tmp_path / "run", sources, {"code": 1}, {"code": 1}, {"code": 1}, max_epochs=1)
    done = train_on(run, ranks=1)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: data.sources.code: the run takes 1.26 epochs of it, more than data.max_epo"
    )
    assert "Traceback" not in done.stderr


def test_a_run_whose_mix_or_data_changed_reports_it(
    finished: Path, tmp_path: Path, sources: dict[str, str]
) -> None:
    run = resumed_from(finished, 3, tmp_path / "mix")
    change(run, lambda config: config["phases"][0].update(mix={"web": 1}))
    done = train_on(run, ranks=1)
    assert done.returncode == 2
    assert done.stderr.startswith("error: phases[].mix or packing: the 3 steps that are done took ")
    assert "Traceback" not in done.stderr

    run = resumed_from(finished, 3, tmp_path / "data")
    other = str(make_corpus(tmp_path / "other.h5", 900))
    change(run, lambda config: config["data"]["sources"].update(code=other))
    done = train_on(run, ranks=1)
    assert done.returncode == 0, done.stderr
    assert f"note: {other} is not the data that the checkpoint was trained on" in done.stdout


def change(run: Path, edit: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    edit(config)
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"wbe": 1}, "phases[0].mix.wbe: is not in data.sources; did you mean `web`?"),
        ({"web": 1, "code": 1e-9}, "phases[0].mix: code has less than one sequence in 1,048,576"),
    ],
)
def test_a_mix_that_cannot_be_is_one_line(
    tmp_path: Path, sources: dict[str, str], mix: dict[str, float], message: str
) -> None:
    done = train_on(mixed_run(tmp_path / "run", sources, mix), ranks=1)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_damage_that_the_thread_finds_stops_the_run_with_one_line(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    with h5py.File(corpus, "r+") as file:
        file["tokens"][:] = VOCAB
    done = train_on(make_run(tmp_path / "run", corpus), ranks=2)
    assert done.returncode == 2
    assert f"has id {VOCAB}, but the vocabulary has {VOCAB} entries: the file is damaged" in done.stderr
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------- masked targets


def stream(sequences: int) -> np.ndarray:
    return 2 + np.random.default_rng(5).integers(0, VOCAB - 2, sequences * CONTEXT + 1)


def write(path: Path, tokens: np.ndarray, targets: np.ndarray | None = None) -> Path:
    with BundleWriter(path, HEADER, masked=targets is not None) as writer:
        writer.append(tokens, targets)
    return path


def one_step(directory: Path, corpus: Path, sequences: int, ranks: int = 1) -> dict[str, Any]:
    """The step line of a run whose only step trains on the whole corpus."""
    phase = {"tokens": sequences * CONTEXT, "global_batch": sequences, "warmup_steps": 0}
    run = make_run(directory, corpus, steps=1, phase=phase)
    done = train_on(run, ranks)
    assert done.returncode == 0, done.stderr
    return steps_of(run)[0]


def test_masked_targets_weigh_nothing_and_the_others_as_much_as_alone(tmp_path: Path) -> None:
    """Six sequences with the targets of four masked are, to loss and gradient, the two others."""
    tokens = stream(6)
    counted = (np.arange(len(tokens)) <= 2 * CONTEXT).astype(np.uint8)
    alone = one_step(tmp_path / "two", write(tmp_path / "two.h5", tokens[: 2 * CONTEXT + 1]), 2)
    masked = write(tmp_path / "six.h5", tokens, counted)
    for ranks in (1, 3):
        among = one_step(tmp_path / f"six-{ranks}", masked, 6, ranks)
        assert among["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert among["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def test_a_mask_that_masks_nothing_changes_no_bit(tmp_path: Path) -> None:
    tokens = stream(6)
    plain = one_step(tmp_path / "plain", write(tmp_path / "plain.h5", tokens), 6)
    ones = one_step(tmp_path / "ones", write(tmp_path / "ones.h5", tokens, np.ones_like(tokens)), 6)
    assert (ones["loss"], ones["grad_norm"]) == (plain["loss"], plain["grad_norm"])


def test_a_step_without_a_target_that_counts_is_survived(tmp_path: Path) -> None:
    tokens = stream(6)
    nothing = one_step(tmp_path / "none", write(tmp_path / "none.h5", tokens, np.zeros_like(tokens)), 6)
    assert (nothing["loss"], nothing["grad_norm"]) == (0, 0)
