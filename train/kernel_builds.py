"""Build the kernels that a run will launch, for a GPU that this machine need not have.

Two layers of the model run forward and backward on the device `meta`, on the shapes of every phase, with a driver
of Triton that compiles and launches nothing (kernels/code_object.py): so what is built is what the run asks for,
with the same sizes, formats and options. The products of Newton-Schulz steps run likewise on the shapes of its
matrices, and HIP sources are built as they are.

Not built: what torch.compile makes of a layer, the kernels of other packages, and launches with sizes of no whole
microbatch. A rank builds these itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zslurm.kernels.arch import Arch
from zslurm.kernels.code_object import compiling_for
from zslurm.kernels.dispatch import using
from zslurm.kernels.hip.build import build as build_source
from zslurm.kernels.hip.compilers import BuildError
from zslurm.train.config import TrainConfig
from zslurm.train.model.zaya import Zaya, empty_model
from zslurm.train.optim.newton_schulz import coefficient_schedule, orthogonalise_
from zslurm.train.parallel.world import DTYPES
from zslurm.train.shapes import owned_table

_LOG = logging.getLogger(__name__)
_LAYERS = 2
"""The first layer has no residual stream, all others are alike."""
_MATRICES = 16
"""Matrices of one shape that a rank works on together: enough for the kernels' rule to take them."""


def load_driver() -> bool:
    """Load Triton's driver of this machine's GPU, which it builds into its cache first; False without a GPU."""
    if not torch.cuda.is_available():
        return False
    from triton.runtime import driver

    driver.active.get_current_target()
    return True


def build_kernels(config: TrainConfig, arch: Arch) -> list[str]:
    """Build what a run launches on an architecture; return what could not be built, a line each."""
    problems = []
    if config.optim.matrices == "muon":
        try:
            build_source("muon", arch.name)
        except BuildError as error:
            problems.append(f"muon: {error}")
    dtype = DTYPES[config.parallel.dtype]
    # Our own kernels, whichever the setting is: a package builds its kernels itself.
    try:
        with compiling_for(arch), using("grouped_gemm", "triton" if arch.is_amd else "auto"):
            _run_layers(config, dtype)
            _run_optimizer(config)
    except (
        Exception
    ) as error:  # of the compiler, of whatever kind: ranks build without this, and say why they cannot
        _LOG.debug("kernels could not be built", exc_info=True)
        problems.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return problems


def _run_layers(config: TrainConfig, dtype: torch.dtype) -> None:
    model_config = config.model.model_copy(update={"layers": min(_LAYERS, config.model.layers)})
    model = empty_model(model_config, dtype=dtype, device="meta")
    sums = _Sums(model, DTYPES[config.parallel.gradient_dtype])
    model.sum_gradients_by(None if config.parallel.compile else sums)
    for batch, length, isolated in microbatches(config):
        tokens_BS = torch.empty(batch, length, dtype=torch.int64, device="meta")
        document_BS = tokens_BS if isolated else None
        for sums.adds in (False, True):  # the first microbatch of a step, and those that follow
            _losses(model, config, tokens_BS, document_BS).backward()
            model.zero_grad(set_to_none=True)
        with torch.no_grad():  # as in evaluations
            _losses(model, config, tokens_BS, document_BS)


class _Sums:
    """Sums of gradients on the device `meta`."""

    def __init__(self, model: Zaya, dtype: torch.dtype) -> None:
        self._parameters, self._dtype = dict(model.named_parameters()), dtype
        self.adds = False

    def adder(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: None

    def gradient_sum(self, name: str) -> _Sum:
        return _Sum(self, torch.empty_like(self._parameters[name], dtype=self._dtype))


class _Sum:
    def __init__(self, sums: _Sums, total: Tensor) -> None:
        self._sums, self._total = sums, total

    def begin(self) -> tuple[Tensor, bool]:
        return self._total, self._sums.adds

    def end(self) -> None:
        pass


def _losses(model: Zaya, config: TrainConfig, tokens_BS: Tensor, document_BS: Tensor | None) -> Tensor:
    rope_base, z_weight = config.phases[0].rope_base, config.optim.z_loss
    losses, _ = model.losses(tokens_BS, tokens_BS, rope_base=rope_base, z_weight=z_weight, document_BS=document_BS)
    return losses.objective


def microbatches(config: TrainConfig) -> Iterator[tuple[int, int, bool]]:
    """Yield kinds of microbatches: sequences, tokens of each on a rank, whether documents are kept apart."""
    kinds = (
        (phase.micro_batch, phase.context // phase.context_parallel, config.data.isolates(phase))
        for phase in config.phases
    )
    yield from dict.fromkeys(kinds)


def _run_optimizer(config: TrainConfig) -> None:
    muon = config.optim.muon
    dtype = torch.bfloat16 if muon.dtype == "bf16" else torch.float32
    schedule = coefficient_schedule(muon.coefficients, muon.steps)
    tensors = (info for info in owned_table(config.model, config.optim) if info.whole)
    shapes = {(info.numel // info.whole // info.shape[-1], info.shape[-1]) for info in tensors}
    for rows, columns in sorted(shapes):
        x_KMN = torch.empty(_MATRICES, rows, columns, dtype=dtype, device="meta")
        orthogonalise_(x_KMN, schedule, norms_K=x_KMN.new_empty(_MATRICES))
