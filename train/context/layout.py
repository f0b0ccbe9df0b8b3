"""Cut sequences into zig-zag chunks. Nothing here needs torch.

Of c ranks that share a sequence, rank i holds chunks i and 2c - 1 - i of 2c equal ones, one after the other. With
causal attention an early chunk is little work and a late one much: every such pair is the same. If 2c does
not divide the sequence, its last chunks are padded up.

    c = 3:   chunks   0  1  2  3  4  5
             rank     0  1  2  2  1  0
"""

from __future__ import annotations

from collections.abc import Iterable

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import ModelConfig
from zslurm.train.errors import ConfigError
from zslurm.train.sections.phases import PhaseConfig


def chunk_tokens(context: int, ranks: int) -> int:
    """Return the tokens of a chunk; every rank holds two chunks."""
    return -(-context // (2 * ranks))


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of the two chunks that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def reach(model: ModelConfig) -> int:
    """Return how many tokens before a token its queries and keys are made of."""
    return sum(model.conv_widths) - 2


def fits(model: ModelConfig, context: int, ranks: int) -> bool:
    """Return whether a sequence of `context` tokens can be divided over `ranks` ranks; see `check_chunks`."""
    return ranks == 1 or (context >= 2 * ranks and chunk_tokens(context, ranks) >= reach(model))


def check_chunks(model: ModelConfig, context: int, ranks: int) -> None:
    """Check that a sequence of `context` tokens can be divided over `ranks` ranks.

    Raises:
        ConfigError: it has fewer tokens than chunks, or a chunk is shorter than what the convolutions look back.
    """
    if fits(model, context, ranks):
        return
    if context < 2 * ranks:
        raise ConfigError(
            f"context_parallel: {ranks} cuts a sequence into {2 * ranks} chunks, but it has "
            f"{counted(context, 'token')}; use longer sequences, or "
            f"context_parallel: {_fewer_ranks(context, 1, ranks)}"
        )
    tokens, needed = chunk_tokens(context, ranks), reach(model)
    raise ConfigError(
        f"context_parallel: {ranks} cuts a sequence of {counted(context, 'token')} into chunks of {tokens}, but "
        f"model.conv_widths look back {counted(needed, 'token')}, which must be in one chunk; "
        f"use context_parallel: {_fewer_ranks(context, needed, ranks)}"
    )


def check_phases(model: ModelConfig, phases: Iterable[PhaseConfig]) -> None:
    """Check that the ranks of every phase can share its sequences.

    Raises:
        ConfigError: see `check_chunks`; it names the phase.
    """
    for index, phase in enumerate(phases):
        try:
            check_chunks(model, phase.context, phase.context_parallel)
        except ConfigError as error:
            raise ConfigError(f"phases[{index}].{error}") from error


def _fewer_ranks(context: int, needed: int, ranks: int) -> int:
    """Return the largest divisor of `ranks` whose chunks have enough tokens; it fits into a node as they do."""
    fewer = (size for size in range(ranks - 1, 1, -1) if not ranks % size and context >= 2 * size)
    return next((size for size in fewer if chunk_tokens(context, size) >= needed), 1)
