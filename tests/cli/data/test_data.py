"""`zslurm data`: from texts to bundles that can be looked at and checked."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.train.data.corpora import write_rows, write_texts
from zslurm.core.errors import Exit
from zslurm.train.data.bundle import Bundle

PAIRS = [{"prompt": f"Double {number}.", "completion": f" {2 * number}"} for number in range(20)]


@pytest.fixture
def pairs(shell: Shell) -> Path:
    """A corpus of prompts and completions, built on the command line."""
    write_rows(shell.directory / "pairs.jsonl.gz", PAIRS)
    done = shell.zslurm(
        "data", "build", "pairs.jsonl.gz", "--out", "pairs", "--vocab-size", "512", "--bundle-size", "400",
        "--prompt-key", "prompt", "--completion-key", "completion", "--workers", "1", "--json",
    )  # fmt: skip
    assert done.code == Exit.DONE, done.stderr
    summary = json.loads(done.stdout)
    assert summary["bundles"] > 1
    assert summary["documents"] == 20
    assert 0 < summary["targets"] < summary["tokens"]
    return shell.directory / "pairs"


def test_texts_of_all_kinds_become_a_corpus(shell: Shell) -> None:
    write_texts(shell.directory / "in", a="plain text")
    write_rows(shell.directory / "in" / "b.jsonl.zst", [{"content": "a line"}])
    write_rows(shell.directory / "in" / "c.parquet", [{"body": "a row"}])
    done = shell.zslurm(
        "data", "build", "in", "-o", "out", "--vocab-size", "512", "--text-key", "content", "--text-column", "body"
    )
    assert (done.code, done.stdout) == (Exit.DONE, "")
    assert done.stderr.splitlines()[-1].startswith(f"{shell.directory}/out: made in ")
    assert done.stderr.splitlines()[-1].endswith("3 documents, 21 B of text")
    shown = shell.zslurm("data", "show", "out", "--sample", "3").stdout
    assert [part.split("\n", 1)[1].strip() for part in shown.split("\n--- ")[1:]] == [
        "plain text",
        "a line",
        "a row",
    ]
    again = shell.zslurm(
        "data", "build", "in", "-o", "out", "--vocab-size", "512", "--text-key", "content", "--text-column", "body"
    )
    assert "out: was already there: " in again.stderr


def test_what_is_learned_is_shown(shell: Shell, pairs: Path) -> None:
    shown = shell.zslurm("data", "show", pairs, "--sample", "1").stdout
    assert shown.endswith("[prompt, not learned]\nDouble 0.\n[learned]\n 0\n")
    body = json.loads(shell.zslurm("data", "show", pairs, "--sample", "2", "--json").stdout)
    assert body["targets"] < body["tokens"]
    assert [file["masked"] for file in body["files"]] == [True] * body["bundles"]
    assert sum(file["documents"] for file in body["files"]) == 20
    assert [excerpt["parts"] for excerpt in body["sample"]] == [
        [[False, "Double 0."], [True, " 0"]],
        [[False, "Double 10."], [True, " 20"]],
    ]


def test_verify_says_that_all_is_well(shell: Shell, pairs: Path) -> None:
    done = shell.zslurm("data", "verify", pairs)
    assert (done.code, done.stderr) == (Exit.DONE, "")
    assert done.stdout.startswith(f"{pairs}: intact: ")
    body = json.loads(shell.zslurm("data", "verify", pairs, "--workers", "2", "--json").stdout)
    assert (body["intact"], body["damages"]) == (True, [])
    assert body["bundles"] > 1


def test_verify_names_every_damage_and_fails(shell: Shell, pairs: Path) -> None:
    first, second = sorted(pairs.glob("*.h5"))[:2]
    for path, dataset in ((first, "tokens"), (second, "targets")):
        content = bytearray(path.read_bytes())
        content[Bundle.open(path).ranges[dataset].offset] ^= 16
        path.write_bytes(content)
    done = shell.zslurm("data", "verify", pairs)
    assert (done.code, done.stdout) == (Exit.CHECK_FAILED, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"zslurm: {first}: block 0 (tokens 0 to ")
    assert lines[1].startswith(f"zslurm: {second}: block 0 (the mask of tokens 0 to ")
    assert len(lines) == 2
    done = shell.zslurm("data", "verify", pairs, "--json")
    assert done.code == Exit.CHECK_FAILED
    body = json.loads(done.stdout)
    assert body["intact"] is False
    assert [(damage["path"], damage["dataset"], damage["block"]) for damage in body["damages"]] == [
        (str(first), "tokens", 0), (str(second), "targets", 0),
    ]  # fmt: skip
    first.write_bytes(first.read_bytes()[:-1])
    assert "is truncated" in shell.zslurm("data", "verify", pairs).stderr


def test_a_long_list_of_damages_is_cut(shell: Shell, pairs: Path) -> None:
    for path in pairs.glob("*.h5"):
        path.write_bytes(b"")
    for number in range(100, 130):
        (pairs / f"tokens-{number:05d}-of-00200.h5").write_bytes(b"")
    lines = shell.zslurm("data", "verify", pairs).stderr.splitlines()
    assert len(lines) == 21
    assert lines[-1].endswith(" more (--json lists all)")


@pytest.mark.parametrize("command", [("show",), ("verify",)])
def test_data_that_is_not_there(shell: Shell, command: tuple[str, ...]) -> None:
    code, line = shell.fails("data", *command, "none")
    assert (code, line) == (
        Exit.NOT_FOUND,
        "zslurm: none: no such file or directory; `zslurm data build` makes bundles",
    )
    (shell.directory / "empty").mkdir()
    code, line = shell.fails("data", *command, "empty")
    assert code == Exit.USAGE
    assert "holds no tokens-NNNNN-of-NNNNN.h5" in line


def test_no_room_is_a_failure_and_no_mistake(shell: Shell) -> None:
    """Files that may not grow beyond 30 KiB stand for a full disk."""
    write_texts(shell.directory / "in", a=" ".join(map(str, range(9000))))
    program = shlex.join(
        [sys.executable, "-m", "zslurm", "data", "build", "in", "--out", "out", "--vocab-size", "512"]
    )
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 30; {program}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == Exit.FAILED
    assert done.stderr.splitlines()[-1] == f"zslurm: {shell.directory}/out: cannot be written: File too large"
    assert sorted(path.name for path in shell.directory.iterdir()) == ["in", "tokens.h5"]


BUILD = ("data", "build", "in", "--out", "out", "--vocab-size", "512")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("data", "build", "none", "--out", "out", "--vocab-size", "512"),
            Exit.NOT_FOUND,
            "none: no such file or",
        ),
        ((*BUILD, "--glob", "*.rst"), Exit.USAGE, "in: no file matches '*.rst'"),
        ((*BUILD, "--glob", ""), Exit.USAGE, "the pattern of files (--glob '') is empty; leave it out"),
        ((*BUILD, "--glob", "/a"), Exit.USAGE, "the pattern of files (--glob /a) begins with /, and is matched"),
        ((*BUILD, "--tokenizer", "none"), Exit.USAGE, "not both"),
        (
            ("data", "build", "in", "--out", "out"),
            Exit.USAGE,
            "give the size of a vocabulary to train, or a tokenizer",
        ),
        ((*BUILD, "--text-key", "body"), Exit.USAGE, "in/a.jsonl:1: has no 'body'; its keys: 'text'"),
        ((*BUILD, "--prompt-key", "text"), Exit.USAGE, "prompts and completions go together"),
        ((*BUILD, "--prompt-key", "text", "--completion-key", "b"), Exit.USAGE, "in/a.jsonl:1: has no 'b'"),
        ((*BUILD, "--end-token", "<end>"), Exit.USAGE, "the tokenizer has no <end>"),
        ((*BUILD, "--bundle-size", "many"), Exit.USAGE, "'many' is not a size"),
        ((*BUILD, "--max-document", "10B"), Exit.USAGE, "in/a.jsonl:1: the line is longer than"),
        ((*BUILD, "--workers", "0"), Exit.USAGE, "Invalid value for '--workers'"),
        (("data", "build", "in", "--out", "in", "--vocab-size", "512"), Exit.USAGE, "in: exists and is not a"),
        (("data", "show", "tokens.h5", "--sample", "-1"), Exit.USAGE, "Invalid value for '--sample'"),
        (("data", "show", "tokens.h5", "--sample", "1"), Exit.USAGE, "tokenizer.json: cannot be read"),
    ],
)
def test_bad_requests_are_refused(shell: Shell, arguments: tuple[str, ...], code: Exit, message: str) -> None:
    write_rows(shell.directory / "in" / "a.jsonl", [{"text": "some text"}])
    done = shell.zslurm(*arguments)
    assert (done.code, done.stdout) == (code, "")
    *said, line = done.stderr.splitlines()
    doing = ("B of text)", "needs more text")  # what it was doing, and what came of it
    assert all(text.endswith(doing) for text in said), said
    assert line.startswith("zslurm: ")
    assert message in line
    assert {path.name for path in shell.directory.iterdir()} == {"in", "tokens.h5"}
