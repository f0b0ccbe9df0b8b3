"""Weights that a new run starts from: a published folder, an imported checkpoint, or another run's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.hub.fake import ManyWeights
from tests.train.hub.models import MemoryWeights, random_weights
from tests.train.ranks import train_on
from tests.train.runs import MODEL, losses_of, make_corpus, make_run
from zslurm.checkpoint_tools import Checkpoint, partition
from zslurm.train.checkpointing.init_weights import open_init
from zslurm.train.checkpointing.load_weights import load_extents
from zslurm.train.config import ModelConfig
from zslurm.train.data.build.tokenizer import file_sha256
from zslurm.train.errors import ConfigError
from zslurm.train.hub import export, import_weights, open_weights
from zslurm.train.hub.folder import BUFFER_ELEMENTS
from zslurm.train.shapes import tensor_table

CONFIG = ModelConfig(**MODEL, skip_rule="zero")
ZERO = {"skip_rule": "zero"}
TOKENIZER = "a" * 64  # of make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of 20 steps at a learning rate at which it learns."""
    run = make_run(tmp_path_factory.mktemp("runs") / "long", corpus, steps=20, model=ZERO, phase={"lr": 1e-2})
    done = train_on(run, ranks=2)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    """The finished run's weights for transformers."""
    path = tmp_path_factory.mktemp("interop") / "hf"
    with open_weights(newest(finished)) as weights:
        export(weights, path, dtype="fp32")
    return path


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The same, imported again."""
    with open_weights(folder) as weights:
        root = tmp_path_factory.mktemp("imported") / "checkpoints"
        return import_weights(weights, root, max_shard_bytes=20_000).path


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000020"


def started(directory: Path, corpus: Path, init: str, *, ranks: int = 1, steps: int = 2) -> Path:
    """A run that was trained from weights."""
    run = make_run(directory, corpus, steps=steps, model=ZERO, init=init)
    done = train_on(run, ranks)
    assert done.returncode == 0, done.stderr
    assert f"from the weights of {init}" in done.stdout
    return run


def test_a_folder_a_checkpoint_and_an_imported_one_start_a_run_alike(
    tmp_path: Path, corpus: Path, finished: Path, folder: Path, imported: Path
) -> None:
    """The weights are the same, so the losses are, to the last bit."""
    sources = (f"hf:{folder}", f"ckpt:{newest(finished)}", f"ckpt:{imported}")
    losses = [losses_of(started(tmp_path / str(i), corpus, init)) for i, init in enumerate(sources)]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] < losses_of(finished)[0] - 0.5, "it knows what the other run has learnt"


def test_any_number_of_ranks_starts_from_them(tmp_path: Path, corpus: Path, folder: Path) -> None:
    first = [losses_of(started(tmp_path / str(n), corpus, f"hf:{folder}", ranks=n))[0] for n in (1, 3)]
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def test_balancing_biases_come_along_and_nothing_else_does(
    tmp_path: Path, corpus: Path, finished: Path, folder: Path
) -> None:
    still = {"balance_lr": 0.0}
    run = make_run(tmp_path / "run", corpus, steps=2, model=ZERO, init=f"hf:{folder}", optim=still)
    assert train_on(run, 2).returncode == 0
    with (
        Checkpoint.open(newest(finished)) as theirs,
        Checkpoint.open(run / "checkpoints" / "step-00000002") as ours,
    ):
        bias = ours.read_buffer("balance/bias")
        assert np.array_equal(bias, theirs.read_buffer("balance/bias"))
        assert np.abs(bias[:, :-1]).max() > 0, "the other run has moved them"
        assert ours.manifest.state["optimizer_steps"] == ours.manifest.state["balance_steps"] == 2
        assert ours.manifest.tokens < theirs.manifest.tokens


class Listening(ManyWeights):
    """Remembers what is read of it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.ranges: list[tuple[str, int, int]] = []

    def read(self, tensor: str, start: int, out: np.ndarray) -> None:
        self.ranges.append((tensor, start, start + out.size))
        super().read(tensor, start, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_reads_what_it_owns_and_no_more(dtype: torch.dtype) -> None:
    config = ModelConfig(vocab_size=3 * BUFFER_ELEMENTS // 64, hidden_size=64, layers=1, expert_hidden_size=64)
    layout = partition(tensor_table(config), 2)
    for rank in range(2):
        extents = layout.extents(rank)
        weights, chunk = Listening(config), torch.full((layout.chunk(rank),), -1, dtype=dtype)
        load_extents(weights, extents, chunk)
        padding = torch.ones(len(chunk), dtype=torch.bool)
        for extent in extents:
            expected = torch.arange(extent.start, extent.stop, dtype=torch.float32).to(dtype)
            assert torch.equal(chunk[extent.in_chunk], expected), "in fp32, as they are stored"
            padding[extent.in_chunk] = False
        assert (chunk[padding] == -1).all()
        assert max(stop - start for _, start, stop in weights.ranges) == BUFFER_ELEMENTS
        assert sum(stop - start for _, start, stop in weights.ranges) == sum(extent.numel for extent in extents)


def test_a_run_that_has_checkpoints_resumes_them(tmp_path: Path, corpus: Path, imported: Path) -> None:
    run = started(tmp_path / "run", corpus, f"ckpt:{imported}", steps=6)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    done = train_on(run, 1)
    assert done.returncode == 0
    assert "resuming tiny from step-00000003" in done.stdout


def test_imported_weights_among_a_runs_own_checkpoints_are_used_only_when_asked(
    tmp_path: Path, corpus: Path, imported: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, steps=2, model=ZERO)
    own = run / "checkpoints" / imported.name
    shutil.copytree(imported, own)
    done = train_on(run, 1)
    assert done.returncode == 1
    assert "weights only" in done.stdout
    assert "init: ckpt:DIR" in done.stdout
    assert "Traceback" not in done.stderr
    started(run, corpus, f"ckpt:{own}")


# -------------------------------------------------------------------------------------------- what does not fit


def complaint(init: str, model: ModelConfig = CONFIG, tokenizer: str = TOKENIZER) -> str:
    with pytest.raises(ConfigError) as refused:
        open_init(init, model, tokenizer)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_another_model_is_refused_with_the_keys_that_differ(folder: Path, imported: Path) -> None:
    other = CONFIG.model_copy(update={"layers": 3, "skip_rule": "identity"})
    for init in (f"hf:{folder}", f"ckpt:{imported}"):
        assert complaint(init, other) == (
            f"init: {init.partition(':')[2]} holds another model: model.layers is 3, the weights have 2; "
            "model.skip_rule is 'identity', the weights have 'zero'; set the model to theirs"
        )


def test_the_standard_deviation_of_initial_weights_is_no_difference(folder: Path) -> None:
    open_init(f"hf:{folder}", CONFIG.model_copy(update={"init_std": 0.5}), TOKENIZER).close()


def test_what_is_not_there_is_reported_in_a_line(tmp_path: Path) -> None:
    assert complaint(f"hf:{tmp_path}") == (
        f"init: {tmp_path}: holds no config.json, so it is no folder of a published model"
    )
    assert complaint(f"ckpt:{tmp_path}/none").startswith(f"init: {tmp_path}/none is not a directory, so not a ")


def test_the_wrong_kind_of_directory_is_refused_with_the_right_one(
    finished: Path, folder: Path, imported: Path
) -> None:
    assert complaint(f"hf:{imported}").endswith(f"; it is a checkpoint: `init: ckpt:{imported}`")
    assert complaint(f"ckpt:{folder}").endswith(
        f"; for a folder in transformers' format, write `init: hf:{folder}`"
    )
    for kind in ("hf", "ckpt"):
        assert complaint(f"{kind}:{finished}").endswith(
            f"; it is a run, of which the newest checkpoint is `init: ckpt:{newest(finished)}`"
        )


def test_data_of_another_tokenizer_are_refused(tmp_path: Path, finished: Path, folder: Path) -> None:
    message = "was trained with another tokenizer than the run's data were made with"
    assert message in complaint(f"ckpt:{newest(finished)}", tokenizer="b" * 64)
    with_tokenizer = tmp_path / "hf"
    shutil.copytree(folder, with_tokenizer)
    (with_tokenizer / "tokenizer.json").write_text("{}")
    assert message in complaint(f"hf:{with_tokenizer}")
    sha256 = file_sha256(with_tokenizer / "tokenizer.json")
    open_init(f"hf:{with_tokenizer}", CONFIG, sha256).close()
    open_init(f"hf:{folder}", CONFIG, "c" * 64).close()  # it has no tokenizer to compare


def test_an_imported_checkpoint_knows_its_tokenizer(tmp_path: Path) -> None:
    from zslurm.checkpoint_tools.format import manifest_json

    path = import_weights(MemoryWeights(CONFIG, random_weights(CONFIG)), tmp_path / "checkpoints").path
    manifest = manifest_json.decode((path / "manifest.json").read_bytes(), path)
    manifest.state["weights_only"]["tokenizer_sha256"] = "b" * 64  # type: ignore[index]
    (path / "manifest.json").write_bytes(manifest_json.encode(manifest))
    assert "another tokenizer" in complaint(f"ckpt:{path}")
    open_init(f"ckpt:{path}", CONFIG, "b" * 64).close()


def test_a_checkpoint_that_was_copied_away_from_its_run_serves(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(newest(finished), tmp_path / "copy")
    open_init(f"ckpt:{tmp_path}/copy", CONFIG, TOKENIZER).close()


def test_every_rank_ends_with_the_line(tmp_path: Path, corpus: Path, folder: Path) -> None:
    run = make_run(tmp_path / "run", corpus, model=ZERO | {"layers": 3}, init=f"hf:{folder}")
    done = train_on(run, 2)
    assert done.returncode == 2
    assert done.stderr.count("error: init: ") == 2
    assert "model.layers is 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_damage_is_found_before_a_step_is_taken(tmp_path: Path, corpus: Path, imported: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(imported, damaged)
    shard = sorted(damaged.glob("shard-*"))[-1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    run = make_run(tmp_path / "run", corpus, model=ZERO, init=f"ckpt:{damaged}")
    done = train_on(run, 2)
    assert done.returncode == 2
    assert shard.name in done.stderr
    assert losses_of(run) == []


# -------------------------------------------------------------------------------------------- facts of a run


def test_weights_of_a_run_have_the_facts_of_the_phase_that_they_were_saved_in(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, steps=3, phase={"micro_batch": 1})
    config = json.loads((run / "config.json").read_text())
    longer = config["phases"][0] | {"context": 32, "global_batch": 3, "rope_base": 1e6, "lr": 1e-3}
    config["phases"] = [config["phases"][0], longer]
    (run / "config.json").write_text(json.dumps(config))
    assert train_on(run, 1).returncode == 0
    for step, base, context in ((3, 1e4, 16), (6, 1e6, 32)):
        with open_weights(run / "checkpoints" / f"step-{step:08d}") as weights:
            assert (weights.settings.rope_base, weights.settings.context) == (base, context)
            assert weights.settings.dtype == "fp32"
            values = np.empty(8, np.float32)
            weights.read("embedding.weight", 5, values)
            assert np.isfinite(values).all()
