"""`parallel.deterministic` reaches torch before a rank takes its device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.train.ranks import train_on
from tests.train.runs import make_corpus, make_run


def print_settings_when_the_device_is_chosen() -> None:
    from zslurm.train.parallel import world

    choose = world.choose_device

    def choose_device(setting: str, local_rank: int) -> torch.device:
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        filled = torch.utils.deterministic.fill_uninitialized_memory
        print(torch.are_deterministic_algorithms_enabled(), workspace, filled, file=sys.stderr, flush=True)
        return choose(setting, local_rank)

    world.choose_device = choose_device


@pytest.mark.parametrize(("deterministic", "settings"), [(True, "True :4096:8 False"), (False, "False None True")])
def test_a_run_is_deterministic_if_asked(tmp_path: Path, deterministic: bool, settings: str) -> None:
    corpus = make_corpus(tmp_path / "corpus.h5")
    run = make_run(tmp_path / "run", corpus, steps=3, parallel={"device": "cpu", "deterministic": deterministic})
    done = train_on(run, 1, print_settings_when_the_device_is_chosen)
    assert done.returncode == 0, done.stderr
    assert settings in done.stderr.splitlines()
