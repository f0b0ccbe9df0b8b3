"""The products of a run that torch's TunableOp can tune, as the calls that make them: a list, without torch.

A table of TunableOp has a row for each call of BLAS: operator, transpositions, M, N, K and leading dimensions.
These follow from how torch multiplies, so a call is tuned by making it: `torch.nn.functional.linear` and its
gradients, as the model does. `tests/bench/test_gemm_tuning.py` compares these calls with a real model's.

Left out, with the reason:

    experts         have grouped kernels (kernels/grouped_gemm), and the rows of an expert differ in every step
    attention, convolutions     have kernels with no BLAS in them
    head.logits, forward and weight gradient of 16-bit operands: torch gives products with an fp32 result
                    (`out_dtype`) to BLAS without TunableOp
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zslurm.train.config import TrainConfig
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape, Pass, matmuls

PASSES: tuple[Pass, ...] = ("forward", "input gradient", "weight gradient")
_BIASED = ("router.down", "router.first", "router.second")


@dataclass(frozen=True)
class LinearCall:
    """A call of `F.linear(x [rows, inputs], weight [outputs, inputs], bias)`, and the passes of it to tune.

    Attributes:
        name: of the product, as in `zslurm plan size`.
        dtype: of the operands: bf16, fp32 or fp64.
        rows: tokens.
        outputs, inputs: sizes of the weight.
        bias: whether one is added.
        passes: those that TunableOp can tune.
    """

    name: str
    dtype: str
    rows: int
    outputs: int
    inputs: int
    bias: bool
    passes: tuple[Pass, ...]

    @property
    def flops(self) -> float:
        """Return the FLOPs of one pass: all passes have the same."""
        return 2.0 * self.rows * self.outputs * self.inputs


def tunable_calls(config: TrainConfig, most_sequences: Iterable[int]) -> list[LinearCall]:
    """Return the calls of all phases, each once; `most_sequences` of a rank in a step, for each phase.

    A run on GPUs is meant: on CPUs TunableOp does nothing.
    """
    calls: dict[tuple[object, ...], LinearCall] = {}
    for phase, sequences in zip(config.phases, most_sequences, strict=True):
        for product in matmuls(config, MicrobatchShape.of(phase, sequences), 0, on_cpu=False):
            if product.kind == "dense" and product.pass_name == "forward":
                call = _call(product, config.parallel.dtype)
                calls.setdefault((call.rows, call.outputs, call.inputs, call.bias, call.passes), call)
    return list(calls.values())


def _call(product: Matmul, dtype: str) -> LinearCall:
    head = product.name.startswith("head.")
    passes: tuple[Pass, ...] = ("input gradient",) if head and dtype == "bf16" else PASSES
    bias = product.name in _BIASED
    return LinearCall(product.name, dtype, product.m, product.n, product.k, bias, passes)
