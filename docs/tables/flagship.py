"""zaya1-8b on nodes of eight MI300X, as planned: products, step time, communication."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from docs.tables.markdown import table
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cli.run.dry_run_lines import phase_lines
from zslurm.config import yaml12
from zslurm.config.load import recipes
from zslurm.config.spec import RunSpec
from zslurm.submit.phase_plan import Communication, PhasePlan, phase_json, phase_plans
from zslurm.submit.size import card_of, run_size
from zslurm.train.context.bytes import context_bytes
from zslurm.train.plan.communication import RankGroup, step_traffic
from zslurm.train.plan.gpu_parts import NOW, REFERENCE
from zslurm.train.plan.memory import plan_memory
from zslurm.train.plan.rates import Rates
from zslurm.train.plan.step_time import PARTS_OF_A_STEP
from zslurm.train.shapes import parameter_counts, tensor_table


def _flagship(nodes: int, **phase: Any) -> RunSpec:
    """Return the published model on nodes of eight MI300X; `phase` changes its last phase."""
    body = yaml12.parse(recipes()["zaya1-8b"], "zaya1-8b").data
    phases = [*body["phases"][:-1], body["phases"][-1] | phase]
    sections = {
        "phases": phases,
        "parallel": body["parallel"] | {"collectives": "two_level"},
        "cluster": {"gpus_per_node": 8, "gpu_type": "mi300x"},
        "slurm": {"nodes": nodes},
    }
    return RunSpec.model_validate(body | sections)


def _long_context(nodes: int) -> RunSpec:
    """Return the published model in its phase of 131,072 tokens."""
    name = "zaya1-8b-131k"
    phases = RunSpec.model_validate({"phases": yaml12.parse(recipes()[name], name).data["phases"]}).phases
    return _flagship(nodes).model_copy(update={"phases": phases})


def _phases_of(spec: RunSpec) -> tuple[Communication, list[PhasePlan]]:
    sent = Communication.of(spec)
    memory = plan_memory(spec, spec.world_size, on_cpu=False, local=spec.ranks_per_node)
    return sent, phase_plans(spec, memory, sent.traffic, on_cpu=False)


def size_products() -> str:
    """Return the forward products of zaya1-8b's first phase."""
    spec = _flagship(128)
    first = run_size(spec, card_of(spec, None, ""), Rates(None, on_cpu=False), on_cpu=False).phases[0]
    rows = [
        (
            f"`{product.name}`",
            *(f"{size:,}" for size in (product.m, product.n, product.k, product.batch, product.calls)),
            f"{product.flops / 1e9:,.3g}",
            f"{100 * product.total_flops / first.all_flops:.1f} %",
        )
        for product in first.products
        if product.pass_name == "forward"
    ]
    return table(("product", "M", "N", "K", "batch", "calls", "GFLOP", "of the FLOPs"), rows)


def size_steps() -> str:
    """Return where the time of zaya1-8b's steps goes, as assumed."""
    rows = []
    for nodes in (16, 128):
        spec = _flagship(nodes)
        for size in run_size(spec, card_of(spec, None, ""), Rates(None, on_cpu=False), on_cpu=False).phases[::2]:
            time = size.time
            assert time is not None
            assert size.mfu is not None
            parts = astuple(time)
            shares = (f"{100 * part / time.seconds:.0f} %" for part in parts)
            mfu = f"{100 * size.mfu:.0f} %"
            rows.append((nodes, f"`{size.phase.name}`", f"{time.seconds:.2f} s", mfu, *shares))
    head = ("nodes", "phase", "step", "MFU", *PARTS_OF_A_STEP)
    return table(head, rows)


def flagship_communication() -> str:
    """Return what zaya1-8b waits for communication, by the model of the network."""
    rows = []
    for nodes in (16, 64, 128):
        sent, phases = _phases_of(_flagship(nodes))
        total = sent.traffic.total
        for plan in (phases[0], phases[-1]):
            assert plan.compute_s is not None
            assert plan.exposed_s is not None
            assert plan.exposed_share is not None
            rows.append(
                (
                    nodes,
                    f"`{plan.phase.name}`",
                    f"{sent.traffic.buckets} of {show_bytes(sent.traffic.bucket_bytes)}",
                    f"{total.seconds:.2f} s",
                    f"{100 * total.latency_s / total.seconds:.1f} %",
                    f"{plan.context.seconds:.3f} s",
                    f"{plan.compute_s:.2f} s",
                    f"{plan.exposed_s:.3f} s",
                    f"{100 * plan.exposed_share:.1f} %",
                )
            )
    head = (
        "nodes",
        "phase",
        "buckets",
        "ZeRO-1's communication",
        "of it, latency",
        "context groups",
        "computation",
        "exposed",
        "of the step",
    )
    return table(head, rows)


