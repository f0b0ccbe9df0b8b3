"""What may be imported by those who have no torch, or no time for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.train.runs import clean_environment

WITHOUT_TORCH = [
    "zslurm.train",
    "zslurm.train.config",
    "zslurm.train.shapes",
    "zslurm.train.parallel.memory",
    "zslurm.train.progress",
    "zslurm.train.jsonl",
    "zslurm.train.stop",
    "zslurm.train.errors",
    "zslurm.train.evaluation.validation_data",
    "zslurm.train.telemetry.flops",
    "zslurm.train.evaluation.command",
    "zslurm.train.checkpointing.init_weights",
    "zslurm.train.plan.memory",
    "zslurm.train.optim.stability",
    "zslurm.train.schedule",
    "zslurm.train.context.bytes",
    "zslurm.train.data.bundle",
    "zslurm.train.data.sampler",
    "zslurm.train.data.shares",
    "zslurm.train.data.reader",
    "zslurm.train.plan.io",
    "zslurm.checkpoint_tools",
    "zslurm.job.rank",
    "zslurm.submit.submit",
    "zslurm.aegis.supervisor.supervisor",
]


def run(program: str, *arguments: str) -> str:
    """What a program in a fresh interpreter prints."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def without_torch() -> list[str]:
    """Those of WITHOUT_TORCH after which a fresh interpreter that imports them in turn has no torch."""
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        break
    print(name)
"""
    return run(program, *WITHOUT_TORCH).split()


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_it_imports_no_torch(without_torch: list[str], module: str) -> None:
    """The first one that does fails, and all after it."""
    assert module in without_torch


def test_a_rank_starts_without_torchs_compiler() -> None:
    """Building a model and its optimizer needs none of it, and it costs every rank a second."""
    program = """
import torch, torch.distributed as dist
from zslurm.train.config import ModelConfig, OptimConfig
from zslurm.train.model.zaya import build
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.shapes import owned_table
config = ModelConfig(vocab_size=31, hidden_size=12, layers=1, query_heads=2, kv_heads=2, head_dim=8, experts=3,
                     expert_hidden_size=10, router_hidden_size=6)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = build(config, 0, dtype=torch.float32)
shards = ZeroShards(model, owned_table(config, OptimConfig()), dist.group.WORLD)
optimizer = ShardedOptimizer(shards, OptimConfig())
shards.begin_step(backwards=1)
loss, _ = model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long), rope_base=100.0)
loss.backward()
shards.reduce_gradients()
optimizer.step(1e-3)
shards.gather_weights()
import sys
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
"""
    run(program)
