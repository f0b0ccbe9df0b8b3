"""Every command with each kind of wrong value for each argument and option: a clear line, a documented code.

The commands and their parameters come from the program itself, so a new one is swept too. The normal run takes a
sample of the values, which is the same every time; `make soak` takes all.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.plain_words import problem_of
from tests.train.runs import MODEL, make_corpus
from zslurm.bench.measurement import BENCHMARKS
from zslurm.cli.commands import load
from zslurm.cli.main import app

BAD_VALUES = {
    "empty": "",
    "blank": " ",
    "missing": "none-such",
    "missing below": "none-such/below",
    "directory": "directory",
    "file for a directory": "text.txt/below",
    "text file": "text.txt",
    "empty file": "empty",
    "binary file": "binary",
    "device": "/dev/null",
    "negative": "-1",
    "zero": "0",
    "fraction": "0.5",
    "huge": "9" * 25,
    "more digits than Python reads": "9" * 5000,
    "infinite": "1e999",
    "no number": "nan",
    "too long for a name": "a" * 300,
    "lines": "a\nb",
    "colour": "\x1b[31mred",
    "not UTF-8": "a\udcffb",
    "other digits": "\u0663\u00b2",
    "up": "../../../../nonexistent",
    "shell": "$(touch trapped)",
    "bracket": "node[1-",
    "assignment": "a.b[=]",
    "template": "%s{0}{x}",
    "option": "--",
}
GOOD = {
    "run_file": "run.yaml",
    "run": "none",
    "runs": "none",
    "checkpoint": "none",
    "run_dir": "none",
    "nodes": "node1",
    "path": "tokens.h5",
    "sources": "texts",
    "name": "local",
    "shell": "bash",
    "file": "text.txt",
    "files": "text.txt",
    "what": "text.txt",
    "first": "none",
    "second": "none",
    "folder": "none",
    "root": "out-root",
    "events": "text.txt",
    "command": "true",
    "destination": "out",
    "out": "out",
    "--out": "out",
    "--context": "16",
    "--path": ".",
    "--run": "run.yaml",
    "--dp": "2",
    "--prompt": "x",
    "--off": "node3",
    "--step-time": "1",
}
"""What a required parameter is given while another one is swept."""
BESIDES = {
    ("submit",): ["--dry-run"],
    ("init",): ["-y"],
    ("doctor",): ["--only=disk"],
    # Refused, so that nothing is measured.
    **{("bench", name): ["--cluster=local", "--nodes=1"] for name in BENCHMARKS},
    ("watch",): ["none"],  # or it would watch
    ("demo",): ["--tokens=-1"],  # nothing is started
    ("data", "build"): ["--vocab-size=300", "--workers=1"],
}
REPORTS_ON_STDOUT = {
    ("cluster", "check"),
    ("cluster", "env"),
    ("config", "template", "check"),
    ("config", "template", "diff"),
    ("doctor",),
}
SAMPLE = 3


@dataclass(frozen=True)
class Parameter:
    """One argument or option that takes a value."""

    name: str
    option: bool
    required: bool

    def given(self, value: str) -> list[str]:
        if not self.option:
            return [value]
        return [f"{self.name}={value}"] if self.name.startswith("--") else [self.name, value]


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Parameter]]]:
    for name, listed in group.commands.items():
        command = listed if path else load(name)
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
            continue
        parameters = []
        for found in command.params:
            if found.name == "help" or getattr(found, "is_flag", False):
                continue
            option = found.param_type_name == "option"
            longest = max(found.opts, key=len) if option else str(found.name)
            parameters.append(Parameter(longest, option, bool(found.required)))
        yield (*path, name), parameters


COMMANDS = dict(_commands(typer.main.get_command(app)))


def _lines(path: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Every wrong call of a command, with a name."""
    parameters = COMMANDS[path]
    yield "unknown option", [*path, "--none-such"]
    if any(one.required for one in parameters):
        yield "nothing", [*path]
    for swept in parameters:
        for name, value in BAD_VALUES.items():
            words = list(path)
            for one in parameters:
                if one is swept:
                    words += one.given(value)
                elif one.required:
                    words += one.given(GOOD[one.name])
            taken = {word.partition("=")[0] for word in words}
            words += [
                more for more in BESIDES.get(path, []) if more.partition("=")[0] not in taken or path == ("demo",)
            ]
            yield f"{swept.name} {name}", words


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run file, data, and one of each kind of wrong file; no program is on the PATH.

    It is so deep that what a command writes to the value `up` stays below pytest's directory.
    """
    tmp_path = tmp_path / "a/b/c/d"
    tmp_path.mkdir(parents=True)
    make_corpus(tmp_path / "tokens.h5")
    phase = {"tokens": 960, "context": 16, "global_batch": 6, "micro_batch": 2, "lr": 1e-3}
    run = {"run": {"name": "tiny"}, "model": MODEL, "data": {"path": "tokens.h5"}, "phases": [phase]}
    (tmp_path / "run.yaml").write_text(json.dumps(run | {"cluster": {"name": "local"}}))
    (tmp_path / "text.txt").write_text("words\n" * 20)
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "directory").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one two three four\n" * 50)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HOME": tmp_path / "home",
        "XDG_CONFIG_HOME": tmp_path / "home/config",
        "XDG_STATE_HOME": tmp_path / "home/state",
        "XDG_CACHE_HOME": tmp_path / "home/cache",
        "PATH": "/nonexistent",
        "EDITOR": "true",
        "ZSLURM_NICE": "0",
    }.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "home").mkdir()
    return tmp_path


def test_every_required_parameter_has_a_good_value() -> None:
    required = {one.name for parameters in COMMANDS.values() for one in parameters if one.required}
    assert required <= set(GOOD), "give new required parameters a value in GOOD"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_wrong_value_is_one_clear_line(here: Path, path: tuple[str, ...], every: bool) -> None:
    lines = list(_lines(path))
    if not every:
        lines = lines[:2] + random.Random(" ".join(path)).sample(lines[2:], min(SAMPLE, len(lines[2:])))
    found = []
    for name, words in lines:
        if problem := problem_of(*words, on_stdout=path in REPORTS_ON_STDOUT):
            found.append(f"[{name}] {problem}")
        if (here / "trapped").exists():
            pytest.fail(f"{words} ran a command that was in a value")
    sys.stdout.flush()
    assert not found, f"{len(found)} of {len(lines)}:\n" + "\n".join(found[:40])
