"""The shipped presets: the published model as it was published, and the sizes between by one rule."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.config.run_files import resolve_text
from zslurm.config.load import recipes
from zslurm.config.spec import RunSpec
from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import Zaya
from zslurm.train.plan.memory import largest_head_chunk, plan_memory
from zslurm.train.schedule import check_ranks
from zslurm.train.shapes import parameter_counts

BETWEEN = ("zaya1-100m", "zaya1-400m", "zaya1-1b", "zaya1-3b")
UNPUBLISHED = "init_std muon betas weight_decay clip_norm balance_lr micro_batch warmup_steps every_steps".split()


def spec_of(directory: Path, recipe: str) -> RunSpec:
    return resolve_text(directory, f"extends: {recipe}\n").spec


def by_the_rule(query_heads: int) -> ModelConfig:
    """docs/model.md, "Sizes": everything follows from the number of query heads."""
    hidden_size = 256 * query_heads
    return ModelConfig(
        hidden_size=hidden_size,
        layers=5 * query_heads,
        query_heads=query_heads,
        kv_heads=math.ceil(query_heads / 4),
        expert_hidden_size=hidden_size,
        router_hidden_size=64 * math.ceil(hidden_size / 8 / 64),
    )


def test_zaya1_8b_has_the_published_models_parameters(tmp_path: Path) -> None:
    config = spec_of(tmp_path, "zaya1-8b").model
    assert config == ModelConfig()
    with torch.device("meta"):
        model = Zaya(config, torch.bfloat16)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    without_embedding = sum(sizes.values()) - sizes["embedding.weight"]
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert sum(sizes.values()) == 8_840_488_784
    assert without_embedding == 8_303_355_728
    assert without_embedding - experts * 15 // 16 == 753_608_528


def test_zaya1_8b_has_the_published_phases(tmp_path: Path) -> None:
    phases = spec_of(tmp_path, "zaya1-8b").phases
    assert [(phase.tokens, phase.context, phase.rope_base) for phase in phases] == [
        (8_000_000_000_000, 4096, 1e4),
        (4_000_000_000_000, 4096, 1e4),
        (1_200_000_000_000, 32768, 1e6),
    ]
    assert phases[0].global_batch == phases[1].global_batch == 4096
    assert {phase.global_batch * phase.context for phase in phases} == {4096 * 4096}, (
        "ours: the same tokens in a step of 32k"
    )
    assert (phases[0].schedule, phases[0].lr, phases[0].final_lr) == ("cosine", 6e-4, 2e-4)
    for before, after in pairwise(phases):
        assert after.lr == before.final_lr, "ours: without a jump"


def test_zaya1_8b_divides_long_sequences_as_published_and_fits_its_cluster(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "zaya1-8b")
    assert [phase.context_parallel for phase in spec.phases] == [1, 1, 2]
    assert spec.parallel.context_attention == "all_gather"
    for nodes in (128, 64, 16):
        assert check_ranks(spec.phases, 8 * nodes, 8) == [], "every batch, those of the ramp too, divides evenly"


def test_zaya1_8b_explains_what_is_a_choice() -> None:
    text = recipes()["zaya1-8b"]
    (paragraph,) = (part for part in re.split(r"\n#\n|\n(?!#)", text) if "13.2 trillion" in part)
    assert "12 trillion" in paragraph
    assert "14 trillion" in paragraph
    assert re.search(r"balance_scope: global_batch +# published", text)
    assert re.search(r"batch_ramp: +# published: that there was one; ours: its steps", text)
    assert len(re.findall(r"until_tokens: .* # ours", text)) == 2
    assert re.search(r"context_parallel: 2 +# published", text)


def test_zaya1_8b_says_of_every_unpublished_value_that_it_is_ours() -> None:
    lines = recipes()["zaya1-8b"].splitlines()
    for key in UNPUBLISHED:
        found = [line for line in lines if line.strip().startswith(f"{key}:")]
        assert found, key
        assert all("# ours" in line for line in found), key
    rates = [line for line in lines if re.match(r" +lr:", line)]
    assert ["# ours" in line for line in rates] == [False, True, True]
    assert len([line for line in lines if re.match(r" +global_batch: 512 +# ours", line)]) == 1


def test_the_phase_of_131k_is_published_in_part_and_continues_mid_training(tmp_path: Path) -> None:
    before = spec_of(tmp_path, "zaya1-8b")
    spec = spec_of(tmp_path, "zaya1-8b-131k")
    assert spec.model == before.model
    assert spec.parallel == before.parallel
    (phase,) = spec.phases
    assert (phase.context, phase.rope_base, phase.context_parallel) == (131_072, 5e6, 8)
    assert phase.lr == before.phases[-1].final_lr
    assert phase.global_batch * phase.context == before.phases[-1].global_batch * before.phases[-1].context
    assert phase.context // phase.context_parallel == 16_384
    for nodes in (128, 64, 16):
        assert check_ranks(spec.phases, 8 * nodes, 8) == []
    lines = recipes()["zaya1-8b-131k"].splitlines()
    for key in ("tokens", "global_batch", "micro_batch", "lr", "final_lr", "schedule"):
        (line,) = [line for line in lines if line.strip().removeprefix("- ").startswith(f"{key}:")]
        assert "# ours" in line, key


def test_a_rank_needs_no_more_memory_for_131k(tmp_path: Path) -> None:
    peaks = []
    for recipe in ("zaya1-8b", "zaya1-8b-131k"):
        plan = plan_memory(spec_of(tmp_path, recipe), 1024, on_cpu=False, local=8)
        assert plan.peak < 100 * 2**30, "of 192 GiB"
        peaks.append(plan.peak)
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.parametrize(
    ("gib", "changes", "tokens"),
    [
        (192, {}, 4096), (105, {}, 4096), (103.5, {}, 2048), (101, {}, None), (None, {}, None),
        (192, {"parallel": {"dtype": "fp32"}}, None),
    ],
)  # fmt: skip
def test_the_head_takes_larger_chunks_if_memory_allows(
    tmp_path: Path, gib: float | None, changes: dict[str, dict[str, str]], tokens: int | None
) -> None:
    """A plan of 91.8 GiB and 3 GiB more must leave a tenth of the memory free."""
    spec = spec_of(tmp_path, "zaya1-8b")
    for section, values in changes.items():
        spec = spec.model_copy(update={section: getattr(spec, section).model_copy(update=values)})
    memory = None if gib is None else int(gib * 2**30)
    assert largest_head_chunk(spec, 1024, memory, local=8) == tokens


@pytest.mark.parametrize("recipe", [*BETWEEN, "zaya1-8b"])
def test_a_preset_has_the_sizes_that_the_rule_gives(tmp_path: Path, recipe: str) -> None:
    spec = spec_of(tmp_path, recipe)
    assert spec.model == by_the_rule(spec.model.query_heads)
    assert spec.phases[0].global_batch == 64 * spec.model.query_heads**2
    for size in ("vocab_size", "hidden_size", "head_dim", "expert_hidden_size", "router_hidden_size"):
        assert getattr(spec.model, size) % 64 == 0, size
    for phase in spec.phases:
        assert phase.micro_batch * phase.context % 4096 == 0
        assert phase.global_batch % 64 == 0


@pytest.mark.parametrize("recipe", BETWEEN)
def test_a_size_between_trains_as_the_document_says(tmp_path: Path, recipe: str) -> None:
    spec = spec_of(tmp_path, recipe)
    (phase,) = spec.phases
    assert phase.tokens == pytest.approx(20 * parameter_counts(spec.model).without_embedding, rel=0.02)
    assert phase.lr == pytest.approx(6e-4 * math.sqrt(2048 / spec.model.hidden_size), rel=0.01)
    assert phase.final_lr == pytest.approx(phase.lr / 3, rel=0.02)


def test_the_first_line_of_a_size_between_tells_its_size(tmp_path: Path) -> None:
    for name in BETWEEN:
        millions = parameter_counts(spec_of(tmp_path, name).model).without_embedding / 1e6
        size = f"{millions:.0f} million" if millions < 1000 else f"{millions / 1000:.2f} billion"
        assert size in recipes()[name].splitlines()[0]
