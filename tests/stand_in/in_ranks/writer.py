"""The stand-in for zslurm.train.checkpointing.writer: the name that tests/faults/in_ranks puts its faults on."""

from zslurm.checkpoint_tools import write_shard

__all__ = ["write_shard"]
