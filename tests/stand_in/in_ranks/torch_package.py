"""The stand-in for torch itself: what zslurm.job.rank and tests/faults/in_ranks need of it."""


class OutOfMemoryError(RuntimeError):
    """As torch's."""
