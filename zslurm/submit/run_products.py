"""What `zslurm bench gemm` measures of a run, each once: products, parts of a microbatch, and Muon's steps."""

from __future__ import annotations

from typing import Any

from zslurm.config.spec import RunSpec
from zslurm.submit.size import Card, run_size
from zslurm.train.plan.matmuls import Matmul
from zslurm.train.plan.newton_schulz import KIND as NEWTON_SCHULZ
from zslurm.train.plan.newton_schulz import matrix_batches
from zslurm.train.plan.parts import PARTS, PASSES, calls, part_flops
from zslurm.train.plan.rates import Rates


def run_products(spec: RunSpec, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Return each product of a run's phases once, without convolutions, which have kernels of the model's.

    Scores and values of attention are one product, `attention`, forward and backward. Attention of ranks that
    share sequences has parts of several sizes, and is left out.
    """
    by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    run = run_size(spec, Card(None, None), Rates(None, on_cpu=on_cpu), on_cpu=on_cpu)
    for size in run.phases:
        for product in size.products:
            if product.kind == "convolution" or product.pass_name == "recompute":
                continue
            if product.kind != "attention":
                row = _row(product, product.name, product.pass_name, product.flops, 1)
            elif product.name == "attention.scores" and product.pass_name == "forward":
                if size.phase.context_parallel > 1:
                    continue
                group = spec.model.query_heads // spec.model.kv_heads
                row = _row(product, "attention", "forward", 2 * product.flops, group)
                again = {**row, "pass": "backward", "flops": 4 * product.flops}
                by_key.setdefault(_key(again), again)
            else:
                continue
            by_key.setdefault(_key(row), row)
    return list(by_key.values())


def run_parts(spec: RunSpec, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Return each part of a microbatch, forward and backward; none of phases whose ranks share sequences."""
    run = run_size(spec, Card(None, None), Rates(None, on_cpu=on_cpu), on_cpu=on_cpu)
    by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    for size, memory in zip(run.phases, run.memory.microbatches, strict=True):
        if size.phase.context_parallel > 1:
            continue
        for part_name in PARTS:
            for pass_name in PASSES:
                row = {
                    "product": part_name, "pass": pass_name, "kind": "part", "m": size.microbatch.tokens,
                    "n": size.microbatch.local, "k": spec.model.hidden_size, "batch": 1, "group": 1,
                    "flops": sum(part_flops(product, part_name, pass_name) for product in size.products)
                    / calls(spec.model, part_name),
                }  # fmt: skip
                about = {"rope_base": size.phase.rope_base, "peak_bytes": memory.peak}
                by_key.setdefault(_key(row), {**row, "model": spec.model.model_dump(mode="json"), **about})
    return list(by_key.values())


def run_newton_schulz(spec: RunSpec, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Return Muon's Newton-Schulz steps of each shape of matrix once, in the format in which they are made."""
    device = "cpu" if on_cpu else "cuda"
    rows = []
    for batch in matrix_batches(spec):
        count = batch.in_a_call(device)
        rows.append({
            "product": "muon.newton_schulz", "pass": "optimizer", "kind": NEWTON_SCHULZ, "m": batch.rows,
            "n": batch.columns, "k": batch.steps, "batch": count, "group": 1, "flops": count * batch.flops,
            "dtype": batch.dtype, "coefficients": spec.optim.muon.coefficients,
        })  # fmt: skip
    return rows


def measured_products(spec: RunSpec, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Return all that `zslurm bench gemm --run` measures: products, parts of a microbatch, and Muon's steps."""
    kinds = (run_products, run_parts, run_newton_schulz)
    return [row for of_run in kinds for row in of_run(spec, on_cpu=on_cpu)]


def _row(product: Matmul, name: str, pass_name: str, flops: float, group: int) -> dict[str, Any]:
    sizes = {"m": product.m, "n": product.n, "k": product.k, "batch": product.batch, "group": group}
    return {"product": name, "pass": pass_name, "kind": product.kind, **sizes, "flops": flops}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for name, value in row.items() if name != "flops")
