"""docs/metrics.md has every field of every line of metrics.jsonl, and no other."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest

from tests.checkout import DOCS
from tests.train.ranks import train_on
from tests.train.runs import make_corpus, make_run
from zslurm.train.jsonl import read_jsonl

DOCUMENT = DOCS / "metrics.md"
ROW = re.compile(r"^\| `(?P<field>[a-z_.]+)` \| (?P<unit>[^|]*)\| (?P<what>[^|]*)\|$", re.MULTILINE)


def documented() -> dict[str, dict[str, str]]:
    """By kind of line: the description of each field."""
    sections = re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    named = {section.partition("\n")[0]: section for section in sections}
    tables = {
        name: {row["field"]: row["what"] for row in ROW.finditer(section)} for name, section in named.items()
    }
    return {name: table for name, table in tables.items() if table}


def fields_of(row: dict[str, Any]) -> set[str]:
    flat: set[str] = set()
    for key, value in row.items():
        by_name = key == "sources"  # what is in it are the sources of the run
        flat |= {f"{key}.{inner}" for inner in value} if isinstance(value, dict) and not by_name else {key}
    return flat


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of a run in which everything happens: every second step or so is a spike."""
    directory = tmp_path_factory.mktemp("everything")
    corpus = make_corpus(directory / "tokens.h5")
    run = make_run(
        directory / "run",
        corpus,
        steps=12,
        optim={"z_loss": 1e-4, "spike_factor": 1.0001, "spike_window": 1, "skip_limit": 12},
        metrics={"log_every": 2},
        integrity={"every_steps": 1},
        evaluation={"data": str(corpus), "sequences": 2, "command": "true", "command_every_steps": 2},
    )
    done = train_on(run, ranks=1)
    assert done.returncode == 0, done.stderr
    return list(read_jsonl(run / "metrics.jsonl"))


def test_every_field_that_is_written_is_documented_and_the_other_way_round(rows: list[dict[str, Any]]) -> None:
    written: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        written[row["kind"]] |= fields_of(row)
    tables = documented()
    common = set(tables.pop("Every line"))
    del tables["tasks"]  # these need a tokenizer: see tests/train/evaluation/test_run_tasks.py
    assert set(written) == set(tables)
    for kind, table in tables.items():
        on_cpus = {field for field, what in table.items() if not what.startswith("GPUs only")}
        assert written[kind] == common | on_cpus, kind


def test_every_step_has_the_same_fields_but_for_those_of_some_steps(rows: list[dict[str, Any]]) -> None:
    table = documented()["step"]
    sometimes = {field for field, what in table.items() if "every `metrics.log_every` steps" in what}
    assert sometimes == {"load_entropy_by_layer", "load_shares"}
    steps = [row for row in rows if row["kind"] == "step"]
    for row in steps:
        assert (sometimes <= set(row)) == (row["step"] % 2 == 0)
        assert len({frozenset(fields_of(step) - sometimes) for step in steps}) == 1


def test_the_parts_of_a_step_sum_to_its_time_and_its_speed_follows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["kind"] == "step":
            assert sum(row["time_split_s"].values()) == pytest.approx(row["step_time_s"])
            assert all(seconds >= 0 for seconds in row["time_split_s"].values())
            assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(6 * 16)
            assert 0 < row["mfu"] < 1
            assert row["memory_rss_bytes"] > 10**7


def test_the_load_of_a_layer_sums_to_one(rows: list[dict[str, Any]]) -> None:
    detailed = [row for row in rows if "load_shares" in row]
    assert detailed
    for row in detailed:
        assert [len(shares) for shares in row["load_shares"]] == [4, 4], (
            "two layers, three experts, one skip class"
        )
        for shares in row["load_shares"]:
            assert sum(shares) == pytest.approx(1, abs=1e-4)
        skipped = sum(shares[-1] for shares in row["load_shares"]) / 2
        assert row["skip_share"] == pytest.approx(skipped, abs=1e-4)
        assert min(row["load_entropy_by_layer"]) == pytest.approx(row["load_entropy"], abs=1e-4)
