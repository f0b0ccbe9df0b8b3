"""What of a run is built before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zslurm.kernels.arch import GFX942
from zslurm.kernels.dispatch import using
from zslurm.train import assembly
from zslurm.train.config import TrainConfig, load_train_config
from zslurm.train.kernel_builds import build_kernels, microbatches

pytest.importorskip("triton")


def config_file(directory: Path) -> Path:
    """Write the configuration of a small model in two phases, the second with documents kept apart."""
    file = directory / "config.json"
    phase = {"tokens": 8192, "context": 128, "global_batch": 4, "micro_batch": 2, "lr": 1e-3}
    content = {
        "run": {"name": "r"},
        "model": {
            "vocab_size": 512, "hidden_size": 128, "layers": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 32,
            "experts": 4, "expert_hidden_size": 128, "router_hidden_size": 16,
        },
        "data": {"path": "/data"},
        "phases": [phase, phase | {"context": 256, "packing": "best_fit"}],
        "parallel": {"dtype": "bf16"},
    }  # fmt: skip
    file.write_text(json.dumps(content))
    return file


def test_what_cannot_be_built_is_returned_and_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: TrainConfig = load_train_config(config_file(tmp_path))

    def refuse(*_: object) -> None:
        raise RuntimeError("no assembler\nsecond line")

    monkeypatch.setattr("zslurm.train.kernel_builds._run_layers", refuse)
    problems = build_kernels(config, GFX942)
    assert problems[-1] == "RuntimeError: no assembler"


def test_every_kind_of_microbatch_is_run_once(tmp_path: Path) -> None:
    config: TrainConfig = load_train_config(config_file(tmp_path))
    config = config.model_copy(update={"phases": config.phases * 2})
    assert list(microbatches(config)) == [(2, 128, False), (2, 256, True)]


def test_the_log_can_name_what_multiplies_the_experts(tmp_path: Path) -> None:
    config: TrainConfig = load_train_config(config_file(tmp_path))
    for setting, name in (("auto", "reference"), ("torch", "torch")):
        with using("grouped_gemm", setting):
            assert assembly.products_of_experts(config, torch.device("cpu"), torch.bfloat16) == name
