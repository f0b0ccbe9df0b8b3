"""`zslurm dev replay`, as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.aegis.recorded import Recorder, there
from tests.cli.commands import Outcome, Shell
from zslurm.core.errors import Exit


def table(done: Outcome) -> list[dict[str, str]]:
    header, *rows = (line.split("\t") for line in done.stdout.splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.fixture
def events(tmp_path: Path) -> Path:
    recorder = Recorder().failed("user_error", there=there()).failed("user_error", there=there())
    return recorder.write(tmp_path / "events.jsonl")


def test_shows_each_attempt_and_marks_what_differs(shell: Shell, events: Path) -> None:
    rows = table(shell.zslurm("dev", "replay", events, "--set", "aegis.retries=1"))
    assert [(row["attempt"], row["differs"]) for row in rows] == [("1", ""), ("2", "yes")]
    assert rows[1]["done"] == "restart: because"
    assert rows[1]["policy"].startswith("stop: node1: error of the program; 2 failures")


def test_json(shell: Shell, events: Path) -> None:
    found = json.loads(shell.zslurm("dev", "replay", events, "--set", "aegis.retries=1", "--json").stdout)
    assert found["settings"]["retries"] == 1
    assert [(one["policy"]["action"], one["differs"]) for one in found["attempts"]] == [
        ("restart", False),
        ("stop", True),
    ]


def test_takes_the_settings_of_the_run(shell: Shell, events: Path) -> None:
    events.with_name("config.json").write_text('{"aegis": {"retries": 1}, "run": {"name": "x"}}')
    assert [row["differs"] for row in table(shell.zslurm("dev", "replay", events.parent))] == ["", "yes"]


def test_a_last_line_that_a_crash_left_unfinished(shell: Shell, events: Path) -> None:
    whole = shell.zslurm("dev", "replay", events).stdout
    with events.open("a") as file:
        file.write('{"time": 1.0, "event": "attempt_sta')
    assert shell.zslurm("dev", "replay", events).stdout == whole


def test_damaged_lines_are_named_and_the_rest_is_replayed(shell: Shell, events: Path) -> None:
    whole = shell.zslurm("dev", "replay", events).stdout
    lines = events.read_text().splitlines()
    events.write_text("\n".join([lines[0], "\0" * 40, *lines[1:], "}"]) + "\n")
    done = shell.zslurm("dev", "replay", events)
    assert done.stdout == whole
    assert f"{events}: 2 damaged lines left out" in done.stderr


def test_a_policy_file_is_laid_over_the_settings_of_the_run(shell: Shell, events: Path, tmp_path: Path) -> None:
    events.with_name("config.json").write_text('{"aegis": {"retries": 9, "max_excluded": 1}}')
    policy = tmp_path / "strict.yaml"
    policy.write_text("run: {name: another}\naegis:\n  retries: 1\n")
    found = json.loads(shell.zslurm("dev", "replay", events, "--policy", policy, "--json").stdout)
    assert (found["settings"]["retries"], found["settings"]["max_excluded"]) == (1, 1)
    assert [row["policy"]["action"] for row in found["attempts"]] == ["restart", "stop"]
    later = shell.zslurm("dev", "replay", events, "--policy", policy, "--set", "aegis.retries=9", "--json")
    assert json.loads(later.stdout)["settings"]["retries"] == 9


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("aegis:\n  retires: 1\n", Exit.USAGE, "{}:2: aegis.retires: unknown key; did you mean `retries`?"),
        ("agis:\n  retries: 1\n", Exit.USAGE, "{}:1: agis: unknown key; did you mean `aegis`?"),
        ("retries: 1\n", Exit.USAGE, "{}:1: retries: unknown key; did you mean `aegis.retries`?"),
        ("aegis: 3\n", Exit.USAGE, "{}:1: aegis: expected a mapping of keys to values, got 3"),
        ("aegis: [\n", Exit.USAGE, "{}:"),
        (None, Exit.NOT_FOUND, "{}: no such file"),
    ],
)
def test_a_policy_file_with_a_mistake(
    shell: Shell, events: Path, tmp_path: Path, text: str | None, code: Exit, message: str
) -> None:
    policy = tmp_path / "policy.yaml"
    if text is not None:
        policy.write_text(text)
    found, line = shell.fails("dev", "replay", str(events), "--policy", str(policy))
    assert found == code
    assert line.startswith("zslurm: " + message.format(policy))


@pytest.mark.parametrize("content", [b"", b"\xff\x00\n" * 9, b"hello\n", b'{"step": 1}\n', b"[1, 2]\n"])
def test_what_is_no_events_file(shell: Shell, tmp_path: Path, content: bytes) -> None:
    other = tmp_path / "metrics.jsonl"
    other.write_bytes(content)
    code, line = shell.fails("dev", "replay", str(other))
    assert code == Exit.USAGE
    assert line.startswith(f"zslurm: {other}: not an events file: ")


@pytest.mark.parametrize("name", ["none.jsonl", "no-such-run", "999"])
def test_what_does_not_exist(shell: Shell, name: str) -> None:
    code, line = shell.fails("dev", "replay", name)
    assert code == Exit.NOT_FOUND
    assert line.startswith(f"zslurm: {name}: ")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("retries=1", "--set retries: only settings of `aegis` matter here"),
        ("aegis.retires=1", "--set aegis.retires: aegis.retires: unknown key; did you mean `retries`?"),
        ("aegis.retries=many", '--set aegis.retries: aegis.retries: expected a number, got "many"'),
    ],
)
def test_a_wrong_setting(shell: Shell, events: Path, setting: str, message: str) -> None:
    code, line = shell.fails("dev", "replay", str(events), "--set", setting)
    assert code == Exit.USAGE
    assert line.startswith(f"zslurm: {message}")
