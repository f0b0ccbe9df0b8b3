"""Answer an evaluation on the nodes of the job that this process is in.

with answers_of_step(request, step) as ask: ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from zslurm.core.files import write_atomically
from zslurm.job.evaluation_rank import ANSWERS, WORK
from zslurm.job.ranks_step import StepShape, ranks_step
from zslurm.train.evaluation.on_ranks import ScoringRequest
from zslurm.train.evaluation.scoring import Answers, Ask, Work


@contextmanager
def answers_of_step(request: ScoringRequest, step: StepShape) -> Iterator[Ask]:
    """Start the ranks, and return what asks all of them.

    Raises:
        SlurmUnavailable: there is no srun.
        TrainError: a rank failed, or the step did not start, here or when it is asked; the others are ended.
        OutOfTime: the job's time is over, likewise.
    """
    numbers = count()
    with ranks_step(step, "zslurm.job.evaluation_rank", request.fields()) as ranks:

        def ask(work: Work) -> Answers:
            number = next(numbers)
            write_atomically(ranks.folder / WORK.format(number=number), json.dumps(work.fields()), private=True)
            answers: Answers = {}
            for rank in range(step.ranks):
                received = ranks.received(ranks.folder / ANSWERS.format(rank=rank, number=number))["answers"]
                answers |= {key: answer if isinstance(answer, str) else tuple(answer) for key, answer in received}
            return answers

        yield ask
        end = ranks.folder / WORK.format(number=next(numbers))
        write_atomically(end, json.dumps({"end": True}), private=True)
