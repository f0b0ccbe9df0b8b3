"""A published folder -> one of our checkpoints, which holds weights and no optimizer state.

The checkpoint has step 0 and one state, the fp32 masters (bf16 is widened, which is exact); the balancing biases
are its one buffer; its manifest's `state` marks it as weights only, with what belongs to them (RoPE base,
context, special tokens). A tokenizer is next to the shards. A run starts from it when its `init` names it, and
never by finding it among its own checkpoints.

It is written as if by so many ranks that one rank's shard has at most `max_shard_bytes`; that is also the memory
it takes, since a shard is filled whole, by range, from wherever its tensors are. The commit is checkpoint_tools'.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zslurm.checkpoint_tools import (
    BufferEntry,
    Entry,
    Partition,
    ShardReport,
    Tensor,
    assemble,
    begin,
    commit,
    discard,
    list_checkpoints,
    partition,
    write_shard,
)
from zslurm.checkpoint_tools.durable import writing
from zslurm.checkpoint_tools.plain import StrPath, reason_of
from zslurm.train.data.build.tokenizer import file_sha256
from zslurm.train.data.schema import TOKENIZER_FILE
from zslurm.train.errors import HubError, HubIOError
from zslurm.train.hub.export import Report, silent
from zslurm.train.hub.folder import BUFFER_ELEMENTS
from zslurm.train.hub.run_facts import to_state
from zslurm.train.hub.tokenizer_files import TokenizerFiles
from zslurm.train.hub.weights import Weights, balancing_bias
from zslurm.train.shapes import tensor_table

DEFAULT_SHARD_BYTES = 10**9
_STATE = "master"


@dataclass(frozen=True)
class Imported:
    """A finished import."""

    path: Path
    bytes: int
    parameters: int
    shards: int
    tokenizer: bool


def import_weights(
    weights: Weights,
    root: StrPath,
    *,
    tokenizer: TokenizerFiles | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    report: Report = silent,
) -> Imported:
    """Write `weights` as the checkpoint of step 0 in `root`, a directory of checkpoints that holds none.

    Raises:
        HubError: `root` holds checkpoints or is no directory.
        HubIOError, CheckpointError: the file system refused.
    """
    root = Path(root)
    if root.exists() and (not root.is_dir() or list_checkpoints(root)):
        raise HubError(f"{root}: holds checkpoints, or is no directory; name a directory for this one alone")
    model = weights.settings.model
    table = tensor_table(model)
    ranks = max(1, -(-sum(row.numel for row in table) * 4 // max_shard_bytes))
    plan = partition(table, ranks)
    made = not root.exists()
    with writing(root):
        root.parent.mkdir(parents=True, exist_ok=True)
    directory = begin(root, 0, f"import-{secrets.token_hex(4)}")
    try:
        shards = _write_shards(weights, plan, directory, report)
        sha256 = _copy_tokenizer(tokenizer, directory)
        manifest = assemble(
            shards,
            step=0,
            tokens=0,
            model=model.model_dump(mode="json"),
            cursor={},
            state=to_state(weights.settings, weights.origin, sha256),
            tensors=[Tensor(row.name, row.shape, {_STATE: "F32"}) for row in table],
            buffers=["balance/bias"],
        )
        path = commit(root, directory, manifest)
    except BaseException:
        discard(directory)
        if made:
            with suppress(OSError):
                root.rmdir()
        raise
    return Imported(
        path=path,
        bytes=sum(shard.size for shard in shards),
        parameters=sum(row.numel for row in table),
        shards=ranks,
        tokenizer=tokenizer is not None,
    )


def _write_shards(weights: Weights, plan: Partition, directory: Path, report: Report) -> list[ShardReport]:
    chunk = np.empty(plan.flat_share, np.float32)
    done, total = 0, plan.flat_length * chunk.itemsize
    reports = []
    for rank in range(plan.world_size):
        entries = []
        for extent in plan.extents(rank):
            values = chunk[extent.in_chunk]
            for start in range(0, values.size, BUFFER_ELEMENTS):
                piece = values[start : start + BUFFER_ELEMENTS]
                weights.read(extent.tensor, extent.start + start, piece)
                done += piece.nbytes
                report(done, total)
            entries.append(Entry(extent.tensor, _STATE, extent.start, extent.stop, values))
        buffers = [BufferEntry("balance/bias", balancing_bias(weights))] if rank == 0 else []
        reports.append(write_shard(directory, rank, plan.world_size, entries, buffers))
    report(total, total)
    return reports


def _copy_tokenizer(tokenizer: TokenizerFiles | None, directory: Path) -> str | None:
    if tokenizer is None:
        return None
    tokenizer.check()
    try:
        tokenizer.copy_to(directory, {})
    except (OSError, shutil.Error) as error:
        raise HubIOError(f"{directory}: the tokenizer cannot be copied: {reason_of(error)}") from error
    return file_sha256(directory / TOKENIZER_FILE)
