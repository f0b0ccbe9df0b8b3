"""`zslurm eval`: tasks on a run that was really trained, from the command line."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.commands import Zslurm
from tests.waiting import wait_for


def write_task(folder: Path, documents: list[dict[str, Any]], **keys: Any) -> Path:
    name = keys["task"]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"data": f"{name}.jsonl", **keys}))  # JSON is YAML
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Path]:
    """Tasks that a model which was trained on one sentence can do."""
    sentence = "The quick brown fox jumps over the lazy dog."
    words = sentence.split()
    choose = [
        {"begin": " ".join(words[:cut]), "words": [words[cut], "nothing of all this"], "right": 0}
        for cut in range(2, 8)
    ]
    return {
        "choice": write_task(
            tmp_path, choose, task="choice", output_type="multiple_choice",
            doc_to_text="begin", doc_to_choice="words", doc_to_target="right",
        ),
        "text": write_task(
            tmp_path, [{"text": sentence}, {"text": sentence + " für 12 €"}], task="text",
            output_type="loglikelihood_rolling", doc_to_target="text",
        ),
        "written": write_task(
            tmp_path,
            [{"begin": " ".join(words[:cut]), "next": words[cut]} for cut in range(2, 6)],
            task="written",
            doc_to_text="begin", doc_to_target="next",
            generation_kwargs={"until": ["lazy"], "max_gen_toks": 12},
            filter_list=[{"name": "word", "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}]}],
        ),
    }  # fmt: skip


def test_a_model_is_scored_on_what_it_was_trained_on(
    zslurm: Zslurm, tasks: dict[str, Path], tmp_path: Path
) -> None:
    given = ["--tasks", *tasks.values(), "--out", tmp_path / "out.json", "--samples", tmp_path / "samples.jsonl"]
    said = zslurm.ok("eval", "first", *given, "--json").json
    assert said == json.loads((tmp_path / "out.json").read_text())
    by_task = {each["task"]: each for each in said["results"]}
    assert by_task["choice"]["metrics"] == {"acc": 1.0, "acc_norm": 1.0}
    assert by_task["choice"]["stderr"] == {"acc": 0.0, "acc_norm": 0.0}
    assert 1 < by_task["text"]["metrics"]["byte_perplexity"] < 2
    assert by_task["written"]["metrics"] == {"exact_match,word": 1.0}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(each["task"], each["document"]) for each in samples] == [
        (task, index) for task, count in (("choice", 6), ("text", 2), ("written", 4)) for index in range(count)
    ]
    assert samples[-1]["answers"] == [" over the "], "up to the stop string"


def test_ranks_divide_the_questions_and_give_the_same_bits(zslurm: Zslurm, tasks: dict[str, Path]) -> None:
    alone, shared = (
        zslurm.ok("eval", "first", "--tasks", *tasks.values(), "--ranks", ranks, "--json").json for ranks in "12"
    )
    for one, two in zip(alone["results"], shared["results"], strict=True):
        assert one["metrics"] == two["metrics"]
        assert one["stderr"] == two["stderr"]


def test_scores_are_a_table(zslurm: Zslurm, tasks: dict[str, Path]) -> None:
    done = zslurm.ok("eval", "first", "--tasks", f"{tasks['choice']},{tasks['written']}")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert ["choice", "acc", "1.0000", "0.0000"] in lines
    assert ["written", "exact_match,word", "1.0000", "0.0000"] in lines


def test_scores_are_among_the_events_and_in_the_report_of_the_run(
    zslurm: Zslurm, tasks: dict[str, Path], tmp_path: Path
) -> None:
    zslurm.ok("eval", "first", "--tasks", tasks["choice"], "--limit", "2")
    event = json.loads(zslurm.ok("events", "first", "--json").stdout.splitlines()[-1])
    assert (event["action"], event["checkpoint"], event["step"]) == ("score", "step-00000080", 80)
    assert event["scores"] == {"choice/acc": 1.0, "choice/acc_norm": 1.0}
    assert "step-00000080 was scored by " in zslurm.ok("events", "first").stdout
    zslurm.ok("report", "first", "--out", tmp_path / "report.md")
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "| choice/acc | 1.0000 | 0.0000 | 80 | zslurm eval |" in lines


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--tasks is missing: task files, or of the shipped tasks: arithmetic, "),
        (["--tasks", "nothing"], 2, "nothing: no such task file"),
        (["--tasks", "arithmetic", "--limit", "0"], 2, "--limit"),
        (["--tasks", "arithmetic", "--out", "no/where/x.json"], 2, "there is no such folder"),
        (["--tasks", "arithmetic", "--out", "."], 2, ".: is a directory; name a file"),
        (["--tasks", "arithmetic", "--out", "/proc/x.json"], 1, "zslurm: /proc/x.json: cannot be written"),
        (["--tasks", "arithmetic", "--nodes", "2"], 2, "--nodes 2 needs --slurm, or a job of so many nodes"),
        (["--tasks", "arithmetic", "--time", "30"], 2, "--time is the limit of the job of --slurm"),
        (["--tasks", "arithmetic", "--device", "cuda", "--ranks", "2"], 2, "for --ranks 2"),
        (["--tasks", "arithmetic-written", "--context", "8"], 2, "max_gen_toks (8) leaves no room"),
        (["--tasks", "arithmetic", "--tokenizer", "/dev/null"], 2, "tokenizer"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_one_line(zslurm: Zslurm, arguments: list[str], code: int, message: str) -> None:
    done = zslurm("eval", "first", *arguments)
    assert done.code == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_choice_without_a_token_and_one_longer_than_the_context_are_refused(
    zslurm: Zslurm, tmp_path: Path
) -> None:
    keys = {"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_choice": "c", "doc_to_target": "r"}
    empty = write_task(tmp_path, [{"q": "a", "c": ["b", ""], "r": 0}], task="empty", **keys, target_delimiter="")
    (before := tmp_path / "before.json").write_text("of an earlier run")
    done = zslurm("eval", "first", "--tasks", empty, "--out", before, "--samples", tmp_path / "new.jsonl")
    assert (done.code, done.stdout) == (2, "")
    assert before.read_text() == "of an earlier run"
    assert "empty.jsonl, line 1: choice 2 ('') adds no token to its question" in done.stderr
    long = write_task(tmp_path, [{"q": "a", "c": ["b", "東京 " * 40], "r": 0}], task="long", **keys)
    assert "tokens, the context 32" in zslurm("eval", "first", "--tasks", long).stderr


def test_a_run_without_weights_and_a_missing_one_are_reported(zslurm: Zslurm) -> None:
    assert zslurm("eval", "nobody", "--tasks", "arithmetic").code == 3


def test_programs_run_from_the_command_line(zslurm: Zslurm, tmp_path: Path) -> None:
    """Each sample is a program: here one that passes where the model continues its sentence."""
    path = write_task(
        tmp_path,
        [{"begin": "The quick brown fox"}, {"begin": "the lazy"}],
        task="programs",
        doc_to_text="begin",
        doc_to_target="",
        repeats=2,
        generation_kwargs={"do_sample": True, "temperature": 0.01, "max_gen_toks": 6},
        execution={"command": "grep -q jumps {file}", "program": "{{completion}}", "isolation": "limits",
                   "network": True},
        metric_list=[{"metric": "pass@1"}, {"metric": "pass@2"}],
    )  # fmt: skip
    said = zslurm.ok("eval", "first", "--tasks", path, "--json").json
    assert said["results"][0]["metrics"] == {"pass@1": 0.5, "pass@2": 0.5}


def test_a_rank_that_is_killed_ends_the_command_at_once_and_what_was_scored_stays(
    zslurm: Zslurm, tasks: dict[str, Path], tmp_path: Path
) -> None:
    """Rank 0 would wait for its program for much longer."""
    slow = write_task(
        tmp_path, [{"begin": "The"}, {"begin": "quick"}], task="slow", doc_to_text="begin",
        generation_kwargs={"max_gen_toks": 1}, metric_list=[{"metric": "pass@1"}],
        execution={"command": "sleep 1000", "program": "{{completion}}", "time_s": 1000,
                   "isolation": "limits", "network": True},
    )  # fmt: skip

    def ranks() -> list[psutil.Process]:
        """The ranks, in their order, once each has started its program."""
        try:
            found = [
                each
                for each in (psutil.Process(process.pid) for process in multiprocessing.active_children())
                if any(below.name() == "sleep" for below in each.children(recursive=True))
            ]
        except psutil.NoSuchProcess:
            return []
        return sorted(found, key=lambda each: each.pid) if len(found) == 2 else []

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(lambda: wait_for(ranks, "both ranks to run a program")[1].kill())
        out = tmp_path / "part.json"
        done = zslurm("eval", "first", "--tasks", tasks["choice"], slow, "--ranks", "2", "--out", out)
        killed.result()
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "zslurm: rank 1 of --ranks was killed; is there memory for all ranks?"
    part = json.loads(out.read_text())
    assert (part["complete"], [each["task"] for each in part["results"]]) == (False, ["choice"])
