"""Answer the requests of an evaluation on the ranks of a run, between two steps of its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from zslurm.train.errors import DataError
from zslurm.train.evaluation.scoring import Answers, Ask, ModelScorer, Work
from zslurm.train.parallel.world import World

T = TypeVar("T")


def score_on_group(world: World, scorer: ModelScorer, score: Callable[[Ask], T]) -> T:
    """Call `score` on the first rank, while all ranks answer what it asks; return its result on every rank.

    Raises:
        DataError: `score` raised it; on every rank.
    """
    if not world.is_first:
        while isinstance(work := _shared(world, None), Work):
            _gathered(world, scorer.answer(work, world.rank, world.size))
        outcome, problem = work
    else:

        def ask(work: Work) -> Answers:
            _shared(world, work)
            return _gathered(world, scorer.answer(work, 0, world.size))

        outcome, problem = None, ""
        try:
            outcome = score(ask)
        except DataError as error:
            problem = str(error)
        _shared(world, (outcome, problem))
    if problem:
        raise DataError(problem)
    return cast(T, outcome)


def _shared(world: World, message: Any) -> Any:
    """Return the first rank's message on every rank."""
    box = [message]
    dist.broadcast_object_list(box, group=world.group, group_src=0, device=world.device)
    return box[0]


def _gathered(world: World, answers: Answers) -> Answers:
    """Return the answers of all ranks on the first one, and on the others nothing."""
    every: list[Any] | None = [None] * world.size if world.is_first else None
    dist.gather_object(answers, every, group=world.group, group_dst=0)
    return {index: answer for answers_of_rank in every or () for index, answer in answers_of_rank.items()}
