"""Where the time of a zaya1-1b step goes: shares of its parts, from torch's profiler, that add up to the whole.

While the profiler runs, modules and the functions of the step are marked with ranges. What the device does belongs
to the range in which the host launched it, and in backward to the range of the forward operation whose gradient
it computes: autograd gives both the same sequence number. Each moment belongs to one part. If two streams work,
the computation counts; communication counts if it is exposed. A moment in which the device has nothing
to do is a host gap: the profiler makes those longer, so the time of the same step without it is given as well.

On a CPU the operators are the work, and a host gap is the time between two of them.
"""

from __future__ import annotations

import heapq
import json
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.step import CONTEXT, CONTEXT_ON_CPU, TrainingStep, config_of, world_on
from zslurm.kernels.harness.timing import wait
from zslurm.train.model import attention, zaya
from zslurm.train.parallel.world import World

GAPS, OTHER, COMMUNICATION = "host gaps", "other", "communication"
PARTS = (
    "attention",
    "convolutions",
    "router",
    "experts",
    "head",
    "norms",
    "embedding",
    "optimizer",
    COMMUNICATION,
    "sums of gradients",
    OTHER,
    GAPS,
)
_MODULES = {
    "attention": "attention",
    "router": "router",
    "experts": "experts",
    "attention_entry": "norms",
    "expert_entry": "norms",
    "head_entry": "norms",
    "embedding": "embedding",
}
"""The part that each module belongs to, by the last component of its name."""
_MARKS = {"reduction": COMMUNICATION, "gathering": COMMUNICATION}
"""The part of what the step marks, where it has another name."""
_PREFIX = "part: "
_STEPS, _WARM_UP = 3, 3
_BACKWARD = "autograd::engine::evaluate_function: "
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}  # ROCm's have the same names
_COLLECTIVES = ("nccl", "rccl")


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the seconds and the share of each part of a step, largest first, and the time without the profiler."""
    small = device.type == "cpu"
    recipe, micro_batch = ("zaya1-tiny", 2) if small else ("zaya1-1b", 4)
    config = config_of(recipe, micro_batch=micro_batch, context=CONTEXT_ON_CPU if small else CONTEXT)
    with world_on(device.type) as world:
        step = TrainingStep(config, world)
        seconds = timed(step)
        about = {"model": recipe, "tokens": step.tokens, "microbatches": 1, "ranks": 1}
        yield {**about, "step_s": seconds, "tokens_per_s": step.tokens / seconds}
        shares = parts_of(trace(step, world), on_cpu=small)
    whole = sum(shares.values())
    yield {
        **about,
        "profiled_step_s": whole / _STEPS,
        "parts": {
            part: {"seconds": spent / _STEPS, "share": spent / whole}
            for part, spent in sorted(shares.items(), key=lambda item: -item[1])
        },
    }


def timed(step: TrainingStep) -> float:
    """Return the seconds of a step, of several one after the other."""
    device = step.world.device
    for _ in range(_WARM_UP):
        step.run()
    wait(device)
    started = time.perf_counter()
    for _ in range(_STEPS):
        step.run()
    wait(device)
    return (time.perf_counter() - started) / _STEPS


def trace(step: TrainingStep, world: World) -> list[dict[str, Any]]:
    """Return the events of some steps, as Chrome's trace has them."""
    on_gpu = world.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with ranges(step):
        with profile(activities=activities):  # starting the profiler for the first time is slow
            step.run()
            wait(world.device)
        with profile(activities=activities) as recorded:
            for _ in range(_STEPS):
                step.run()
            wait(world.device)
    with tempfile.TemporaryDirectory(prefix="zslurm-profile-") as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_bytes())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


@contextmanager
def ranges(step: TrainingStep) -> Iterator[None]:
    """Mark the parts of a step with ranges."""
    with ExitStack() as stack:
        for name, module in step.model.named_modules():
            part = _MODULES.get(name.rpartition(".")[2])
            if part is not None:
                _mark(module, part, stack)
        for place, function, part in (
            (attention, "qk_conv", "convolutions"),
            (zaya, "summed_losses", "head"),
        ):
            stack.enter_context(mock.patch.object(place, function, _inside(getattr(place, function), part)))
        stack.enter_context(mock.patch.object(step, "marked", _marked))
        yield


def _marked(name: str) -> Any:
    return record_function(_PREFIX + _MARKS.get(name, name))


def _mark(module: torch.nn.Module, part: str, stack: ExitStack) -> None:
    under_way: list[Any] = []

    def before(*_: object) -> None:
        mark = record_function(_PREFIX + part)
        mark.__enter__()
        under_way.append(mark)

    def behind(*_: object) -> None:
        under_way.pop().__exit__(None, None, None)

    for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(behind)):
        stack.callback(handle.remove)


