"""Every file that zslurm reads, damaged in every way: a clear line or a correct answer, never Python's own words.

Each file is replaced by what a crash, a full disk, a wrong editor or another program leaves there; in files of
JSON every value is replaced by values of other types too. The normal run takes a sample of damages and commands.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.cli.plain_words import problem_of, zslurm
from tests.cli.trained import trained_run
from tests.submit.local_runs import LocalUser
from zslurm.checkpoint_tools.checksum import crc32

DEEP = b"[" * 200_000
WHOLE_FILES: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "bad UTF-8": b'{"a": "\xff\xfe"}',
    "list": b"[]\n",
    "list of lists": b"[[1], [2]]\n",
    "object": b"{}\n",
    "string": b'"text"\n',
    "null": b"null\n",
    "number": b"7\n",
    "huge number": b'{"a": ' + b"9" * 5000 + b"}\n",
    "infinite": b'{"a": 1e999}\n',
    "deep": DEEP,
    "half": b"half",  # the first half of the file itself
    "nul": b"\0" * 512,
}
SAY_IT_ON_STDOUT = ("cluster check lab",)
OTHER_VALUES: list[Any] = [None, [], {}, "x", -1, 1.5, True, 10**30, [None], {"x": None}]


def damages(path: Path, *, every: bool) -> Iterator[tuple[str, bytes]]:
    """What to put in place of a file, each with a name."""
    whole = path.read_bytes()
    for name, data in WHOLE_FILES.items():
        yield name, whole[: len(whole) // 2] if name == "half" else data
    if path.suffix == ".json":
        yield from _other_values(whole, every=every)
    elif path.suffix == ".jsonl":
        lines = whole.splitlines(keepends=True)
        for number in range(len(lines)) if every else sorted({0, len(lines) // 2, len(lines) - 1}):
            for name, data in _other_values(lines[number], every=every):
                yield f"line {number} {name}", b"".join([*lines[:number], data + b"\n", *lines[number + 1 :]])
            yield f"line {number} is a list", b"".join([*lines[:number], b"[1]\n", *lines[number + 1 :]])


def _other_values(text: bytes, *, every: bool) -> Iterator[tuple[str, bytes]]:
    """A document of JSON with one value after the other replaced or removed."""
    places = list(_places(json.loads(text), ()))
    if not every:
        places = random.Random(7).sample(places, min(len(places), 12))
    for place in places:
        for value in OTHER_VALUES if every else random.Random(str(place)).sample(OTHER_VALUES, 3):
            document = json.loads(text)
            _set(document, place, value)
            yield f"{place} = {value!r}", _checked(document, text)
        document = json.loads(text)
        _remove(document, place)
        yield f"{place} removed", _checked(document, text)


def _places(value: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*above, key)
        yield from _places(item, (*above, key))


def _set(document: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


def _remove(document: Any, place: tuple[Any, ...]) -> None:
    for key in place[:-1]:
        document = document[key]
    del document[place[-1]]


def _checked(document: Any, before: bytes) -> bytes:
    """As JSON; a manifest with a checksum that is right, as from a writer that has a mistake."""
    if b'\n"crc32":"' not in before:
        return json.dumps(document).encode()
    document = {key: value for key, value in document.items() if key != "crc32"}
    body = (
        b"{\n" + ",\n".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in document.items()).encode()
    )
    return body + b',\n"crc32":"%08x"\n}\n' % crc32(body)


# --- what there is to damage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's directory: a run that was really submitted (`sent`), one with a tokenizer (`first`), exports."""
    directory = tmp_path_factory.mktemp("damaged")
    person = LocalUser(directory)
    run_file = person.write_run("sent", steps=3, trainer="real")
    person.zslurm("submit", run_file, "--wait")
    (directory / "profiles.yaml").write_text("cluster: {launcher: local}\n")
    person.close()
    trained_run(directory)
    before = Path.cwd(), dict(os.environ)
    os.environ.update({name: person.environment[name] for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")})
    os.environ["ZSLURM_NICE"] = "0"
    os.chdir(directory)
    for command in (
        "checkpoint export runs/first hf --to hf",
        "checkpoint export runs/first sharded --to hf --max-shard-size 20KB",
        "checkpoint export runs/first dcp --to dcp",
        "data build texts --out built --vocab-size 512",
    ):
        done = zslurm(*command.split())
        assert done.code == 0, done.stderr
    os.chdir(before[0])
    yield directory
    os.environ.clear()
    os.environ.update(before[1])


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inside that directory, as that user."""
    monkeypatch.chdir(place)
    for name, value in {
        "HOME": place,
        "XDG_CONFIG_HOME": place / "config",
        "XDG_STATE_HOME": place / "state",
    }.items():
        monkeypatch.setenv(name, str(value))
    (place / "config/zslurm/clusters").mkdir(parents=True, exist_ok=True)
    (place / "config/zslurm/clusters/lab.yaml").write_text("cluster: {launcher: local, cpus_per_node: 2}\n")
    (place / "lines.jsonl").write_text('{"text": "a"}\n' * 50)
    with gzip.open(place / "packed.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n' * 50)
    (place / "sweep.txt").write_text("optim.weight_decay=0.1\noptim.weight_decay=0.2\n")
    return place


RUN = [
    "status",
    "status sent",
    "status sent --json",
    "logs sent",
    "logs sent --errors",
    "logs sent --rank all",
    "logs --events sent",
    "logs --events sent --json",
    "dev replay sent",
    "cancel sent",
    "requeue sent",
    "submit sent.yaml --dry-run",
    "checkpoint ls sent",
    "checkpoint prune sent --dry-run",
    "exec sent -- true",
    "status local-1",
    "config show sent.yaml",
    "generate sent -p x -n 1",
]
CKPT = [
    "checkpoint ls first",
    "checkpoint show first",
    "checkpoint verify first",
    "checkpoint diff first first",
    "checkpoint reshape first out-{n} --dp 2",
    "checkpoint export first out-{n} --to hf",
    "checkpoint export first out-{n} --to dcp",
    "checkpoint prune first --dry-run",
    "checkpoint show first --tensor embedding.weight",
    "generate first -p x -n 1",
]
HUB = ["checkpoint import {d} out-{n}", "checkpoint export {d} out2-{n}", "generate {d} -p x -n 1"]
DATA = ["data show {f}", "data verify {f}", "data show {f} --sample 1"]
READ_BY: dict[str, list[str]] = {
    "sent.yaml": [
        "submit sent.yaml --dry-run",
        "config show sent.yaml",
        "plan memory sent.yaml",
        "aegis notify sent.yaml",
    ],
    "config/zslurm/clusters/lab.yaml": [
        "config show sent.yaml --cluster lab",
        "cluster show lab",
        "cluster check lab",
        "cluster env --cluster lab",
        "cluster rails --cluster lab --here",
    ],
    "sweep.txt": ["submit sent.yaml --sweep-file sweep.txt --dry-run"],
    "runs/sent/config.json": RUN,
    "runs/sent/submissions.jsonl": RUN,
    "runs/sent/events.jsonl": RUN,
    "runs/sent/metrics.jsonl": RUN,
    "runs/sent/code.json": ["submit sent.yaml --dry-run", "status sent"],
    "runs/sent/supervisor.json": RUN,
    "runs/sent/attempts/000001/attempt.json": RUN,
    "runs/sent/attempts/000001/step.json": RUN,
    "runs/sent/attempts/000001/logs/rank-00000.log": [
        "logs sent",
        "logs sent --rank all",
        "logs sent --errors",
        "why runs/sent/attempts/000001/logs/rank-00000.log",
    ],
    "runs/sent/attempts/000001/logs/rank-00000.times": ["logs sent --rank all"],
    "state/zslurm/jobs/local-1.json": RUN,
    "runs/first/config.json": CKPT,
    "runs/first/checkpoints/step-00000080/manifest.json": CKPT,
    "runs/first/checkpoints/step-00000080/shard-00000-of-00001.safetensors": CKPT,
    "runs/first/checkpoints/.lock": ["checkpoint prune first", "checkpoint ls first"],
    "hf/config.json": HUB,
    "hf/model.safetensors": HUB,
    "hf/tokenizer.json": HUB,
    "hf/tokenizer_config.json": HUB,
    "hf/generation_config.json": HUB,
    "sharded/model.safetensors.index.json": HUB,
    "dcp/.metadata": HUB,
    "built/tokenizer.json": [*DATA, "data build texts --out again-{n} --tokenizer built/tokenizer.json"],
    "lines.jsonl": ["data build lines.jsonl --out again-{n} --vocab-size 512"],
    "packed.jsonl.gz": ["data build packed.jsonl.gz --out again-{n} --vocab-size 512"],
}


MOST = 600
"""Commands over one file in the long run: of a configuration there would be some fifty thousand."""


def check(path: Path, commands: list[str], *, every: bool) -> None:
    """Damage `path` in every way, and run the commands over it.

    The long run takes another sample each day if there are more than MOST of both, and prints the day.
    """
    day = date.today().isoformat() if every else ""
    draw = random.Random(path.name + day)
    missing = not path.exists()
    if missing:
        path.write_bytes(b"{}")
    whole, found, number = path.read_bytes(), [], 0
    try:
        found_damages = list(damages(path, every=every))
        found_damages = draw.sample(found_damages, min(MOST if every else 8, len(found_damages)))
        pairs = [(damage, command) for damage in found_damages for command in commands]
        if not every:
            pairs = [(damage, draw.choice(commands)) for damage in found_damages]
        for (name, data), command in draw.sample(pairs, min(MOST, len(pairs))):
            path.write_bytes(data)
            number += 1
            words = command.format(n=number, d=path.parent.name, f="built")
            if problem := problem_of(*words.split(), on_stdout=words in SAY_IT_ON_STDOUT):
                found.append(f"[{name}] {problem}")
    finally:
        path.write_bytes(whole)
        if missing:
            path.unlink()
        for left in [*Path().glob("out*-*"), *Path().glob("again-*")]:
            shutil.rmtree(left, ignore_errors=True)
    assert not found, f"{len(found)} of {number} {day}:\n" + "\n".join(found[:40])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("file", READ_BY)
def test_a_damaged_file_is_one_clear_line(here: Path, file: str, every: bool) -> None:
    check(here / file, READ_BY[file], every=every)


@pytest.mark.parametrize(
    ("file", "change", "command"),
    [
        ("runs/sent/config.json", {"phases": [None]}, "status sent --json"),
        ("runs/sent/config.json", {"phases": [[]]}, "status sent"),
        ("runs/sent/attempts/000001/attempt.json", {"world_size": "x"}, "logs sent --rank 0,1"),
        ("runs/sent/events.jsonl", {"outcome": "failed", "cause": {"x": None}}, "status sent"),
        ("runs/sent/events.jsonl", {"outcome": "failed", "cause": "x"}, "status"),
        ("runs/sent/events.jsonl", {"outcome": []}, "status sent"),
        ("runs/sent/events.jsonl", {"outcome": "failed", "cause": "x"}, "logs sent --errors"),
        ("runs/sent/events.jsonl", {"outcome": "failed", "cause": {"message": "m", "step": "x"}}, "status sent"),
    ],
)
def test_what_the_long_run_has_found_stays_found(
    here: Path, file: str, change: dict[str, Any], command: str
) -> None:
    path = here / file
    whole = path.read_text()
    rows = [json.loads(line) for line in whole.splitlines()] if file.endswith("jsonl") else [json.loads(whole)]
    for row in rows:
        if row.get("event") in (None, "attempt_ended", "run_ended"):
            row.update(change)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        problem = problem_of(*command.split())
    finally:
        path.write_text(whole)
    assert problem is None


def test_a_damaged_note_of_the_best_checkpoint_is_one_clear_line(here: Path) -> None:
    path = here / "runs/first/checkpoints/step-00000080/manifest.json"
    whole = path.read_bytes()
    document = json.loads(whole)
    document["cursor"]["best"] = 7
    path.write_bytes(_checked(document, whole))
    try:
        done = zslurm("checkpoint", "prune", "first", "--dry-run")
        problem = problem_of("checkpoint", "prune", "first", "--dry-run", "--drop-best")
    finally:
        path.write_bytes(whole)
    assert (done.code, problem) == (1, None)
    assert "its cursor is damaged; give --drop-best to prune" in done.stderr


def test_a_damaged_bundle_is_one_clear_line(here: Path) -> None:
    for path in sorted((here / "built").iterdir()):
        if path.is_file() and path.name != "tokenizer.json":
            check(path, DATA, every=False)
