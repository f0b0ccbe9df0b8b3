"""A node's own copy of the shards that its ranks wrote last, for restarts on the same node.

    LOCAL/0123456789abcdef/                             one directory for each run, named after its checkpoints'
      step-00000400.shard-00003-of-00008.safetensors    the same bytes as the shard of that name

A copy is only ever a cache: it is used if the manifest, which is with the checkpoint itself, gives it the
same size and the same checksums, block by block; a missing, damaged or outdated one is passed over
for the shard itself. So nothing here is synced, and losing all of it loses nothing.

LOCAL is a disk of the node (NVMe), or /dev/shm, whose memory it then takes. Each rank keeps one shard, and for
the time of a save two.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from zslurm.checkpoint_tools.durable import remove, writing
from zslurm.checkpoint_tools.errors import WriteFailed
from zslurm.checkpoint_tools.format import layout
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.checkpoint_tools.report import ShardReport
from zslurm.checkpoint_tools.write import BufferEntry, Entry, write_shard


def local_tier(local: StrPath, root: StrPath) -> Path:
    """Return the directory inside `local` that belongs to the checkpoints in `root`."""
    local = Path(local)
    root = Path(root)
    return local / hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]


def keep_copy(
    tier: StrPath, step: int, report: ShardReport, entries: Iterable[Entry], buffers: Iterable[BufferEntry]
) -> Path:
    """Write a copy of the shard that `report` describes, from the same memory, into `tier`; returns the copy.

    Raises:
        NoSpace, WriteFailed: the file system refused, or the bytes are not the shard's. The run continues.
    """
    tier = Path(tier)
    final = tier / layout.copy_name(step, report.file)
    draft = tier / f".{final.name}.tmp"
    with writing(tier):
        tier.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove(draft)
        draft.mkdir()
        try:
            copy = write_shard(
                draft,
                report.rank,
                report.world_size,
                entries,
                buffers,
                block_size=report.block_size,
                durable=False,
            )
            if (copy.size, copy.crcs) != (report.size, report.crcs):
                raise WriteFailed(f"{final}: the copy differs from the shard; memory changed while it was written")
            (draft / report.file).rename(final)
        finally:
            remove(draft)
    return final


def forget_copies(tier: StrPath, rank: int, *, but: Path | None = None) -> None:
    """Remove the copies that `rank` keeps in `tier`, all `but` one; what resists is left."""
    tier = Path(tier)
    copies_of_rank = re.compile(rf"step-\d+\.shard-{rank:05d}-of-\d+\.safetensors")
    with suppress(OSError):
        for path in tier.iterdir():
            if copies_of_rank.fullmatch(path.name) and path != but:
                remove(path)
        if but is None:
            tier.rmdir()
