"""What the model is asked, character by character as lm-evaluation-harness asks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.evaluation.tasks.files import CHOICES, write_task
from zslurm.train.evaluation.tasks.questions import Question, answer_values, questions_of
from zslurm.train.evaluation.tasks.task import load_task

DOCUMENTS: list[dict[str, Any]] = [
    {"q": f"Q{number}?", "choices": [f"a{number}", f"b{number}"], "right": number % 2} for number in range(6)
]


def asked(folder: Path, documents: list[dict[str, Any]] = DOCUMENTS, **keys: Any) -> list[Question]:
    return questions_of(load_task(str(write_task(folder, documents, **keys))))


def test_choices_follow_their_question_behind_the_delimiter(tmp_path: Path) -> None:
    first, second, *_ = asked(tmp_path, **CHOICES)
    assert first.pairs == (("Q0?", " a0"), ("Q0?", " b0"))
    assert (first.golds, second.golds) == ((0,), (1,))
    (first, *_) = asked(tmp_path, **{**CHOICES, "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}"})
    assert first.pairs == (("Q0?", " a0"), ("Q0?", " b0"))
    (first, *_) = asked(tmp_path, **{**CHOICES, "doc_to_choice": {"one": "yes", "two": "no"}})
    assert first.pairs == (("Q0?", " yes"), ("Q0?", " no"))


def test_choices_can_be_the_contexts(tmp_path: Path) -> None:
    keys = {**CHOICES, "doc_to_text": "right", "doc_to_target": "{{q}}", "target_delimiter": ""}
    _, second, *_ = asked(tmp_path, **keys)
    assert second.pairs == (("a1", "Q1?"), ("b1", "Q1?"))
    assert second.golds == (1,)


def test_examples_come_first_with_their_answers(tmp_path: Path) -> None:
    keys = {"num_fewshot": 2, "fewshot_config": {"sampler": "first_n"}, "description": "Choose.\n"}
    first, second, third, *_ = asked(tmp_path, **CHOICES, **keys)
    assert first.pairs[0][0] == "Choose.\nQ1? b1\n\nQ2? a2\n\nQ0?", "never the question itself"
    assert second.pairs[0][0] == "Choose.\nQ0? a0\n\nQ2? a2\n\nQ1?"
    assert third.pairs[0][0] == "Choose.\nQ0? a0\n\nQ1? b1\n\nQ2?"


def test_examples_are_drawn_with_the_seed_of_the_harness(tmp_path: Path) -> None:
    (tmp_path / "shots.jsonl").write_text(
        '{"q": "S0", "a": "t0"}\n{"q": "S1", "a": "t1"}\n{"q": "S2", "a": "t2"}\n'
    )
    keys = {"doc_to_text": "q", "fewshot_data": "shots.jsonl", "num_fewshot": 1}
    prompts = [each.prompt for each in asked(tmp_path, **keys, doc_to_target="{{a if a is defined else ''}}")]
    # random.Random(1234).sample([0, 1, 2], 1), six times
    import random

    rng = random.Random(1234)
    assert prompts == [f"S{(k := rng.sample(range(3), 1)[0])} t{k}\n\nQ{number}?" for number in range(6)]


def test_a_prefix_of_the_answer_is_part_of_the_question(tmp_path: Path) -> None:
    keys = {"doc_to_text": "q", "doc_to_target": "{{choices[0]}}", "gen_prefix": "Answer:"}
    (first, *_) = asked(tmp_path, **keys, num_fewshot=1, fewshot_config={"sampler": "first_n"})
    assert first.prompt == "Q1? Answer: a1\n\nQ0? Answer:"
    assert first.answers == ("a0",)


def test_data_is_named_as_the_harness_names_it(tmp_path: Path) -> None:
    path = write_task(
        tmp_path,
        DOCUMENTS,
        data=None,
        dataset_path="json",
        dataset_kwargs={"data_files": {"test": "example.jsonl", "train": "example.jsonl"}},
        test_split="test",
        **CHOICES,
    )
    assert len(questions_of(load_task(str(path)))) == 6


def test_filters_come_before_the_comparison(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "doc_to_text": "q",
        "doc_to_target": "#### 7",
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["(?s).*#### ", ","], "ignore_case": True}],
        "filter_list": [
            {"name": "strict", "filter": [{"function": "regex"}, {"function": "take_first"}]},
            {
                "name": "last",
                "filter": [{"function": "regex", "group_select": -1, "regex_pattern": "(x[0-9])|([0-9]+)"}],
            },
        ],
    }
    task = load_task(str(write_task(tmp_path, DOCUMENTS, **keys)))
    (question, *_) = questions_of(task)
    for answer, strict, last in [
        ("3 so #### 7", 1, 1),
        ("7", 0, 1),
        ("7 or 8", 0, 0),
        ("x7 #### 7,", 1, 1),
        ("nothing", 0, 0),
    ]:
        values = answer_values(task, question, [answer])
        assert values == {"exact_match,strict": (strict, 1.0), "exact_match,last": (last, 1.0)}, answer


@pytest.mark.parametrize("samples", [["b", "a", "a"], ["a", "b", "a"]])
def test_samples_can_vote(tmp_path: Path, samples: list[str]) -> None:
    keys: dict[str, Any] = {
        "doc_to_text": "q",
        "doc_to_target": "a",
        "repeats": 3,
        "generation_kwargs": {"do_sample": True},
        "filter_list": [{"name": "vote", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]}],
    }
    task = load_task(str(write_task(tmp_path, DOCUMENTS, **keys)))
    assert answer_values(task, questions_of(task)[0], samples) == {"exact_match,vote": (1.0, 1.0)}


def test_one_more_example_is_drawn_where_neither_split_is_named(tmp_path: Path) -> None:
    """lm-evaluation-harness compares the names of the two splits, and two that are missing are equal."""
    import random

    files = {"train": "example.jsonl", "validation": "example.jsonl"}
    keys = {"dataset_kwargs": {"data_files": files}, "training_split": "train", "validation_split": "validation"}
    path = write_task(tmp_path, DOCUMENTS, data=None, dataset_path="json", num_fewshot=1, **keys, **CHOICES)
    rng, expected = random.Random(1234), []
    for number in range(6):
        expected.append(next(each for each in rng.sample(range(6), 2) if each != number))
    found = [int(each.pairs[0][0][1]) for each in questions_of(load_task(str(path)))]
    assert found == expected
