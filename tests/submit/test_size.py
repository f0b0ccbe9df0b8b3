"""The sizing rules: exactly the faults that are put into drawn runs, better values that help, and proposals."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from zslurm.config.spec import RunSpec
from zslurm.submit.size import Card, RunSize, card_of, proposals, run_size
from zslurm.train.plan.rates import Rates
from zslurm.train.shapes import parameter_counts

FAULTS = (
    "vocabulary",
    "head_dim",
    "hidden_size",
    "expert_hidden_size",
    "small_product",
    "small_k",
    "tokens",
    "expert_rows",
    "ranks",
    "microbatches",
    "xgmi",
    "memory",
)
CLASHING = (
    {"hidden_size", "expert_hidden_size", "small_product", "small_k"},
    {"tokens", "expert_rows"},
    {"ranks", "microbatches"},
)
"""Faults of which a run has one at most, as they set the same values."""


@dataclass
class Draw:
    """Sizes of a run."""

    hidden: int
    inner: int
    heads: int
    head_dim: int = 128
    vocabulary: int = 65536
    layers: int = 4
    experts: int = 8
    context: int = 4096
    sequences: int = 16
    missing: int = 0  # sequences of a step that some ranks do not have
    local: int = 8
    nodes: int = 2
    micro_batch: int = 8
    parallel: dict[str, Any] = field(default_factory=lambda: {"dtype": "bf16", "device": "cuda"})

    def spec(self) -> RunSpec:
        batch = self.sequences * self.local * self.nodes - self.missing
        model = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "layers": self.layers,
            "query_heads": self.heads,
            "kv_heads": self.heads // 4,
            "head_dim": self.head_dim,
            "experts": self.experts,
            "expert_hidden_size": self.inner,
        }
        phase = {"tokens": 10**10, "context": self.context, "global_batch": batch, "lr": 1e-3}
        return RunSpec.model_validate(
            {
                "model": model,
                "phases": [phase | {"micro_batch": self.micro_batch}],
                "parallel": self.parallel,
                "slurm": {"nodes": self.nodes, "ranks_per_node": self.local},
                "cluster": {"gpus_per_node": 8, "gpu_type": "mi300x"},
            }
        )


def draw(rng: random.Random, faults: set[str]) -> Draw:
    """A run that breaks no rule, but for those of `faults`."""
    found = Draw(
        hidden=rng.choice([4096, 5120, 6144]),
        inner=rng.choice([2048, 4096]),
        heads=rng.choice([16, 20, 24]),
        vocabulary=64 * rng.randrange(500, 2000),
        nodes=rng.choice([1, 2, 4]),
    )
    if "vocabulary" in faults:
        found.vocabulary += rng.randrange(1, 64)
    if "head_dim" in faults:
        found.head_dim = rng.choice([80, 96, 160])
    if "hidden_size" in faults:
        found.hidden += rng.choice([8, 32, 48])
    if "expert_hidden_size" in faults:
        found.inner += rng.choice([8, 32, 48])
    if "small_product" in faults:
        found.hidden, found.inner = 1024, 1024
    if "small_k" in faults:
        found.inner = rng.choice([768, 960])
    if "tokens" in faults:
        found.context += rng.choice([1, 4, 9])
    if "expert_rows" in faults:
        found.experts = 24
    if "ranks" in faults:
        found.missing, found.nodes = 8, 4
    if "microbatches" in faults:
        found.sequences = rng.choice([9, 12, 15])
        found.nodes = 4
    if "xgmi" in faults:
        found.local = rng.choice([2, 4])
        found.nodes *= 4
    return found


def drawn_faults(seed: int) -> set[str]:
    rng = random.Random(seed)
    wanted = {fault for fault in FAULTS if rng.random() < 0.4}
    for group in CLASHING:
        wanted -= set(sorted(wanted & group)[1:])
    return wanted


def sized(spec: RunSpec, gib: float | None = None) -> RunSize:
    return run_size(spec, card_of(spec, gib, ""), Rates(None, on_cpu=False), on_cpu=False)


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_seeded_faults_are_flagged(seed: int) -> None:
    faults = drawn_faults(seed)
    run = draw(random.Random(1000 + seed), faults)
    found = sized(run.spec(), 4 if "memory" in faults else 1000)
    # Tokens that fill no tile do not fill the experts' rows either.
    expected = faults | ({"expert_rows"} if "tokens" in faults else set())
    assert {finding.rule for finding in found.findings} == expected, [finding.line for finding in found.findings]


def test_the_draws_have_every_fault_and_none() -> None:
    drawn = [drawn_faults(seed) for seed in range(20)]
    assert set().union(*drawn) == set(FAULTS)
    assert not sized(draw(random.Random(0), set()).spec(), 1000).findings


@pytest.mark.parametrize(
    ("fault", "attribute", "pattern"),
    [
        ("vocabulary", "vocabulary", r"pad the vocabulary to (\d+)"),
        ("head_dim", "head_dim", r"use (\d+)$"),
        ("hidden_size", "hidden", r"use (\d+)$"),
        ("expert_hidden_size", "inner", r"use (\d+)$"),
        ("small_k", "inner", r"use (\d+)$"),
        ("tokens", "context", r"context (\d+),"),
        ("expert_rows", "micro_batch", r"use micro_batch (\d+)$"),
        ("microbatches", "micro_batch", r"use (\d+)$"),
        ("small_product", "micro_batch", r"from (\d+) sequences on"),
    ],
)
def test_the_better_value_keeps_the_rule(fault: str, attribute: str, pattern: str) -> None:
    run = draw(random.Random(3), {fault})
    run.sequences = run.sequences if fault == "microbatches" else 2 * 3 * 5 * 7 * 8
    if fault == "microbatches":
        run.micro_batch = run.sequences - 1
        run.sequences *= 2
        run.missing = 0
    (line,) = (finding.line for finding in sized(_whole(run).spec(), 1000).findings if finding.rule == fault)
    better = re.search(pattern, line)
    assert better, line
    setattr(run, attribute, int(better[1]))
    rules = {finding.rule for finding in sized(_whole(run).spec(), 10000).findings}
    assert fault not in rules


def _whole(run: Draw) -> Draw:
    """The same run, with a batch that has whole microbatches."""
    while (run.sequences * run.local * run.nodes - run.missing) % run.micro_batch:
        run.sequences += 1
    return run


def test_a_batch_that_is_too_small_is_a_finding_and_no_error() -> None:
    run = draw(random.Random(0), set())
    run.sequences, run.missing, run.micro_batch = 1, 8, 8
    lines = [finding.line for finding in sized(run.spec(), 1000).findings if finding.rule == "ranks"]
    assert len(lines) == 1
    assert "fewer sequences than there are data-parallel ranks" in lines[0]


def test_recompute_that_fits_is_named_else_a_smaller_microbatch() -> None:
    run = draw(random.Random(0), set())
    peak = sized(run.spec(), 1000).memory.peak / 2**30
    (line,) = (finding.line for finding in sized(run.spec(), peak).findings)
    better = re.search(r"use parallel.recompute (\d+)", line)
    assert better, line
    run.parallel |= {"recompute": int(better[1])}
    assert not sized(run.spec(), peak).findings
    run.parallel |= {"recompute": int(better[1]) - 1}
    assert sized(run.spec(), peak).findings


def test_a_card_is_known_by_its_name() -> None:
    spec = draw(random.Random(0), set()).spec()
    assert card_of(spec, None, "") == Card(1307.4e12, 192 << 30)
    assert card_of(spec, 100, "") == Card(1307.4e12, 100 << 30)
    assert card_of(spec, None, "NVIDIA H100 80GB HBM3") == Card(989.4e12, 80 << 30)
    assert card_of(spec, None, "NVIDIA H100 NVL") == Card(835.5e12, None)
    assert card_of(spec, None, "NVIDIA GH200 480GB") == Card(989.4e12, None)
    assert card_of(spec, None, "Frobnicator") == Card(None, None)
    assert card_of(spec, None, "", on_cpu=True) == Card(None, None)


@pytest.mark.parametrize("parameters", [1e9, 3e9, 2e10])
def test_proposals_are_near_keep_the_rules_and_are_the_same_each_time(parameters: float) -> None:
    spec, card = draw(random.Random(0), set()).spec(), Card(None, None)
    found, broken = proposals(spec, parameters, card, on_cpu=False)
    if not found:
        assert parameters == 1e9  # too few for products that fill a GPU
        assert {finding.rule for finding in broken} <= {"small_product", "small_k"}
        return
    assert not broken
    assert proposals(spec, parameters, card, on_cpu=False)[0] == found
    distances = [abs(shape.parameters - parameters) for shape in found]
    assert distances == sorted(distances)
    assert distances[-1] <= 0.1 * parameters
    for shape in found:
        counts = parameter_counts(shape.model)
        assert (counts.total, counts.active) == (shape.parameters, shape.active)
    for shape in (found[0], found[-1]):
        rules = {finding.rule for finding in sized(spec.model_copy(update={"model": shape.model})).findings}
        assert rules <= {"memory"}  # which was not asked for


def test_proposals_fit_into_the_card() -> None:
    spec = draw(random.Random(0), set()).spec()
    card = card_of(spec, 120, "")
    for shape in proposals(spec, 3e9, card, on_cpu=False)[0]:
        assert not run_size(
            spec.model_copy(update={"model": shape.model}), card, Rates(None, on_cpu=False), on_cpu=False
        ).findings