def _inside(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(_PREFIX + part):
            return function(*args, **kwargs)

    return marked


# --- From events to parts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A stretch of time in which something was computed or copied, in microseconds."""

    start: float
    end: float
    part: str


def parts_of(events: Iterable[dict[str, Any]], *, on_cpu: bool) -> dict[str, float]:
    """Return the seconds of each part, host gaps among them: from the first work to the end of the last."""
    events = list(events)
    part_at = _Ranges([event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]).part_at
    if on_cpu:
        operators = (event for event in events if event.get("cat") == "cpu_op")
        found = [
            Work(each["ts"], each["ts"] + each["dur"], part_at(each["tid"], each["ts"]) or OTHER)
            for each in operators
        ]
    else:
        launches = {
            event["args"]["correlation"]: event
            for event in events
            if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
        }
        operators_by_id = {
            event["args"]["External id"]: event
            for event in events
            if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
        }
        launchers = [launches, operators_by_id]
        found = [_work(event, launchers, part_at) for event in events if event.get("cat") in _ON_DEVICE]
    return {part: spent / 1e6 for part, spent in divided(found).items()}


def _work(
    event: dict[str, Any], launchers: list[dict[int, dict[str, Any]]], part_at: Callable[[Any, float], str | None]
) -> Work:
    part = COMMUNICATION if any(word in event["name"].lower() for word in _COLLECTIVES) else None
    if part is None:
        # The call that launched it; where the trace lacks that, the operator that the profiler links it with.
        found = event.get("args", {})
        keys = (found.get("correlation"), found.get("External id"))
        launches = (known.get(key) for known, key in zip(launchers, keys, strict=True) if key is not None)
        parts = (part_at(launch["tid"], launch["ts"]) for launch in launches if launch is not None)
        part = next((each for each in parts if each is not None), None)
    return Work(event["ts"], event["ts"] + event["dur"], part or OTHER)


def divided(work: list[Work]) -> dict[str, float]:
    """Return how long each part was worked on, in the unit of the work: every moment in one part.

    Of several at once the last begun counts, and communication if there is nothing else.
    """
    spent = dict.fromkeys(PARTS, 0.0)
    if not work:
        return spent
    ordered = sorted(work, key=lambda each: each.start)
    ends = sorted({edge for each in work for edge in (each.start, each.end)})
    active: list[tuple[bool, float, int]] = []  # communication last, then the last begun first
    following = 0
    for here, there in pairwise(ends):
        while following < len(ordered) and ordered[following].start <= here:
            each = ordered[following]
            heapq.heappush(active, (each.part == COMMUNICATION, -each.start, following))
            following += 1
        while active and ordered[active[0][2]].end <= here:
            heapq.heappop(active)
        spent[ordered[active[0][2]].part if active else GAPS] += there - here
    return spent


class _Ranges:
    """Finds the part that a thread of the host was in."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        """Take operators and ranges, which nest in each thread."""
        self._threads: dict[Any, _Thread] = {}
        by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            by_thread[event["tid"]].append(event)
        for thread, its_events in by_thread.items():
            self._threads[thread] = _Thread(its_events)
        # The operation that made a node of autograd's graph is the last of its number: others only looked at it.
        self._forward: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for thread, its_events in by_thread.items():
            for event in its_events:
                number = event.get("args", {}).get("Sequence number", -1)
                if number >= 0 and not self._threads[thread].in_backward(event["ts"]):
                    part = self._threads[thread].marked(event["ts"])
                    if part is not None:
                        self._forward[number].append((event["ts"], part))
        for operations in self._forward.values():
            operations.sort()

    def part_at(self, thread: Any, moment: float) -> str | None:
        """Return the part that a thread was in, by its ranges or by the node of autograd that it evaluates."""
        if thread not in self._threads:
            return None
        here = self._threads[thread]
        marked, node = here.marked(moment), here.node(moment)
        if marked is not None:
            return marked
        if node is None:
            return None
        if "AccumulateGrad" in node["name"]:
            return "sums of gradients"
        number = node.get("args", {}).get("Sequence number", -1)
        before = [part for when, part in self._forward.get(number, ()) if when < node["ts"]]
        return before[-1] if before else None


class _Thread:
    """The ranges of a thread, and the nodes of autograd's graph that it evaluated."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        marks = [event for event in events if event["name"].startswith(_PREFIX)]
        nodes = [event for event in events if event["name"].startswith(_BACKWARD)]
        self._marks, self._nodes = _Nested(marks), _Nested(nodes)

    def marked(self, moment: float) -> str | None:
        """Return the part of the innermost range, unless a node of autograd is evaluated inside of it."""
        mark, node = self._marks.innermost(moment), self._nodes.innermost(moment)
        if mark is None or (node is not None and node["ts"] > mark["ts"]):
            return None
        return str(mark["name"].removeprefix(_PREFIX))

    def node(self, moment: float) -> dict[str, Any] | None:
        """Return the node that is evaluated."""
        return self._nodes.innermost(moment)

    def in_backward(self, moment: float) -> bool:
        """Return whether a node is evaluated outside of ranges: a layer that is computed again has its ranges."""
        return self.node(moment) is not None and self.marked(moment) is None


class _Nested:
    """Intervals of one thread, which nest."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        edges: list[tuple[float, int, float, dict[str, Any] | None]] = []
        for event in events:
            edges.append((event["ts"], 1, -event["dur"], event))
            edges.append((event["ts"] + event["dur"], 0, 0.0, None))
        stack: list[dict[str, Any]] = []
        self._moments: list[float] = []
        self._tops: list[dict[str, Any] | None] = []
        for moment, begins, _, begun in sorted(edges, key=lambda edge: edge[:3]):
            if begins and begun is not None:
                stack.append(begun)
            else:
                while stack and stack[-1]["ts"] + stack[-1]["dur"] <= moment:
                    stack.pop()
            self._moments.append(moment)
            self._tops.append(stack[-1] if stack else None)

    def innermost(self, moment: float) -> dict[str, Any] | None:
        """Return the innermost interval that holds a moment."""
        index = bisect_right(self._moments, moment) - 1
        return self._tops[index] if index >= 0 else None
