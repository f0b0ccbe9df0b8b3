"""What the host does for a layer and microbatch in the form that GPUs run: calls, and the time to choose kernels.

A small model of zaya1-8b's structure runs on a CPU by the steps that a GPU takes. Of each operation of `kernels/`
that it calls, the time until an implementation runs is measured with the operands of that call, as if they had not
been seen before, and as in every later microbatch. Kernels in Triton are counted on the device `meta` for gfx942.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import write_result
from tests.train.models import tiny_config
from zslurm.kernels import triton_tools
from zslurm.kernels.arch import GFX942
from zslurm.kernels.code_object import compiling_for
from zslurm.kernels.dispatch import Operation, using
from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import Zaya, build, empty_model

_TOKENS = (4, 32)
_REPEATS, _ROUNDS = 50, 7
LAYERS_OF_8B = 40

# Views, new memory, and what the device `meta` makes of shapes.
_WITHOUT_WORK = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided detach empty empty_like empty_permuted empty_strided expand flatten mT narrow new_empty "
        "permute promote_types reshape select slice split_with_sizes squeeze t transpose unbind unflatten "
        "unsqueeze view view_as"
    ).split()
)

Call = tuple[Operation, tuple[Any, ...], dict[str, Any]]


def run() -> None:
    """Count and time, and write results/host_time.json."""
    torch.set_num_threads(1)
    few, more = (_calls_on_a_gpu(layers) for layers in (2, 3))
    calls = _calls_of_a_layer()
    names = sorted({operation.name for operation, _, _ in calls})
    times = {name: _times([call for call in calls if call[0].name == name]) for name in names}
    counts = Counter(operation.name for operation, _, _ in calls)
    rows: list[dict[str, Any]] = [
        {"operation": name, "calls": counts[name], "first_us": times[name][0], "later_us": times[name][1]}
        for name in names
    ]
    first, later = (sum(row["calls"] * row[key] for row in rows) for key in ("first_us", "later_us"))
    write_result(
        "host_time",
        {
            "operators_of_torch_per_layer": more[0] - few[0],
            "launches_in_triton_per_layer": more[1] - few[1],
            "operations_per_layer": len(calls),
            "operations": rows,
            "choosing_per_layer_us": {"checked and chosen": round(first, 1), "remembered": round(later, 1)},
            "choosing_per_microbatch_of_40_layers_ms": {
                "checked and chosen": round(first * LAYERS_OF_8B / 1e3, 2),
                "remembered": round(later * LAYERS_OF_8B / 1e3, 2),
            },
        },
    )


def _config(layers: int) -> ModelConfig:
    return tiny_config(layers=layers, hidden_size=64, router="mlp")


def _step(model: Zaya, tokens_BS: torch.Tensor) -> None:
    losses, _ = model.losses(tokens_BS, tokens_BS, rope_base=1e4)
    losses.objective.backward()
    model.zero_grad(set_to_none=True)


def _on_cpu(layers: int) -> Callable[[], None]:
    model = build(_config(layers), 0, dtype=torch.bfloat16)
    tokens_BS = torch.randint(0, model.config.vocab_size, _TOKENS)
    return lambda: _step(model, tokens_BS)


def _calls_of_a_layer() -> list[Call]:
    """The calls of operations that three layers make and two do not, in the order of their names."""
    recorded: dict[int, list[Call]] = {}
    original = Operation.__call__

    for layers in (2, 3):
        calls: list[Call] = []

        def note(self: Operation, *args: Any, _calls: list[Call] = calls, **kwargs: Any) -> Any:
            _calls.append((self, args, kwargs))
            return original(self, *args, **kwargs)

        Operation.__call__ = note  # type: ignore[method-assign]
        try:
            with using("experts.network", "reference"):
                _on_cpu(layers)()
        finally:
            Operation.__call__ = original  # type: ignore[method-assign]
        recorded[layers] = calls
    few = Counter(operation.name for operation, _, _ in recorded[2])
    taken: list[Call] = []
    for call in recorded[3]:
        if few[call[0].name]:
            few[call[0].name] -= 1
        else:
            taken.append(call)
    return sorted(taken, key=lambda call: call[0].name)


def _times(calls: list[Call]) -> tuple[float, float]:
    """Microseconds until an implementation runs: of new operands, and of those that were seen before."""

    def first() -> None:
        for operation, args, kwargs in calls:
            operation.check(*args, **kwargs)
            operation.check_memory(*args, **kwargs)
            operation.choose(*args, **kwargs)

    chosen = {operation._key(args, kwargs): True for operation, args, kwargs in calls}

    def later() -> None:
        for operation, args, kwargs in calls:
            chosen.get(operation._key(args, kwargs))
            operation.check_memory(*args, **kwargs)

    with using("experts.network", "reference"):
        found = []
        for function in (first, later):
            rounds = []
            for _ in range(_ROUNDS):
                start = time.process_time()
                for _ in range(_REPEATS):
                    function()
                rounds.append((time.process_time() - start) / _REPEATS / len(calls))
            found.append(round(1e6 * min(rounds), 2))
    return found[0], found[1]


def _calls_on_a_gpu(layers: int) -> tuple[int, int]:
    """Operators of torch that compute or copy, and launches of Triton, of a microbatch on gfx942, both ways."""
    tokens_BS = torch.empty(_TOKENS, dtype=torch.int64, device="meta")
    launches = 0

    def count(*_: Any, **__: Any) -> None:
        nonlocal launches
        launches += 1

    with compiling_for(GFX942):
        model = empty_model(_config(layers), dtype=torch.bfloat16, device="meta")
        _step(model, tokens_BS)  # imports and compiles
        original = triton_tools.launch
        users = [module for module in list(sys.modules.values()) if getattr(module, "launch", None) is original]
        for module in users:
            vars(module)["launch"] = count
        try:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                _step(model, tokens_BS)
        finally:
            for module in users:
                vars(module)["launch"] = original
    operators = sum(
        event.name.startswith("aten::")
        and event.name not in _WITHOUT_WORK
        and not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))
        for event in profiled.events()
    )
    return operators, launches
