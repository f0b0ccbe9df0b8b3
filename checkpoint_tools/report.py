"""What each rank reports of its shard, and how all reports become the manifest.

A `ShardReport` is data: the rank that wrote a shard makes it, sends it as JSON text by whatever means the
caller has (a key of the rendezvous store), and rank 0 assembles the manifest from all of them. No
collective, and no look at another rank's files: network file systems cache attributes, so a stat from rank
0 proves nothing.

Cost: a report is about 100 bytes per extent and 11 per block: a rank with 100 MB in 50 extents reports 5 kB.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zslurm.checkpoint_tools.errors import Incomplete, Mismatch
from zslurm.checkpoint_tools.format import layout
from zslurm.checkpoint_tools.format.manifest import Buffer, Manifest, ShardFile, StoredExtent, Tensor
from zslurm.checkpoint_tools.plain import in_words, load_json
from zslurm.checkpoint_tools.quantities import counted


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A shard that is written and synced: `size` bytes, and the CRC32 of each block of `block_size` bytes."""

    rank: int
    world_size: int
    file: str
    size: int
    block_size: int
    crcs: tuple[int, ...]
    extents: tuple[StoredExtent, ...]
    buffers: tuple[Buffer, ...]

    def to_json(self) -> str:
        """Return the report as JSON text, for `from_json` on another rank."""
        fields = {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "extents": [(e.tensor, e.state, e.start, e.stop, e.dtype, e.key) for e in self.extents],
            "buffers": [(buffer.name, buffer.dtype, buffer.shape) for buffer in self.buffers],
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> ShardReport:
        """Return the report that `to_json` wrote.

        Raises:
            Mismatch: the text is no such report.
        """
        try:
            fields = load_json(text)
            file = fields["file"]
            extents = tuple(
                StoredExtent(tensor, state, start, stop, dtype, file, key)
                for tensor, state, start, stop, dtype, key in fields.pop("extents")
            )
            buffers = tuple(
                Buffer(name, dtype, tuple(shape), file) for name, dtype, shape in fields.pop("buffers")
            )
            return cls(crcs=tuple(fields.pop("crcs")), extents=extents, buffers=buffers, **fields)
        except (AttributeError, KeyError, TypeError, ValueError) as cause:
            raise Mismatch(
                f"not the report of a shard: {in_words(cause)}; do all ranks run the same version?"
            ) from cause


def assemble(
    reports: Iterable[ShardReport],
    *,
    step: int,
    tokens: int,
    model: Mapping[str, Any],
    cursor: Mapping[str, Any],
    state: Mapping[str, Any],
    tensors: Iterable[Tensor],
    buffers: Collection[str] = (),
) -> Manifest:
    """Return the manifest of a checkpoint whose shards are all written, one report per rank, in any order.

    Args:
        reports: one per rank; they must agree on the world size and the block size.
        step: optimizer steps that the run had done.
        tokens: tokens that it had trained on.
        model: opaque JSON mapping, returned as it is; `cursor` and `state` too.
        cursor: where the data order continues.
        state: counters of the optimizer.
        tensors: the whole table with the states and dtypes that *should* be there: a state that every rank
            forgot is found here, not at the next resume.
        buffers: the names of the buffers that should be there.

    Raises:
        Incomplete: a rank, a buffer or an element is missing, comes twice, or has another dtype than
            the table.
    """
    ordered = sorted(reports, key=lambda report: report.rank)
    _check_ranks(ordered)
    written = {buffer.name for report in ordered for buffer in report.buffers}
    if missing := set(buffers) - written:
        raise Incomplete(f"buffer {min(missing)!r} was written by no rank")
    if unexpected := written - set(buffers):
        raise Incomplete(f"buffer {min(unexpected)!r} was written, but should not be in this checkpoint")
    manifest = Manifest(
        step=step,
        tokens=tokens,
        world_size=ordered[0].world_size,
        model=model,
        cursor=cursor,
        state=state,
        block_size=ordered[0].block_size,
        tensors=tuple(tensors),
        buffers=tuple(buffer for report in ordered for buffer in report.buffers),
        files=tuple(ShardFile(report.file, report.size, report.crcs) for report in ordered),
        extents=tuple(extent for report in ordered for extent in report.extents),
    )
    manifest.check()
    return manifest


def _check_ranks(ordered: list[ShardReport]) -> None:
    """Check that `ordered` is one report of each rank of one and the same save."""
    if not ordered:
        raise Incomplete("no rank reported a shard")
    first = ordered[0]
    for rank, report in enumerate(ordered):
        if (report.world_size, report.block_size) != (first.world_size, first.block_size):
            raise Incomplete(
                f"rank {report.rank} reported another world size or block size than rank {first.rank}"
            )
        if report.rank != rank:
            raise Incomplete(f"rank {min(rank, report.rank)} did not report exactly one shard")
        if report.file != layout.shard_name(rank, first.world_size):
            raise Incomplete(f"rank {rank} reported {report.file!r}, not its own shard")
    if len(ordered) != first.world_size:
        raise Incomplete(f"rank {len(ordered)} did not report a shard; {counted(first.world_size, 'rank')} must")
