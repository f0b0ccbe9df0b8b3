"""Continue a prompt on the nodes of the job that this process is in, whose ranks divide the keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from zslurm.job.generation_rank import TOKEN
from zslurm.job.ranks_step import StepShape, ranks_step
from zslurm.train.decoding import READY, DecodingRequest


def tokens_of_step(request: DecodingRequest, step: StepShape) -> Iterator[int]:
    """Start the ranks, and yield the tokens as they are chosen.

    Raises:
        SlurmUnavailable: there is no srun.
        TrainError: a rank failed, or the step did not start; the others are ended.
    """
    with ranks_step(step, "zslurm.job.generation_rank", request.fields()) as ranks:
        for number in count():
            path = ranks.folder / TOKEN.format(number=number)
            token: int | None = ranks.received(path)["token"]
            if token is None:
                return
            if token != READY:
                yield token
            path.unlink(missing_ok=True)
