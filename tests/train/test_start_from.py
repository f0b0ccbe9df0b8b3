"""Starting a run from the weights of another checkpoint: imported from a published folder, or another run's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.train.hub.models import MemoryWeights, random_weights
from tests.train.runs import MODEL, losses_of, make_corpus, make_run, torchrun, train_alone
from train.config import ModelConfig
from train.hub import export, import_weights, open_weights

CONFIG = ModelConfig(**MODEL, skip_rule="zero")
ZERO = {"skip_rule": "zero"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of 20 steps at a learning rate at which it learns."""
    run = make_run(tmp_path_factory.mktemp("runs") / "long", corpus, steps=20, model=ZERO, phase={"lr": 1e-2})
    assert torchrun(run, ranks=2).returncode == 0
    return run


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    """The finished run's weights, exported for transformers and imported again."""
    work = tmp_path_factory.mktemp("interop")
    with open_weights(finished / "checkpoints" / "step-00000020") as weights:
        export(weights, work / "hf", dtype="fp32")
    with open_weights(work / "hf") as weights:
        return import_weights(weights, work / "checkpoints", max_shard_bytes=20_000).path


def test_a_run_starts_from_imported_weights_on_any_number_of_ranks(
    tmp_path: Path, corpus: Path, finished: Path, imported: Path
) -> None:
    first_losses = []
    for ranks in (1, 2):
        run = make_run(
            tmp_path / f"on-{ranks}", corpus, steps=2, model=ZERO, checkpoint={"start_from": str(imported)}
        )
        done = torchrun(run, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert "from the weights of" in done.stdout
        first_losses.append(losses_of(run)[0])
    assert first_losses[0] == pytest.approx(first_losses[1], rel=1e-5)
    assert first_losses[0] < losses_of(finished)[0] - 0.5, "it knows what the other run has learnt"


def test_another_runs_checkpoint_serves_as_well(
    tmp_path: Path, corpus: Path, finished: Path, imported: Path
) -> None:
    """The weights are the same, so the first loss is, to the last bit."""
    losses = []
    for number, source in enumerate((finished / "checkpoints" / "step-00000020", imported)):
        run = make_run(tmp_path / str(number), corpus, steps=2, model=ZERO, checkpoint={"start_from": str(source)})
        assert train_alone(run).returncode == 0
        losses.append(losses_of(run)[0])
    assert losses[0] == losses[1]


def test_a_run_that_has_checkpoints_resumes_them(tmp_path: Path, corpus: Path, imported: Path) -> None:
    run = make_run(tmp_path / "run", corpus, steps=6, model=ZERO, checkpoint={"start_from": str(imported)})
    assert train_alone(run).returncode == 0
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    done = train_alone(run)
    assert done.returncode == 0
    assert "resuming tiny from step-00000003" in done.stdout


def test_imported_weights_among_a_runs_own_checkpoints_are_used_only_when_asked(
    tmp_path: Path, corpus: Path, imported: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2, model=ZERO)
    own = run / "checkpoints" / imported.name
    shutil.copytree(imported, own)
    done = train_alone(run)
    assert done.returncode == 1
    assert "weights only" in done.stdout
    assert "checkpoint.start_from" in done.stdout
    assert "Traceback" not in done.stderr
    make_run(run, corpus, steps=2, model=ZERO, checkpoint={"start_from": str(own)})
    done = train_alone(run)
    assert done.returncode == 0, done.stderr
    assert "from the weights of" in done.stdout


@pytest.mark.parametrize(
    ("model", "source", "told"),
    [({"layers": 3}, None, "model.layers is 3"), ({}, None, "model.skip_rule"), (ZERO, "/nowhere", "start_from")],
    ids=["another size", "another skip rule", "nothing there"],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, corpus: Path, imported: Path, model: dict[str, object], source: str | None, told: str
) -> None:
    run = make_run(tmp_path / "run", corpus, model=model, checkpoint={"start_from": source or str(imported)})
    done = train_alone(run)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_data_of_another_tokenizer_than_the_imported_ones_are_refused(tmp_path: Path, corpus: Path) -> None:
    weights = MemoryWeights(CONFIG, random_weights(CONFIG))
    path = import_weights(weights, tmp_path / "checkpoints").path
    manifest = (path / "manifest.json").read_bytes()
    from checkpoint_tools import manifest_json

    decoded = manifest_json.decode(manifest, path)
    decoded.state["weights_only"]["tokenizer_sha256"] = "b" * 64  # type: ignore[index]
    (path / "manifest.json").write_bytes(manifest_json.encode(decoded))
    run = make_run(tmp_path / "run", corpus, model=ZERO, checkpoint={"start_from": str(path)})
    done = train_alone(run)
    assert done.returncode == 2
    assert "another tokenizer" in done.stderr


def test_weights_of_a_run_have_the_facts_of_the_phase_that_they_were_saved_in(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, steps=3)
    config = json.loads((run / "config.json").read_text())
    longer = config["phases"][0] | {"context": 32, "global_batch": 3, "rope_base": 1e6, "lr": 1e-3}
    config["phases"] = [config["phases"][0], longer]
    (run / "config.json").write_text(json.dumps(config))
    assert train_alone(run).returncode == 0
    for step, base, context in ((3, 1e4, 16), (6, 1e6, 32)):
        with open_weights(run / "checkpoints" / f"step-{step:08d}") as weights:
            assert (weights.settings.rope_base, weights.settings.context) == (base, context)
            assert weights.settings.dtype == "fp32"
            values = np.empty(8, np.float32)
            weights.read("embedding.weight", 5, values)
            assert np.isfinite(values).all()
