"""`zslurm eval`: tasks on a run that was really trained, from the command line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Zslurm
from tests.train.evaluation.harness_tasks import with_harness, write_task

SENTENCE = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is fetched from the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Path]:
    """Tasks that a model which was trained on one sentence can do."""
    words = SENTENCE.split()
    choose = [
        {"begin": " ".join(words[:cut]), "words": [words[cut], "nothing of all this"], "right": 0}
        for cut in range(2, 8)
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    return {
        "choice": write_task(
            folder, choose, task="choice", output_type="multiple_choice",
            doc_to_text="{{begin}}", doc_to_choice="{{words}}", doc_to_target="{{right}}",
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        "text": write_task(
            folder, [{"text": SENTENCE}, {"text": SENTENCE + " für 12 €"}], task="text",
            output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
            metric_list=[{"metric": "byte_perplexity"}],
        ),
        "written": write_task(
            folder,
            [{"begin": " ".join(words[:cut]), "next": words[cut]} for cut in range(2, 6)],
            task="written", output_type="generate_until",
            doc_to_text="{{begin}}", doc_to_target="{{next}}",
            generation_kwargs={"until": ["lazy"], "max_gen_toks": 12},
            filter_list=[{"name": "word", "filter": [
                {"function": "regex", "regex_pattern": r"(\w+)"}, {"function": "take_first"}]}],
            metric_list=[{"metric": "exact_match"}],
        ),
    }  # fmt: skip


@with_harness
def test_a_model_is_scored_on_what_it_was_trained_on(
    zslurm: Zslurm, tasks: dict[str, Path], tmp_path: Path
) -> None:
    given = ["--tasks", *tasks.values(), "--out", tmp_path / "out.json", "--samples", tmp_path / "samples.jsonl"]
    done = zslurm.ok("eval", "first", *given, "--json")
    assert done.json == json.loads((tmp_path / "out.json").read_text())
    assert done.json["complete"] is True
    by_task = {each["task"]: each for each in done.json["results"]}
    assert by_task["choice"]["metrics"] == {"acc": 1.0, "acc_norm": 1.0}
    assert by_task["choice"]["stderr"] == {"acc": 0.0, "acc_norm": 0.0}
    assert by_task["choice"]["documents"] == 6
    assert 1 < by_task["text"]["metrics"]["byte_perplexity"] < 2
    assert by_task["text"]["higher_is_better"] == {"byte_perplexity": False}
    assert by_task["written"]["metrics"] == {"exact_match,word": 1.0}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(each["task"], each["doc_id"]) for each in samples] == [
        (task, index) for task, count in (("choice", 6), ("text", 2), ("written", 4)) for index in range(count)
    ]
    assert samples[-1]["resps"] == [[" over the "]], "up to the stop string"


@with_harness
def test_tasks_of_a_folder_groups_and_tasks_with_python_are_known_by_name(
    zslurm: Zslurm, tasks: dict[str, Path]
) -> None:
    """The harness's own pass@k is such a metric: a function of all samples of a question."""
    folder = tasks["choice"].parent
    (folder / "counting.py").write_text(
        "def pass_at_2(references, predictions):\n"
        "    return float(any('jumps' in each for each in predictions[0]))\n"
        "def samples(resps, docs):\n"
        "    return [list(those) for those in resps]\n"
    )
    programs = write_task(
        folder, [{"begin": "The quick brown fox"}, {"begin": "the lazy"}], task="programs",
        output_type="generate_until", doc_to_text="{{begin}}", doc_to_target="", repeats=2,
        generation_kwargs={"do_sample": True, "temperature": 0.01, "max_gen_toks": 6, "until": []},
        filter_list=[{"name": "all", "filter": [{"function": "custom", "filter_fn": "FILTER"}]}],
        metric_list=[{"metric": "METRIC", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    text = programs.read_text().replace('"METRIC"', "!function counting.pass_at_2")
    programs.write_text(text.replace('"FILTER"', "!function counting.samples"))
    (folder / "both.yaml").write_text(
        json.dumps({"group": "both", "task": ["choice", "written"], "aggregate_metric_list": [
            {"metric": "acc", "aggregation": "mean", "weight_by_size": True}]})
    )  # fmt: skip
    said = zslurm.ok("eval", "first", "--include-path", folder, "--tasks", "both,prog*", "--json").json
    by_task = {each["task"]: each["metrics"] for each in said["results"]}
    assert by_task["programs"] == {"pass_at_2,all": 0.5}
    assert by_task["both"] == {"acc": 1.0}
    assert by_task["choice"]["acc"] == by_task["written"]["exact_match,word"] == 1.0


@with_harness
def test_ranks_divide_the_questions_and_give_the_same_bits(zslurm: Zslurm, tasks: dict[str, Path]) -> None:
    alone, shared = (
        zslurm.ok("eval", "first", "--tasks", *tasks.values(), "--ranks", ranks, "--json").json for ranks in "12"
    )
    for one, two in zip(alone["results"], shared["results"], strict=True):
        assert one["metrics"] == two["metrics"]
        assert one["stderr"] == two["stderr"]


@with_harness
def test_scores_are_a_table(zslurm: Zslurm, tasks: dict[str, Path]) -> None:
    done = zslurm.ok("eval", "first", "--tasks", f"{tasks['choice']},{tasks['written']}", "--num-fewshot", "1")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert ["choice", "acc", "1.0000", "0.0000"] in lines
    assert ["written", "exact_match,word", "1.0000", "0.0000"] in lines


@with_harness
def test_scores_are_among_the_events_and_in_the_report_of_the_run(
    zslurm: Zslurm, tasks: dict[str, Path], tmp_path: Path
) -> None:
    zslurm.ok("eval", "first", "--tasks", tasks["choice"], "--limit", "2")
    event = json.loads(zslurm.ok("logs", "--events", "first", "--json").stdout.splitlines()[-1])
    assert (event["action"], event["checkpoint"], event["step"]) == ("score", "step-00000080", 80)
    assert event["scores"] == {"choice/acc": 1.0, "choice/acc_norm": 1.0}
    assert "step-00000080 was scored by " in zslurm.ok("logs", "--events", "first").stdout
    zslurm.ok("report", "first", "--out", tmp_path / "report.md")
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "| choice/acc | 1.0000 | 0.0000 | 80 | zslurm eval |" in lines


def test_without_the_harness_one_line_says_what_to_install(
    zslurm: Zslurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = zslurm("eval", "first", "--tasks", "hellaswag")
    assert (done.code, done.stdout) == (2, "")
    line = "zslurm: this needs lm_eval, which is not installed here: pip install 'zslurm-train[eval]'\n"
    assert done.stderr == line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["first"], 2, "--tasks is missing: names of tasks of lm-evaluation-harness, or task files"),
        (["nobody", "--tasks", "choice"], 3, "nobody"),
        (["first", "--tasks", "choice", "--limit", "0"], 2, "--limit"),
        (["first", "--tasks", "choice", "--include-path", "no/where"], 2, "no/where: there is no such folder"),
        (["first", "--tasks", "choice", "--out", "no/where/x.json"], 2, "there is no such folder"),
        (["first", "--tasks", "choice", "--out", "."], 2, ".: is a directory; name a file"),
        (["first", "--tasks", "choice", "--nodes", "2"], 2, "--nodes 2 needs --slurm, or a job of so many nodes"),
        (["first", "--tasks", "choice", "--time", "30"], 2, "--time is the limit of the job of --slurm"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_one_line(zslurm: Zslurm, arguments: list[str], code: int, message: str) -> None:
    refused(zslurm, arguments, code, message)


def refused(zslurm: Zslurm, arguments: list[Any], code: int, message: str) -> None:
    done = zslurm("eval", *arguments)
    assert (done.code, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@with_harness
def test_a_wrong_task_is_one_line(zslurm: Zslurm, tasks: dict[str, Path], tmp_path: Path) -> None:
    folder, choice = tasks["choice"].parent, ["first", "--tasks", tasks["choice"]]
    refused(zslurm, [*choice, "--out", "/proc/x.json"], 1, "zslurm: /proc/x.json: cannot be written")
    refused(zslurm, [*choice, "--tokenizer", "/dev/null"], 2, "tokenizer")
    refused(zslurm, [*choice, tasks["choice"]], 2, "a task called choice is given already; name it once")
    keys = {"doc_to_text": "{{q}}", "doc_to_target": "{{r}}", "target_delimiter": ""}
    keys["output_type"] = "loglikelihood"
    empty = write_task(folder, [{"q": "a", "r": ""}], task="empty", **keys)
    (before := tmp_path / "before.json").write_text("of an earlier run")
    refused(
        zslurm, ["first", "--tasks", empty, "--out", before], 2,
        "empty.yaml: a choice ('') adds no token to its question",
    )  # fmt: skip
    assert before.read_text() == "of an earlier run"
    long = write_task(folder, [{"q": "a", "r": "東京 " * 40}], task="long", **keys)
    refused(zslurm, ["first", "--tasks", long], 2, "tokens, the context 32")
    (folder / "long.jsonl").unlink()
    refused(zslurm, ["first", "--tasks", long], 2, "long.yaml: ")
    field = write_task(folder, [{"q": "a"}], task="field", **keys)
    refused(zslurm, ["first", "--tasks", field], 2, "field.yaml: ")
    torn = folder / "torn.yaml"
    torn.write_text("task: torn\noutput_type: [")
    refused(zslurm, ["first", "--tasks", torn], 2, "torn.yaml: ")
    absent = folder / "absent.yaml"
    refused(zslurm, ["first", "--tasks", absent], 2, f"{absent}: no such task or file; ")
    unsafe = write_task(folder, [{"q": "a"}], task="unsafe", output_type="generate_until", doc_to_text="{{q}}",
                        doc_to_target="", unsafe_code=True)  # fmt: skip
    refused(zslurm, ["first", "--tasks", unsafe], 2, "runs the programs that the model writes")


@with_harness
def test_what_was_scored_before_a_failure_stays(zslurm: Zslurm, tasks: dict[str, Path], tmp_path: Path) -> None:
    long = write_task(
        tasks["choice"].parent, [{"q": "a"}], task="long", output_type="generate_until", doc_to_text="{{q}}",
        doc_to_target="", generation_kwargs={"max_gen_toks": 32, "until": []},
    )  # fmt: skip
    done = zslurm("eval", "first", "--tasks", tasks["choice"], long, "--out", tmp_path / "part.json")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith(
        "long.yaml: generation_kwargs.max_gen_toks (32) leaves no room for a prompt in the context of 32 tokens"
    )
    part = json.loads((tmp_path / "part.json").read_text())
    assert (part["complete"], [each["task"] for each in part["results"]]) == (False, ["choice"])


@with_harness
def test_a_checkpoint_in_no_run_is_scored_as_an_export(
    zslurm: Zslurm, tasks: dict[str, Path], run: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run / "checkpoints" / "step-00000080", copied)
    tokenizer = ["--tokenizer", run.parent.parent / "data" / "tokenizer.json"]
    refused(zslurm, [copied, "--tasks", tasks["choice"], *tokenizer], 2, "copied: is in no run")
    known = ["--rope-base", "5000", "--context", "32", *tokenizer, "--dtype", "fp32"]
    zslurm.ok("checkpoint", "export", copied, tmp_path / "exported", *known)
    said = [
        zslurm.ok("eval", each, "--tasks", tasks["text"], "--json").json for each in (tmp_path / "exported", run)
    ]
    assert said[0]["results"] == said[1]["results"]
