"""Requests are answered by several processes as by one: those of a command, and those of a run."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.cli.trained import CONTEXT, trained_run
from tests.train.models import ROPE_BASE, scrambled, tiny_config
from zslurm.train.errors import DataError, TrainError
from zslurm.train.evaluation.on_group import score_on_group
from zslurm.train.evaluation.on_ranks import ScoringRequest, local_answers
from zslurm.train.evaluation.scoring import Answers, Ask, ModelScorer, Work
from zslurm.train.hub import TokenizerFiles
from zslurm.train.inference.batch_generation import Prompt
from zslurm.train.inference.text import TextCoder
from zslurm.train.parallel.local_ranks import local_ranks
from zslurm.train.parallel.world import World

WORK = Work(
    pairs=tuple((tuple(range(3, 5 + place)), (place + 9, place + 2)) for place in range(7)),
    prompts=tuple(Prompt((5, 6 + place), 4, temperature=1.0, seed=place) for place in range(5)),
    stops=((),) * 5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def request_of_run(run: Path) -> ScoringRequest:
    files = TokenizerFiles(run.parent.parent / "data" / "tokenizer.json")
    return ScoringRequest(run / "checkpoints" / "step-00000080", files, "fp32", "cpu", 5000.0, CONTEXT)


def test_processes_answer_what_one_answers(
    request_of_run: ScoringRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zslurm.train.inference.likelihood.PASS_TOKENS", 20)
    with local_answers(request_of_run, 2) as ask:
        likely = ask(Work(pairs=WORK.pairs))
        texts = ask(Work(prompts=WORK.prompts, stops=WORK.stops))
    with local_answers(request_of_run) as ask:
        assert texts == ask(Work(prompts=WORK.prompts, stops=WORK.stops))
        alone = ask(Work(pairs=WORK.pairs))
    for place, answer in likely.items():
        assert answer == pytest.approx(cast(tuple[float, bool], alone[place]), rel=1e-5)


def test_a_rank_that_is_killed_is_named_and_the_others_are_ended(request_of_run: ScoringRequest) -> None:
    with (
        pytest.raises(TrainError, match="rank 1 of --ranks was killed; is there memory for all ranks"),
        local_answers(request_of_run, 2) as ask,
    ):
        ask(Work(pairs=WORK.pairs))
        processes = sorted(psutil.Process(each.pid).pid for each in multiprocessing.active_children())
        psutil.Process(processes[1]).kill()
        ask(Work(pairs=WORK.pairs))
    assert multiprocessing.active_children() == []


def test_a_rank_that_cannot_read_the_weights_says_so(request_of_run: ScoringRequest, tmp_path: Path) -> None:
    wrong = ScoringRequest(tmp_path, *tuple(vars(request_of_run).values())[1:])
    with pytest.raises(TrainError, match=r"rank [01] of --ranks: "), local_answers(wrong, 2) as ask:
        ask(Work(pairs=WORK.pairs))


def test_requests_and_whose_answers_are_wanted_survive_a_file(request_of_run: ScoringRequest) -> None:
    assert Work.of(json.loads(json.dumps(WORK.fields()))) == WORK
    assert ScoringRequest.of(json.loads(json.dumps(request_of_run.fields()))) == request_of_run


class _NoCoder:
    """Stands for a tokenizer whose text of a token is its number."""

    tokenizer = None
    end = ()

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _scorer() -> ModelScorer:
    model = scrambled(tiny_config(), torch.float32)
    return ModelScorer(model, cast(TextCoder, _NoCoder()), rope_base=ROPE_BASE, context=64)


def _score(ask: Ask) -> list[Answers]:
    return [ask(Work(pairs=WORK.pairs)), ask(Work(prompts=WORK.prompts, stops=WORK.stops))]


def _fail(ask: Ask) -> list[Answers]:
    ask(Work(pairs=WORK.pairs))
    raise DataError("the second question cannot be asked")


def rank_of_a_run(
    rank: int, ranks: int, port: int, score: Callable[[Ask], list[Answers]], pipe: Connection
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    world = World(rank, ranks, ranks, torch.device("cpu"), dist.group.WORLD, store)
    try:
        pipe.send(score_on_group(world, _scorer(), score))
    except DataError as error:
        pipe.send(str(error))
    dist.destroy_process_group()


def answers_on(ranks: int, score: Callable[[Ask], list[Answers]]) -> list[list[Answers] | str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with local_ranks(rank_of_a_run, ranks, store.port, score) as pipes:
        return [pipe.recv() for pipe in pipes]


def test_the_ranks_of_a_run_answer_together_and_all_have_the_result() -> None:
    (alone,) = answers_on(1, _score)
    assert [len(each) for each in alone] == [7, 5]
    assert answers_on(2, _score) == [alone, alone]


def test_a_wrong_question_fails_on_all_ranks_of_a_run() -> None:
    assert answers_on(2, _fail) == ["the second question cannot be asked"] * 2
