"""The checkpoint format: partition, write, commit, read, keep. Needs numpy only, is faster with zlib-ng.

    checkpoints/step-00000400/
      manifest.json                       what it holds, where, and the checksums of everything
      shard-00003-of-00008.safetensors    what rank 3 owned; any safetensors reader opens it

Saving, on every rank (`begin` on rank 0 only, which sends the others the path). `tensors` is the table, the
same on all ranks: `Tensor(name, shape, {"master": "F32"})` of each, with `whole=K` where ranks own matrices whole.

    directory = begin(root, step=400, nonce="attempt2-a81f")
    entries = [
        Entry(extent.tensor, "master", extent.start, extent.stop, master_chunk[extent.in_chunk])
        for extent in partition(tensors, world_size).extents(rank)
    ]
    report = write_shard(directory, rank, world_size, entries)      # send report.to_json() to rank 0

and on rank 0, with the reports of all ranks, `ShardReport.from_json` of each:

    manifest = assemble(
        reports, step=400, tokens=10**9, model={"layers": 40}, cursor={"counter": 51200}, state={"phase": 0},
        tensors=tensors,
    )
    commit(root, directory, manifest)                               # now, and not before, it is saved
    prune(root, keep_last=3)

Loading, on any number of ranks:

    newest = next(found for found in list_checkpoints(root) if found.complete)
    with Checkpoint.open(newest.path) as checkpoint:
        for extent in partition(tensors, world_size).extents(rank):
            checkpoint.read(extent.tensor, "master", extent.start, extent.stop, master_chunk[extent.in_chunk])

Looking into one, in a notebook (paths may be text everywhere):

    checkpoint = Checkpoint.open(str(newest.path))
    first, *others = checkpoint.names()
    values = checkpoint.numpy(first)              # a whole tensor in its shape; state="momentum" for another state
    weights = checkpoint.state_dict()             # everything, by name

Every error is a `CheckpointError` of a kind that a caller can act on (errors.py).
"""

from __future__ import annotations

from zslurm.checkpoint_tools.commit import begin, commit, discard
from zslurm.checkpoint_tools.errors import (
    CheckpointError,
    Damaged,
    Incomplete,
    InUse,
    Mismatch,
    NoSpace,
    NotACheckpoint,
    ReadFailed,
    VersionTooNew,
    WriteFailed,
)
from zslurm.checkpoint_tools.format.manifest import (
    BLOCK_SIZE,
    Buffer,
    Manifest,
    ShardFile,
    StoredExtent,
    Tensor,
)
from zslurm.checkpoint_tools.format.manifest_json import fingerprint
from zslurm.checkpoint_tools.format.partition import (
    ALIGN,
    Balance,
    Batch,
    Extent,
    Matrix,
    Partition,
    Placement,
    TensorRow,
    partition,
)
from zslurm.checkpoint_tools.listing import Listing, list_checkpoints, prunable, prune
from zslurm.checkpoint_tools.local_tier import forget_copies, keep_copy, local_tier
from zslurm.checkpoint_tools.lock import Holder, Lock, acquire, holder_of
from zslurm.checkpoint_tools.offline.compare import Comparison, Difference, Statistics, compare, statistics
from zslurm.checkpoint_tools.offline.reshape import ReshapePlan, plan_reshape, reshape
from zslurm.checkpoint_tools.offline.verify import Damage, Verification, verify
from zslurm.checkpoint_tools.read import Checkpoint
from zslurm.checkpoint_tools.report import ShardReport, assemble
from zslurm.checkpoint_tools.write import BufferEntry, Entry, write_shard
