"""What a report has in it: of runs that went well, failed, are active, and whose files are missing or damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import LAYERS, TimedStory, failed_once, routed, step_row, submitted_at_zero
from tests.run.stories import Holder
from zslurm.report.markdown import as_markdown
from zslurm.report.page import as_html
from zslurm.report.run_facts import read_runs
from zslurm.report.sections import build
from zslurm.train.jsonl import JsonLinesWriter


def html_of(*stories: TimedStory) -> str:
    return as_html(build(read_runs([story.run for story in stories])))


def markdown_of(*stories: TimedStory) -> str:
    return as_markdown(build(read_runs([story.run for story in stories])))


def text_of(page: str) -> str:
    """The words of a page, without its style and its script."""
    body = re.sub(r"<(style|script)>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = html_of(failed_once(tmp_path / "run"))
    assert re.findall(r'(?:src|href|srcset|data|poster)="(?!data:)[^"]*"', page) == []
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org)", page)


def test_a_run_that_failed_once_is_shown_from_its_goodput_to_its_configuration(tmp_path: Path) -> None:
    text = text_of(html_of(failed_once(tmp_path / "run")))
    for part in (
        "completed last failure: rank 1 on node1 after step 100: GPU 3 reported an uncorrectable error",
        "Goodput is 73.6 %",
        "71.9 % with the time in the queue",
        "steps that were lost and taken again 40s 9.0 %",
        "fault: GPU RAS uncorrectable on node1, GPU 3: uncorrectable",
        "attempt 1: decided to start again in place",
        "2 checkpoints committed",
        "slurm.ranks_per_node",
    ):
        assert part in text, part
    assert "NaN" not in text


def test_markdown_has_the_same_sections_and_tables(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    markdown, page = markdown_of(story), html_of(story)
    sections = re.findall(r"^## (.+)$", markdown, re.MULTILINE)
    assert sections == re.findall(r"<h2>(.+?)</h2>", page)
    assert "| kept steps | 5m 20s | 71.9 % |" in markdown
    tables = [block for block in markdown.split("\n\n") if block.startswith("| ")]
    for block in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


def test_text_of_users_is_no_markup(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    story.event("run_ended", outcome="failed", exit_code=1, cause={"message": "<script>alert(1)</script> | `x`"})
    assert "<script>alert" not in html_of(story)
    assert "<script>" not in markdown_of(story).replace("\\<script\\>", "")


def test_secrets_of_the_configuration_are_not_in_it(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    config = json.loads(story.run.config.read_text())
    config["cluster"]["env"] = {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}
    story.run.config.write_text(json.dumps(config))
    for written in (html_of(story), markdown_of(story)):
        assert "0123456789abcdef" not in written


def test_runs_stand_side_by_side_with_what_differs(tmp_path: Path) -> None:
    first, second = failed_once(tmp_path / "first"), failed_once(tmp_path / "second")
    config = json.loads(second.run.config.read_text())
    config["optim"]["weight_decay"] = 0.123
    second.run.config.write_text(json.dumps(config))
    page = html_of(first, second)
    text = text_of(page)
    assert "Side by side" in text
    assert "optim.weight_decay" in text.partition("What differs in the configuration")[2][:200]
    assert len(re.findall(r'<path class="c[12]" data-name="(?:first|second)"', page)) == 10


@pytest.mark.parametrize("state", ["prepared", "submitted", "started"])
def test_a_run_without_metrics_has_a_page(tmp_path: Path, state: str) -> None:
    story = TimedStory(tmp_path / "run") if state == "prepared" else submitted_at_zero(tmp_path / "run")
    if state == "started":
        story.at(10).started(1)
    text = text_of(html_of(story))
    assert "The run has taken no step yet" in text
    assert ("No attempt of the run was recorded" in text) == (state != "started")
    assert "No checkpoint was committed" in text


def test_damaged_lines_and_files_are_named_and_left_out(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    for path in (story.run.metrics, story.run.events):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0], b'{"torn\n', *lines[1:]]))
    story.run.config.write_text("{")
    text = text_of(html_of(story))
    assert "1 line of metrics.jsonl could not be read and was left out" in text
    assert "1 line of the run&#39;s events could not be read and was left out" in text
    assert "The configuration (config.json) could not be read" in text
    assert "Goodput is 73.6 %" in text


def test_values_that_are_not_numbers_leave_gaps(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    with JsonLinesWriter(story.run.metrics) as lines:
        for step in range(1, 80):
            row = step_row(step, 1, story.clock + 2 * step, loss=float("nan") if 20 < step < 40 else 3.0)
            lines.append(row | {"mfu": None, "load_shares": [[1], "x"], "load_entropy_by_layer": None})
    page = html_of(story)
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', page)).lower()
    assert "<b>Loss</b>" in page
    assert "<b>MFU</b>" not in page


def test_a_run_that_goes_on_and_attempts_without_records_are_noted(tmp_path: Path) -> None:
    with Holder() as holder:
        story = TimedStory(tmp_path / "run")
        story.submitted(process=holder.pid)
        story.started(1)
        story.steps(range(1, 30))
        story.started(2)
        story.steps(range(30, 40), attempt=2)
        story.run.attempt(7).path.mkdir(parents=True)
        text = text_of(html_of(story))
    assert "The run is running: this is how it was when the report was made" in text
    assert "No end was recorded of attempt 1" in text
    assert "Of attempt 7 there is a directory and no record of when it ran" in text


def test_the_router_is_drawn_by_time_class_and_pair(tmp_path: Path) -> None:
    story = routed(failed_once(tmp_path / "run"))
    page, markdown = html_of(story), markdown_of(story)
    for title in (
        "Load of each expert over time, layer 0",
        f"Load of each expert over time, layer {LAYERS - 1}",
        "Specialisation and overlap",
        "Distance by class at step 100",
        f"Experts of each class of tokens, layer {LAYERS - 1}, the most specialised (0.250)",
        "Overlap of the experts, layer 0, where it is largest (mean 0.400)",
    ):
        assert title in page
    assert "| bytes |" in markdown and "mean distance" in markdown
    assert "mutual information" in text_of(page) and "mutual information" in markdown


@pytest.mark.parametrize(
    "damage",
    [
        {"overlap": None},
        {"overlap": [[[1.0]]]},
        {"distance": [["x"]]},
        {"classes": "abc"},
        {"step": None},
        {"shares": []},
    ],
)
def test_matrices_that_are_damaged_are_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    story = routed(failed_once(tmp_path / "run"))
    story.run.routing.write_text(json.dumps(json.loads(story.run.routing.read_text()) | damage))
    page = html_of(story)
    assert "Distance by class" not in page
    assert "Specialisation and overlap" in page
    story.run.routing.write_text("{")
    assert "Distance by class" not in html_of(story)


def test_sources_are_a_table_and_curves(tmp_path: Path) -> None:
    story = failed_once(tmp_path / "run")
    with JsonLinesWriter(story.run.metrics) as lines:
        for step in (10, 20, 30):
            sources = {
                "web": {"tokens": 3000 * step, "epochs": step / 40},
                "code": {"tokens": 1000 * step, "epochs": 2.5},
            }
            lines.append({"kind": "sources", "attempt": 1, "step": step, "sources": sources, "time": 1.0})
        lines.append({"kind": "sources", "attempt": 1, "step": 40, "sources": {"web": 3}, "time": 1.0})
    assert "Epochs of each source" in html_of(story)
    markdown = markdown_of(story)
    assert "## Data" in markdown
    assert "| web | 90k | 75.0 % | 0.75 |" in markdown


def test_a_page_of_many_steps_is_small_and_keeps_the_one_spike(tmp_path: Path) -> None:
    story = submitted_at_zero(tmp_path / "run")
    story.at(10).started(1)
    with story.run.metrics.open("w") as file:
        for step in range(1, 12_001):
            row = step_row(step, 1, story.clock + 2 * step, loss=3.5 if step == 7_777 else 3.0 + step % 7 / 100)
            file.write(json.dumps(row) + "\n")
    page = html_of(story)
    assert len(page) < 1_000_000
    loss = re.search(r'data-y0="(\S+)" data-y1="(\S+)"[^>]*><figcaption><b>Loss', page)
    assert loss is not None
    assert float(loss[2]) < 3.2, "the rest is not flattened"
    assert "1 step is above the frame, the highest at 3.5" in page
