"""Run AdamW's step by the kernel of kernels/hip/adamw.hip: one pass over a table of tensors."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, fields
from typing import Any

import torch

from zslurm.kernels.adamw.operands import Operands
from zslurm.kernels.adamw.reference import Factors, factors
from zslurm.kernels.checks import short
from zslurm.kernels.hip.tables import Row, launches


class _Factors(ctypes.Structure):
    _fields_ = [(each.name, ctypes.c_float) for each in fields(Factors)]  # as ctypes has it


def supports_update(operands: Operands, **_: Any) -> str | None:
    """Return None, or what of the operands the kernel does not take."""
    weights = operands.weights or []
    if operands.masters[0].dtype != torch.float32:
        return f"{short(operands.masters[0].dtype)} masters"
    if any(weight.dtype != torch.bfloat16 for weight in weights):
        return f"{short(weights[0].dtype)} weights"
    lists = (operands.masters, operands.gradients, operands.exp_avgs, operands.exp_avg_sqs, weights)
    if not all(tensor.is_contiguous() for tensors in lists for tensor in tensors):
        return "tensors whose elements are not contiguous"
    return None


def update(operands: Operands, **settings: Any) -> None:
    """Run `adamw`."""
    from zslurm.kernels.hip.driver import kernels

    adamw = kernels("adamw", operands.masters[0].device)
    by = _Factors(*astuple(factors(**settings)))
    lists = [operands.masters, operands.gradients, operands.exp_avgs, operands.exp_avg_sqs]
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
    weights = operands.weights
    addresses.append([weight.data_ptr() for weight in weights] if weights else [0] * len(operands.masters))
    sizes = [master.numel() for master in operands.masters]
    rows = [Row(each, size) for each, size in zip(zip(*addresses, strict=True), sizes, strict=True)]
    for launch in launches(rows, (4, 4, 4, 4, 2)):
        adamw.launch("adamw", launch.blocks, (launch.table, by))
