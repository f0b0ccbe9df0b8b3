"""Task files: what is read from them, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.evaluation.tasks.files import CHOICES, write_task
from zslurm.train.errors import DataError
from zslurm.train.evaluation.tasks.questions import questions_of
from zslurm.train.evaluation.tasks.shipped import make
from zslurm.train.evaluation.tasks.task import load_task, load_tasks, shipped

DOCUMENTS = [{"q": "a", "choices": ["x", "y"], "right": 1}]


def test_shipped_tasks_have_questions() -> None:
    assert set(shipped()) >= {"arithmetic", "arithmetic-written", "python-names", "python-programs", "stdlib-text"}
    for name in shipped():
        assert len(questions_of(load_task(name))) > 10, name
    assert len(questions_of(load_task("arithmetic"), 3)) == 3


@pytest.mark.parametrize("name", make.FILES)
def test_shipped_documents_are_what_their_program_makes(name: str) -> None:
    assert (make.HERE / name).read_text() == make.text_of(name)


def test_the_bodies_of_the_shipped_programs_pass_their_tests() -> None:
    for question in questions_of(load_task("python-programs")):
        exec(question.fields["prompt"] + question.fields["body"] + question.fields["test"], {})


def test_keys_of_the_harness_that_mean_nothing_here_are_let_pass(tmp_path: Path) -> None:
    keys = {"tag": ["x"], "metadata": {"version": 1.0}, "dataset_name": None, "should_decontaminate": True}
    task = load_task(str(write_task(tmp_path, DOCUMENTS, **CHOICES, **keys)))
    assert [metric.metric for metric in task.config.metrics] == ["acc", "acc_norm"]


def test_a_task_includes_another_file(tmp_path: Path) -> None:
    write_task(tmp_path, DOCUMENTS, "base", **CHOICES)
    (tmp_path / "other.yaml").write_text("include: base.yaml\ntask: other\n")
    assert load_task(str(tmp_path / "other.yaml")).config.doc_to_choice == "choices"
    (tmp_path / "loop.yaml").write_text("include: loop.yaml\n")
    with pytest.raises(DataError, match="includes itself"):
        load_task(str(tmp_path / "loop.yaml"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"doc_to_choice": None, "output_type": "multiple_choice"}, "doc_to_choice is missing"),
        ({"output_type": "ranking"}, "output_type: Input should be 'multiple_choice'"),
        ({"doc_to_txt": "q"}, "doc_to_txt: is no key of a task"),
        ({"task": "a b"}, r"task \(a b\) must be a name"),
        ({"data": None}, "give data: FILE.jsonl"),
        ({"metric_list": [{"metric": "f1"}]}, "metric f1: is not one of generate_until; there are: exact_match"),
        ({"metric_list": [{"metric": "pass@2"}]}, "metric pass@2 needs execution"),
        ({"repeats": 3}, "repeats above 1 need"),
        ({"execution": {"command": "true"}}, "execution needs a metric"),
        ({"execution": {"command": "true", "isolation": "limits"}}, "say so with network: true"),
        ({"execution": {"command": "true", "file": "../x"}}, "must be a plain name"),
        ({"filter_list": [{"name": "n", "filter": [{"function": "regex", "regex_pattern": "("}]}]}, "no regular"),
        ({"filter_list": [{"name": "n", "filter": [{"function": "custom"}]}]}, "function: Input should be"),
        ({"generation_kwargs": {"top_k": 3}}, "generation_kwargs.top_k: is no key"),
    ],
    ids=str,
)
def test_a_wrong_task_is_one_line_that_names_the_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_task(tmp_path, DOCUMENTS, **{"doc_to_text": "q", **keys})
    with pytest.raises(DataError, match=message) as raised:
        load_task(str(path))
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("doc_to_text: !function utils.text", "line 1: !function utils.text is Python code"),
        ("a: [", "line 1"),
        ("- a", "is no task file"),
        ("", "is no task file"),
    ],
)
def test_what_is_no_task_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_task(str(path))


def test_what_is_not_there_names_the_shipped_tasks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing: no such task file; shipped tasks: arithmetic, "):
        load_task("nothing")
    path = str(write_task(tmp_path, DOCUMENTS, **CHOICES))
    with pytest.raises(DataError, match="a task called example is given already"):
        load_tasks([path, path])


@pytest.mark.parametrize(
    ("document", "keys", "message"),
    [
        ('{"q": "a"}', CHOICES, "line 1: doc_to_choice"),
        ('{"q": "a", "choices": [], "right": 0}', CHOICES, "doc_to_choice: makes no choice"),
        ('{"q": "a", "choices": ["x"], "right": 1}', CHOICES, "doc_to_target: '1' is none of the 1 choices"),
        ('{"q": "a", "choices": ["x"], "right": -1}', CHOICES, "is none of"),
        ('{"q": "a", "choices": [1, 2], "right": 1}', CHOICES, "makes no list of strings"),
        ('{"q": 3, "right": 0}', {**CHOICES, "doc_to_choice": None, "output_type": "loglikelihood"},
         "doc_to_text: makes no text"),
        ('{"q": "a"}', {"doc_to_text": "{{other}}"}, "doc_to_text: 'other' is undefined; the document has q"),
        ('{"q": "a"}', {"doc_to_text": "{{q"}, "doc_to_text: "),
        ('{"q": "a"}', {"doc_to_text": "{{q.__class__.__mro__}}"}, "doc_to_text: "),
        ('{"q": "a"}', CHOICES, "doc_to_choice: the document has no field 'choices'; it has q"),
        ('{"q": "a", "choices": ["b", "c"], "right": 0}\n{"choices": ["b", "c"], "right": 1}', CHOICES,
         "line 2: doc_to_text: the document has no field 'q'; it has choices, right"),
        ('{"q": "\\ud800", "choices": ["b"], "right": 0}', CHOICES, "line 1: holds half of a surrogate pair"),
        ("[1]", CHOICES, "line 1: is no object"),
        ("{", CHOICES, "line 1: is not JSON"),
        ("", CHOICES, "holds no document"),
        ('{"q": "a", "choices": ["x"], "right": 0}', {**CHOICES, "num_fewshot": 1}, "1 document can be taken"),
    ],
)  # fmt: skip
def test_a_wrong_document_is_one_line_with_its_place(
    tmp_path: Path, document: str, keys: dict[str, Any], message: str
) -> None:
    path = write_task(tmp_path, [], **keys)
    (tmp_path / "example.jsonl").write_text(document + "\n")
    with pytest.raises(DataError, match=message) as raised:
        questions_of(load_task(str(path)))
    assert "\n" not in str(raised.value)


def test_a_character_of_two_halves_is_text(tmp_path: Path) -> None:
    path = write_task(tmp_path, [], doc_to_text="q", doc_to_target="q")
    (tmp_path / "example.jsonl").write_text('{"q": "\\ud83d\\ude42"}\n')
    assert [each.prompt for each in questions_of(load_task(str(path)))] == ["\N{SLIGHTLY SMILING FACE}"]


def test_a_program_that_lacks_a_field_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    from zslurm.train.evaluation.scoring import PreparedTask

    keys = {"doc_to_text": "q", "metric_list": [{"metric": "pass@1"}]}
    execution = {"command": "true", "program": "{{prompt}}"}
    path = write_task(tmp_path, DOCUMENTS, **keys, execution=execution)
    with pytest.raises(DataError, match=r"line 1: execution.program: 'prompt' is undefined"):
        PreparedTask(load_task(str(path)))
