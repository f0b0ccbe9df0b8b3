"""The memory plan is what torch's profiler sees: of a microbatch, at the start, and of whole runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.memory import peak_bytes
from benchmarks.models import TINY
from tests.train.ranks import train_on
from tests.train.runs import make_corpus, make_run
from zslurm.kernels import head as head_kernels
from zslurm.kernels.dispatch import using
from zslurm.train.config import ModelConfig, MuonConfig, OptimConfig, TrainConfig, load_train_config
from zslurm.train.context import blocks
from zslurm.train.model import head
from zslurm.train.model.attention_backends import sdpa
from zslurm.train.model.zaya import Zaya, build
from zslurm.train.optim.muon import MatrixBatch, Muon
from zslurm.train.optim.workspace import matrices_at_once, update_bytes
from zslurm.train.parallel.comm import DONE, Handle
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.plan import activations
from zslurm.train.plan.activations import MicrobatchMemory, microbatch_memory, product_sums, recomputed_layers
from zslurm.train.plan.memory import LEFT_FREE, MemoryPlan, plan_memory, with_least_recompute
from zslurm.train.shapes import owned_table, parameter_counts

SMALL = TINY.model_copy(update={"vocab_size": 512, "layers": 3})
LARGE_VOCABULARY = SMALL.model_copy(update={"vocab_size": 30_000})
ONE_LAYER = SMALL.model_copy(update={"vocab_size": 8192, "layers": 1})
TWO_EXPERTS = SMALL.model_copy(update={"experts_per_token": 2})
LINEAR = SMALL.model_copy(update={"router": "linear", "conv_widths": (3, 2)})
PHASE = {"tokens": 10**6, "context": 64, "global_batch": 8, "micro_batch": 2, "lr": 1e-3}
MODEL = {"hidden_size": 128, "experts": 4, "expert_hidden_size": 128}
"""For runs: large enough that what the plan does not count (scalars, the load of experts) is small beside it."""


@cache
def has_product_sums() -> bool:
    """Return whether a product in bf16 takes its whole result in fp32 here, as the profiler sees it."""
    square = torch.ones(512, 512, dtype=torch.bfloat16)
    result = torch.empty_like(square)
    return peak_bytes(lambda: torch.mm(square, square, out=result)) >= product_sums(result.numel(), 2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """oneDNN's scratch memory in bf16 grows with the threads; the plan does not know of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(model: ModelConfig, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"model": model, "phases": [PHASE], "parallel": {"dtype": "fp32"}, **sections}
    )


def planned(
    model: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    recompute: bool | int = False,
    documents: bool = False,
) -> MicrobatchMemory:
    config = config_of(
        model,
        phases=[PHASE | {"context": context, "global_batch": batch, "micro_batch": batch}],
        parallel={"dtype": {2: "bf16", 4: "fp32", 8: "fp64"}[dtype.itemsize], "recompute": recompute},
        data={"isolate_documents": documents},
    )
    return microbatch_memory(config, config.phases[0], on_cpu=True)