def two_levels() -> str:
    """Return what a rank of 1,024 sends in a step of zaya1-8b, in two levels and flat."""
    spec = _flagship(128)
    sent, phases = _phases_of(spec)
    forward_s = (phases[0].compute_s or 0.0) / 3
    # As it was: flat, in buckets of 64 MiB.
    small = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"bucket_mb": 64.0})})
    before = step_traffic(small, RankGroup(128, 8, two_level=False))
    rows = []
    for name, traffic in (("two levels", sent.traffic), ("flat", sent.flat), ("flat, buckets of 64 MiB", before)):
        total = traffic.total
        levels = (show_bytes(size) if size else "0" for size in (total.inside, total.rail, total.off_rail))
        latency = f"{100 * total.latency_s / total.seconds:.0f} %"
        exposed = f"{traffic.exposed_s(forward_s, 2 * forward_s):.2f} s"
        messages = f"{traffic.exchange.messages:,}"
        rows.append((name, *levels, messages, traffic.buckets, f"{total.seconds:.2f} s", latency, exposed))
    head = (
        "collectives",
        "inside the node",
        "along the rail",
        "off the rail",
        "messages of the exchange, at most",
        "buckets",
    )
    return table((*head, "predicted time", "of it, latency", "exposed in `pretrain-1`"), rows)


def context_groups() -> str:
    """Return memory and bytes of zaya1-8b's sequences of 32k on 128 nodes, by the ranks that share each."""
    rows = []
    for size in (1, 2, 4, 8):
        spec = _flagship(128, context_parallel=size)
        phase = _phases_of(spec)[1][-1]
        sent = context_bytes(spec.model, 32768, 1, size, "all_gather", 2)
        fewer = -(-phase.phase.global_batch // (127 * 8 // size))
        fits = phase.data_parallel <= phase.phase.global_batch
        step = (
            (
                f"{phase.data_parallel} x {phase.sequences}",
                f"{fewer / phase.sequences:g} times",
                f"{phase.context.seconds:.3f} s",
            )
            if fits
            else ("refused: 512 sequences for 1,024 ranks", "-", "-")
        )
        moved = (sent.attention_forward, sent.compression * sent.attention_forward, sent.halos_forward)
        rows.append((size, show_bytes(phase.activation_bytes), *map(show_bytes, moved), *step))
    head = ("ranks", "a microbatch", "keys and values", "multi-head attention's", "halos")
    return table((*head, "data-parallel ranks x sequences", "step with a node less", "time in a step"), rows)


def long_context_dry_run() -> str:
    """Return what a dry run of zaya1-8b-131k on 128 nodes states of its phase."""
    return _dry_run(_long_context(128))


def flagship_dry_run() -> str:
    """Return what a dry run of zaya1-8b on 128 nodes states of its phases."""
    return _dry_run(_flagship(128))


def _dry_run(spec: RunSpec) -> str:
    sent, phases = _phases_of(spec)
    shown = [phase_json(phase, spec.ranks_per_node) for phase in phases]
    return "\n".join(["```text", *phase_lines(shown, sent.as_json()), "```", ""])


def flagship_expectations() -> str:
    """Return tokens, steps, memory, time and GPU-hours of zaya1-8b's phases on 128 nodes, without faults."""
    spec = _flagship(128)
    plans = _phases_of(spec)[1]
    sizes = run_size(spec, card_of(spec, None, ""), Rates(None, on_cpu=False), on_cpu=False).phases
    rows, hours = [], 0.0
    for plan, size in zip(plans, sizes, strict=True):
        assert size.time is not None
        steps = sum(segment.steps for segment in size.phase.segments)
        took = steps * size.time.seconds / 3600
        hours += took
        row = [f"`{plan.phase.name}`", f"{plan.phase.tokens / 1e12:g} trillion", f"{plan.phase.context:,}"]
        row += [f"{steps:,}", show_bytes(plan.peak_bytes), f"{size.time.seconds:.2f} s"]
        rows.append([*row, f"{took / 24:.1f}", f"{took * spec.world_size / 1e3:,.0f} thousand"])
    total = f"{hours * spec.world_size / 1e3:,.0f} thousand"
    rows.append(["all", *[""] * 5, f"{hours / 24:.1f}", total])
    head = ("phase", "tokens", "context", "steps", "memory of a rank", "longest step", "days", "GPU-hours")
    return table(head, rows)


def moved_bytes() -> str:
    """Return the bytes that a rank of 1,024 moves in a step of zaya1-8b, of one microbatch, before and now."""
    model, tokens = _flagship(128).model, 16_384
    logits, embedding = tokens * model.vocab_size, model.vocab_size * model.hidden_size
    experts = sum(row.numel for row in tensor_table(model) if ".experts." in row.name)
    share = parameter_counts(model).total // 1024
    rows = [
        # Bytes of an element: what is read and written, in the passes that there are.
        ("head: logits and their gradient", logits * REFERENCE.head_bytes, logits * NOW.head_bytes),
        ("head: sums of its chunks", 15 * embedding * 16, 3 * embedding * 16),
        ("experts: gradients of the first microbatch", experts * (2 + 2 + 4), experts * 4),
        ("experts: gradients of each further one", experts * (2 + 2 + 4 + 4), experts * (4 + 4)),
        ("norm of the gradients", share * (4 + 8 + 8 + 8 + 8), share * 4),
    ]
    shown = [(what, *(f"{count / 1e9:,.3g} GB" for count in counts)) for what, *counts in rows]
    return table(("what", "before", "now"), shown)


TABLES = (
    moved_bytes,
    context_groups,
    flagship_dry_run,
    long_context_dry_run,
    flagship_expectations,
    flagship_communication,
    two_levels,
    size_products,
    size_steps,
)
