"""Tokens and FLOPs a second, and where the peak that they are held against comes from."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.runs import MODEL
from zslurm.train.config import ParallelConfig, TrainConfig
from zslurm.train.parallel.world import World, open_world
from zslurm.train.schedule import Plan
from zslurm.train.telemetry.flops import token_flops
from zslurm.train.telemetry.throughput import ThroughputMeter, device_peak

PHASE = {"tokens": 4800, "context": 16, "global_batch": 6, "micro_batch": 1, "lr": 1e-3}


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model": MODEL, "phases": [PHASE], "parallel": {"dtype": "bf16"}} | sections
    )


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world(ParallelConfig(device="cpu", threads=1)) as opened:
        yield opened
    assert not dist.is_initialized()


def on_a_gpu_called(name: str, world: World, monkeypatch: pytest.MonkeyPatch, units: int = 304) -> World:
    """The same world as it looks on a GPU of this name; nothing runs there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    properties = SimpleNamespace(multi_processor_count=units)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return dataclasses.replace(world, device=torch.device("cuda", 0))


def test_a_gpu_of_the_table_has_its_peak(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert device_peak(config(), on_a_gpu_called("AMD Instinct MI300X", world, monkeypatch)) == 1307.4e12
    assert caplog.messages == []


def test_an_unknown_gpu_has_none_and_one_line_reports_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    speed = ThroughputMeter(config(), on_a_gpu_called("Some GPU 9000", world, monkeypatch, units=96))
    assert caplog.messages == [
        "note: no MFU, for the peak of Some GPU 9000 with 96 compute units in bf16 is not known; set "
        "metrics.peak_tflops, or add the device to PEAKS in train/telemetry/flops.py"
    ]
    found = speed.of(Plan(config().phases).at(0), 2.0, 0.0)
    assert found["mfu"] is None
    assert found["tflops_per_rank"]


def test_a_partition_of_a_gpu_has_no_mfu_unless_its_peak_is_set(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    part = on_a_gpu_called("AMD Instinct MI300X", world, monkeypatch, units=38)
    assert device_peak(config(), part) is None
    assert "AMD Instinct MI300X with 38 compute units" in caplog.messages[0]
    assert device_peak(config(metrics={"peak_tflops": 163.4}), part) == 163.4e12


def test_the_setting_wins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = on_a_gpu_called("AMD Instinct MI300X", world, monkeypatch)
    for each in (world, gpu):
        assert device_peak(config(metrics={"peak_tflops": 163.4}), each) == 163.4e12


def test_a_cpu_is_measured_and_draws_no_random_number(world: World) -> None:
    before = torch.get_rng_state()
    peak = device_peak(config(parallel={"dtype": "fp32"}), world)
    assert peak is not None
    assert 1e7 < peak < 1e15
    assert torch.equal(torch.get_rng_state(), before)


def test_speed_is_tokens_and_flops_over_seconds_and_ranks(world: World) -> None:
    eight = dataclasses.replace(world, size=8)
    settings = config(metrics={"peak_tflops": 1e-3})
    here = Plan(settings.phases).at(3)
    found = ThroughputMeter(settings, eight).of(here, seconds=0.5, skip_share=0.25)
    assert found["tokens_per_s"] == 6 * 16 / 0.5
    assert found["tokens_per_s_per_rank"] == 6 * 16 / 0.5 / 8
    flops = token_flops(settings.model, 16, 0.25) * 6 * 16 / 0.5 / 8
    assert found["tflops_per_rank"] == pytest.approx(flops / 1e12)
    assert found["mfu"] == pytest.approx(flops / 1e9)


def test_no_step_is_faster_than_its_device(world: World) -> None:
    """A CPU that was busy when its peak was measured would have an MFU of 146 %."""
    settings = config(metrics={"peak_tflops": 1e-3})
    speed = ThroughputMeter(settings, world)
    assert speed.of(Plan(settings.phases).at(3), seconds=1e-9, skip_share=0.0)["mfu"] is None