def losses(model: Zaya, batch: int, context: int, documents: bool = False) -> Tensor:
    tokens_BS = torch.zeros(batch, context, dtype=torch.long)
    document_BS = (torch.arange(context) // 8).expand(batch, context) if documents else None
    return model.losses(tokens_BS, tokens_BS, rope_base=1e4, document_BS=document_BS)[0].objective


def kept_by_autograd(model: Zaya, batch: int, context: int) -> int:
    """Bytes of all storages that are saved for backward, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes(), saved  # kept, so that no address comes twice
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        losses(model, batch, context)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model", "batch", "context"),
    [
        (SMALL, 2, 64),
        (SMALL, 1, 64),
        (SMALL, 1, 300),
        (SMALL, 2, 200),
        (SMALL, 1, 1200),
        (TWO_EXPERTS, 2, 64),
        (LINEAR, 2, 64),
    ],
)
def test_a_layer_keeps_what_autograd_saves(
    model: ModelConfig, batch: int, context: int, dtype: torch.dtype
) -> None:
    fewer = model.model_copy(update={"layers": 2})
    real = kept_by_autograd(build(model, 0, dtype=dtype), batch, context) - kept_by_autograd(
        build(fewer, 0, dtype=dtype), batch, context
    )
    layer = planned(model, batch, context, dtype).layers - planned(fewer, batch, context, dtype).layers
    assert layer == pytest.approx(real, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(
    ("model", "batch", "context", "settings"),
    [
        (SMALL, 4, 64, {}),
        (SMALL, 4, 64, {"recompute": True}),
        (SMALL, 4, 64, {"recompute": 1}),
        (SMALL, 4, 64, {"recompute": 2}),
        (SMALL, 2, 64, {"documents": True}),
        (LARGE_VOCABULARY, 2, 32, {}),
        (ONE_LAYER, 4, 128, {}),
        (ONE_LAYER, 2, 192, {}),
        (TWO_EXPERTS, 2, 100, {}),
        (SMALL, 1, 288, {"recompute": True}),
    ],
)
def test_the_peak_of_a_microbatch_is_the_profilers(
    model: ModelConfig,
    batch: int,
    context: int,
    settings: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = build(model, 0, dtype=dtype)
    built.run_with(recompute=settings.get("recompute", False))
    _free_gradients(built)
    documents = settings.get("documents", False)
    real = peak_bytes(lambda: losses(built, batch, context, documents).backward())  # type: ignore[no-untyped-call]
    by_onednn = dtype == torch.bfloat16
    tolerance = 0.06 if by_onednn else 0.01  # oneDNN's products take further scratch memory, in blocks
    assert planned(model, batch, context, dtype, **settings).peak > (1 - tolerance) * real, "on every processor"
    # The plan does not know the processor and counts the most that one takes: leave out what this one does not.
    if not has_product_sums():
        monkeypatch.setattr(activations, "product_sums", lambda *_: 0)
    assert planned(model, batch, context, dtype, **settings).peak == pytest.approx(real, rel=tolerance)


def _free_gradients(model: Zaya) -> None:
    """As zero.py does, which has added them to its buffer by then."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_free)  # type: ignore[no-untyped-call]


def _free(done: Tensor) -> None:
    done.grad = None


def test_the_start_needs_the_models_own_weights_too(alone: dist.ProcessGroup) -> None:
    optim = OptimConfig()
    kept: list[ZeroShards] = []
    peak = peak_bytes(
        lambda: kept.append(ZeroShards(build(SMALL, 0, dtype=torch.float32), owned_table(SMALL, optim), alone))
    )
    plan = plan_memory(config_of(SMALL), 1, on_cpu=True)
    assert plan.moments["start"] == 0, "the optimizer's state takes more, later"
    later = plan.resident["optimizer state"] + plan.resident["copy for a checkpoint"]
    most = sum(plan.resident.values()) - later
    assert peak == pytest.approx(most + 4 * parameter_counts(SMALL).total, rel=1e-3)
    unstaged = plan_memory(config_of(SMALL, checkpoint={"background": False}), 1, on_cpu=True)
    assert plan.peak - unstaged.peak == plan.resident["copy for a checkpoint"] > 0
    many = plan_memory(config_of(SMALL), 64, on_cpu=True)
    assert 0 < many.moments["start"] < 4 * parameter_counts(SMALL).total


def reduce_scatter_in_place(out: Tensor, whole: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Handle:
    """What torch's does, without a copy: done when it returns, and `whole` is the sum of all ranks'."""
    dist.all_reduce(whole, group=group)
    out.copy_(whole.chunk(group.size())[group.rank()])
    return DONE


def record_peak() -> None:
    """Let this rank write down the peak of its tensors.

    gloo reduces a copy, which its thread may keep until it is called again, or not: so the sum is made in place.
    """
    from zslurm.train import main as program
    from zslurm.train.parallel import comm

    comm.reduce_scatter_into = reduce_scatter_in_place

    train = program.train

    def recorded(run_dir: Path, stop: Any = None) -> program.Ending:
        endings: list[program.Ending] = []
        peak = peak_bytes(lambda: endings.append(train(run_dir, stop)))
        (run_dir / f"peak-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(peak))
        return endings[0]

    program.train = recorded


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("parallel", "moments"),
    [
        ({"dtype": "fp32"}, {"forward and backward"}),
        ({"dtype": "bf16", "reduce_dtype": "bf16", "recompute": True}, {"clipping", "forward and backward"}),
    ],
)
def test_the_peak_of_a_run_is_within_five_percent_of_the_profilers(
    tmp_path: Path, ranks: int, parallel: dict[str, Any], moments: set[str]
) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    phase = {"context": 128, "micro_batch": 3, "tokens": 2 * 6 * 128}
    # Measuring the device's peak takes further tensors; so does gloo, which copies what it reduces: both off.
    run = make_run(
        tmp_path / "run",
        corpus,
        model=MODEL,
        phase=phase,
        parallel={"overlap": False, **parallel},
        checkpoint={"background": True},
        metrics={"peak_tflops": 1.0},
    )
    plan = plan_memory(load_train_config(run / "config.json"), ranks, on_cpu=True)
    done = train_on(run, ranks, record_peak)
    assert done.returncode == 0, done.stderr
    peaks = [json.loads((run / f"peak-{rank}.json").read_text()) for rank in range(ranks)]
    assert plan.peak == pytest.approx(max(peaks), rel=0.05)
    assert plan.peak_moment in moments


@pytest.mark.parametrize("shape", [(40, 64, 128), (16, 256, 128), (1, 256, 128), (1, 520, 512)])
def test_muon_takes_no_more_than_planned(shape: tuple[int, int, int]) -> None:
    count, rows, columns = shape
    batch = MatrixBatch(*(torch.randn(shape) for _ in range(3)))
    muon = Muon([batch], MuonConfig(), weight_decay=0.1)
    real = peak_bytes(lambda: muon.step(1e-3))
    each = update_bytes(rows, columns, 2, 4)
    together = min(count, matrices_at_once(each, "cpu"))
    scratch = 160 * 1024  # norms, and blocks that processors with bf16 units sum in
    assert real <= each * together + product_sums(rows * columns, 2) + scratch
    if has_product_sums():
        assert real > each * together + 0.9 * product_sums(rows * columns, 2)


def zaya1(ranks: int, **sections: Any) -> MemoryPlan:
    return plan_memory(config_of(ModelConfig(), **sections), ranks, on_cpu=False)


@pytest.mark.parametrize(
    ("ranks", "cost", "elements", "idle_ranks"),
    [
        (8, 1.0, 1.0, 0),
        (64, 1.005, 1.004, 0),
        (768, 1.187, 1.166, 0),
        (1024, 1.055, 1.036, 0),
        (2048, 2.109, 2.073, 408),
    ],
)
def test_zaya1_is_divided_as_evenly_as_whole_matrices_allow(
    ranks: int, cost: float, elements: float, idle_ranks: int
) -> None:
    plan = zaya1(ranks)
    balance = plan.balance
    assert plan.matrices == 1640
    assert balance.cost / balance.cost_mean == pytest.approx(cost, abs=6e-4)
    assert balance.elements / balance.elements_mean == pytest.approx(elements, abs=6e-4)
    assert balance.cost <= 1.001 * balance.cost_bound
    assert balance.elements <= 1.001 * balance.elements_bound
    assert balance.idle_ranks == idle_ranks
    assert plan.idle_share == pytest.approx(1 - 1 / cost, abs=6e-4)


def test_more_ranks_share_what_is_owned_and_not_what_all_hold() -> None:
    plans = [zaya1(ranks, parallel={"dtype": "bf16"}) for ranks in (2, 16, 128)]
    for fewer, more in pairwise(plans):
        for name in ("master weights", "reduced gradients", "optimizer state", "exchange of matrices"):
            assert more.resident[name] == pytest.approx(fewer.resident[name] / 8, rel=0.05), name
        assert more.staging == more.resident["master weights"] + more.resident["optimizer state"]
        assert more.resident["weights"] == pytest.approx(2 * 8_840_488_784, rel=0.001)
        assert more.microbatch == fewer.microbatch
        assert more.peak < fewer.peak


def test_recompute_and_smaller_microbatches_need_less() -> None:
    plain, recompute = zaya1(64), zaya1(64, parallel={"dtype": "fp32", "recompute": True})
    assert recompute.microbatch.layers < plain.microbatch.layers / 5
    assert recompute.microbatch.peak < plain.microbatch.peak
    one, two = ({**PHASE, "micro_batch": sequences} for sequences in (1, 2))
    halved = zaya1(64, phases=[one])
    assert halved.microbatch.layers < plain.microbatch.layers
    assert zaya1(64, phases=[one, two, one]).microbatch == plain.microbatch, "the phase that needs most counts"


def test_the_least_recomputation_that_fits_is_taken() -> None:
    phase = PHASE | {"context": 4096, "global_batch": 64, "micro_batch": 8}

    def asking(recompute: bool | int | str) -> TrainConfig:
        return config_of(ModelConfig(), phases=[phase], parallel={"dtype": "bf16", "recompute": recompute})

    def peak(config: TrainConfig) -> int:
        return plan_memory(config, 64, on_cpu=False).peak

    def chosen(room: float | None, *, on_cpu: bool = False) -> int:
        memory = None if room is None else int(room / (1 - LEFT_FREE)) + 1
        return recomputed_layers(with_least_recompute(asking("auto"), 64, memory, on_cpu=on_cpu))

    most, least, layers = peak(asking(False)), peak(asking(True)), ModelConfig().layers
    assert [chosen(room) for room in (None, most, 0.9 * least)] == [0, 0, layers]
    assert chosen(least, on_cpu=True) == 0
    for share in (0.9, 0.4):
        room = least + share * (most - least)
        count = chosen(room)
        assert 0 < count < layers
        assert peak(asking(count)) <= room < peak(asking(count - 1))
    set_by_hand = asking(3)
    assert with_least_recompute(set_by_hand, 64, 1, on_cpu=False) is set_by_hand
    with pytest.raises(ValueError, match="not chosen yet"):
        peak(asking("auto"))


def test_where_other_moments_take_more_nothing_is_recomputed() -> None:
    config = config_of(ModelConfig(), parallel={"dtype": "bf16", "recompute": "auto"})
    assert recomputed_layers(with_least_recompute(config, 64, 2**30, on_cpu=False)) == 0


def test_without_muon_nothing_is_whole() -> None:
    plan = zaya1(1024, optim={"matrices": "adamw"})
    assert (plan.matrices, plan.moments["Muon"], plan.idle_share) == (0, 0, 0.0)


def test_the_plan_knows_the_constants_of_the_code() -> None:
    assert sdpa._LONGEST == activations.LONGEST_IN_BLOCKS
    assert sdpa._BLOCK == activations.ATTENTION_BLOCK
    assert blocks._ELEMENTS["cpu"] == activations.SCORES_ON_CPU
    assert (blocks._MOST_ROWS["cpu"], blocks._FEWEST_ROWS) == (activations._MOST_ROWS, activations._FEWEST_ROWS)
    assert head._CHUNK_ELEMENTS["cpu"] == activations.LOGITS_ON_CPU
    assert head._CHUNK_ELEMENTS_ELSEWHERE == activations.LOGITS_ELSEWHERE
    assert head._PART_ELEMENTS_ON_CPU == activations.PART_OF_LOGITS_ON_CPU
    assert head._CHUNK_TOKENS == activations.FEWEST_TOKENS
    for vocabulary in (1, 97, 4099, 8192, 50_257, 262_272, 5_000_000):
        model = ModelConfig(vocab_size=vocabulary)
        for device_type in ("cpu", "cuda"):
            chunk = activations.head_chunk(model, 1 << 24, on_cpu=device_type == "cpu")
            assert chunk == min(1 << 24, head.default_chunk(device_type, vocabulary)), (vocabulary, device_type)
    assert head_kernels.PIECE_ELEMENTS == activations.PIECE_OF_GRADIENT


@pytest.mark.parametrize("model", [SMALL, TWO_EXPERTS])
def test_on_gpus_the_experts_keep_their_first_product_alone(model: ModelConfig) -> None:
    kept = {}
    for form in ("cpu", "reference"):  # the reference is what GPUs run
        with using("experts.network", form):
            kept[form] = kept_by_autograd(build(model, 0, dtype=torch.float32), 2, 64)
    sizes = activations.Sizes(model, 2, 64, narrow=4, masked=False, on_cpu=True)
    saved = activations.expert_bytes(sizes) - activations.expert_bytes(replace(sizes, on_cpu=False))
    assert kept["cpu"] - kept["reference"] == pytest.approx(model.layers * saved, rel=2e-3)


def test_on_gpus_the_head_widens_no_embedding() -> None:
    config = config_of(LARGE_VOCABULARY, parallel={"dtype": "bf16"})
    table = LARGE_VOCABULARY.vocab_size * LARGE_VOCABULARY.hidden_size
    memory = {on_cpu: microbatch_memory(config, config.phases[0], on_cpu=on_cpu) for on_cpu in (False, True)}
    beside_logits = {on_cpu: one.head - one.layers - one.logits for on_cpu, one in memory.items()}
    assert 4 * table < beside_logits[False] < 5 * table, "the gradient"
    assert beside_logits[True] > 8 * table, "and the embedding"
