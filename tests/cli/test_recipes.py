"""`zslurm config recipes`: what there is to extend, how large it is, and its text."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.commands import Shell
from zslurm.config.load import recipes
from zslurm.core.errors import Exit


def test_recipes_are_listed_with_their_sizes_the_smallest_first(shell: Shell) -> None:
    done = shell.zslurm("config", "recipes")
    assert (done.code, done.stderr) == (0, "")
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert header == "recipe parameters without-embedding active layers hidden experts contexts tokens".split()
    assert {row[0] for row in rows} == recipes().keys()
    assert rows[0][0] == "zaya1-tiny"
    assert rows[-1] == ["zaya1-8b", "8.84B", "8.3B", "754M", "40", "2048", "16", "4096, 4096, 32768", "13.2T"]


def test_recipes_as_json_have_exact_numbers(shell: Shell) -> None:
    facts = json.loads(shell.zslurm("config", "recipes", "--json").stdout)
    published = next(fact for fact in facts if fact["name"] == "zaya1-8b")
    assert (published["parameters"], published["without_embedding"], published["active"]) == (
        8_840_488_784,
        8_303_355_728,
        753_608_528,
    )
    assert published["tokens"] == 13_200_000_000_000
    one = json.loads(shell.zslurm("config", "recipes", "zaya1-8b", "--json").stdout)
    assert one == published | {"text": recipes()["zaya1-8b"]}


def test_a_recipes_text_can_be_saved_and_extended_in_its_place(shell: Shell) -> None:
    done = shell.zslurm("config", "recipes", "zaya1-1b")
    assert done.stdout == recipes()["zaya1-1b"]
    (shell.directory / "mine.yaml").write_text(done.stdout)
    run_file = shell.directory / "run.yaml"
    shown = []
    for base in ("zaya1-1b", "mine.yaml"):
        run_file.write_text(f"extends: {base}\n")
        shown.append(shell.zslurm("config", "show", run_file, "--cluster", "local").stdout)
    assert shown[0] == shown[1]


def test_a_recipe_that_there_is_not_is_exit_code_3(shell: Shell) -> None:
    code, message = shell.fails("config", "recipes", "zaya1-9b")
    assert (code, message) == (
        Exit.NOT_FOUND,
        "zslurm: no recipe is called `zaya1-9b`; did you mean `zaya1-8b`?",
    )
    assert shell.fails("config", "recipes", "x")[1].endswith(f"there are: {', '.join(recipes())}")


@pytest.mark.parametrize(
    "command",
    [["plan", "run", "--nodes", "128", "--runs", "2"], ["plan", "memory", "--dp", "1024"], ["plan", "size"]],
)
def test_a_recipe_is_planned_by_its_name_without_a_profile(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delenv("ZSLURM_CLUSTER", raising=False)
    done = shell.zslurm(*command, "zaya1-8b")
    assert done.code == 0, done.stderr
    assert "planned for the profile mi300x-pollara" in done.stderr
    own = shell.zslurm(*command, "zaya1-8b", "--cluster", "h100-ib")
    assert (own.code, "planned for" in own.stderr) == (0, False)


@pytest.mark.parametrize("cluster", [[], ["--cluster", "h100-ib"]])
@pytest.mark.parametrize(
    "command",
    [["plan", "run", "--nodes", "2", "--nodes", "4", "--runs", "2"], ["plan", "memory"], ["plan", "size"]],
)
def test_a_run_file_from_standard_input_is_planned(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: list[str], cluster: list[str]
) -> None:
    """It can be read only once, also if it is resolved several times."""
    monkeypatch.delenv("ZSLURM_CLUSTER", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("extends: zaya1-8b\nrun: {name: mine}\n"))
    done = shell.zslurm(*command, "-", *cluster)
    assert done.code == 0, done.stderr


def test_a_pipe_is_planned(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as writer:
        written = writer.submit((tmp_path / "pipe").write_text, "extends: zaya1-8b\nrun: {name: mine}\n")
        done = shell.zslurm("plan", "size", str(tmp_path / "pipe"))
        written.result()
    assert done.code == 0, done.stderr


def test_a_run_file_of_nearly_this_name_is_proposed(shell: Shell) -> None:
    shell.write_run()
    assert shell.fails("plan", "size", "runn.yaml") == (
        3,
        "zslurm: runn.yaml: no such file; did you mean run.yaml?",
    )


def test_a_batch_that_this_machine_cannot_hold_is_noted(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.write_run()
    few = SimpleNamespace(total=2**10)
    assert "this machine has" not in "".join(notes_of(shell))
    monkeypatch.setattr("psutil.virtual_memory", lambda: few)
    (line,) = [line for line in notes_of(shell) if "this machine has" in line]
    assert re.fullmatch(
        r"memory of \d ranks?: .* at the peak, and this machine has 1\.00 KiB: (set|take) .*", line
    ), line


def notes_of(shell: Shell) -> list[str]:
    done = shell.zslurm("submit", "run.yaml", "--cluster", "local", "--dry-run", "--json")
    assert done.code == 0, done.stderr
    notes: list[str] = json.loads(done.stdout)["notes"]
    return notes


def test_a_directory_does_not_hide_the_recipe_of_its_name(shell: Shell) -> None:
    (shell.directory / "zaya1-8b").mkdir()
    assert shell.zslurm("plan", "size", "zaya1-8b").code == 0


def test_a_dry_run_of_a_recipe_needs_no_data_and_a_submission_does(shell: Shell) -> None:
    command = ["submit", "zaya1-8b", "--nodes", "128", "--cluster", "mi300x-pollara"]
    shown = shell.zslurm(*command, "--dry-run")
    assert shown.code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[1].startswith("# 128 nodes x 8 ranks on mi300x-pollara; 801684 steps, 13.2T tokens")
    notes = [number for number, line in enumerate(lines) if line.startswith("# note: ")]
    assert "no data are named yet" in lines[notes[0]]
    assert next(number for number, line in enumerate(lines) if line.startswith("# memory of a rank")) < notes[0]
    code, line = shell.fails(*command)
    assert code == Exit.USAGE
    assert "data.path: required" in line


def test_a_file_wins_over_a_recipe_of_its_name(shell: Shell) -> None:
    (shell.directory / "zaya1-8b").write_text("extends: zaya1-tiny\nrun: {name: mine}\n")
    shown = json.loads(shell.zslurm("config", "show", "zaya1-8b", "--json", "--cluster", "local").stdout)
    assert (shown["run"]["name"], shown["model"]["layers"]) == ("mine", 4)


def test_a_recipe_of_a_similar_name_is_advised(shell: Shell) -> None:
    code, message = shell.fails("plan", "memory", "zaya1-9b")
    assert (code, message) == (
        Exit.NOT_FOUND, "zslurm: zaya1-9b: no such file; did you mean the recipe zaya1-8b?",
    )  # fmt: skip
