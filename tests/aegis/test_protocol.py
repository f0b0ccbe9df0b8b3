"""Lines between supervisor and agents: what goes in comes out, no line is too long, and garbage is not read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zslurm.aegis.protocol import (
    LONGEST,
    MARK,
    AgentReport,
    Answer,
    Command,
    Heartbeat,
    ProgressReport,
    RankProgress,
    Report,
    SensorReport,
    Stamp,
    decode_command,
    decode_report,
    encode_command,
    encode_report,
    joined,
)
from zslurm.aegis.types import Fault
from zslurm.train.progress import Phase

STAMP = Stamp("node3", 17, 1_700_000_000.125, 52.5)
FAULT = Fault(
    "nic_link_down", "root", "nic", 1_700_000_000.0, "nic", "ionic_3: port 1 is DOWN", node="node3", nic="ionic_3"
)


def ranks(count: int) -> tuple[RankProgress, ...]:
    return tuple(RankProgress(rank, 10_000 + rank, Phase.STEP, 4_000, 3_900, 0.25) for rank in range(count))


REPORTS: list[Report] = [
    ProgressReport(STAMP, 3, ranks(8)),
    ProgressReport(STAMP, 0, ok=False, why="/dev/shm: Input/output error"),
    SensorReport(STAMP, "nic", faults=(FAULT,), values={"retransmitted": 12}),
    SensorReport(STAMP, "gpu", ok=False, why="amd-smi: not found"),
    AgentReport(STAMP, "started", {"pid": 4711}),
    Answer(STAMP, 8, ok=False, why="1 process is left", values={"left": [[17, "D", "python"]], "seconds": 1.5}),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_comes_back_as_it_was(report: Report) -> None:
    (line,) = encode_report(report)
    assert decode_report(line) == report
    assert decode_report(line.encode()) == report


def test_a_rank_that_waits_for_its_peers_and_one_that_does_not_say() -> None:
    waits = RankProgress(3, 17, Phase.STEP, 40, 39, 0.25, waiting=True, work_s=12.5, halted=True)
    gone = replace(waits, halted=False, gone=True)
    (line,) = encode_report(ProgressReport(STAMP, 3, (waits, gone)))
    assert decode_report(line) == ProgressReport(STAMP, 3, (waits, gone))
    short = MARK + json.dumps(good_body() | {"ranks": [[3, 17, 1, 40, 39, 0.25]]})
    assert decode_report(short) == ProgressReport(STAMP, 3, (RankProgress(3, 17, Phase.STEP, 40, 39, 0.25),))


@pytest.mark.parametrize(
    "command",
    [
        Heartbeat(1_700_000_000.5, 3, "abc"),
        Command("stacks", 7, attempt=3),
        Command("clean_up", 8, attempt=3, kill=False),
        Command("check", 9, nodes=("node7",)),
        Command("quit"),
    ],
)
def test_a_command_comes_back_as_it_was(command: Heartbeat | Command) -> None:
    line = encode_command(command)
    assert line.endswith("\n") and line.count("\n") == 1
    assert decode_command(line) == command


def test_commands_are_read_as_they_were_agreed_on() -> None:
    assert decode_command('{"do": "stacks", "id": 7, "attempt": 3}') == Command("stacks", 7, attempt=3)
    assert decode_command('{"do": "quit"}') == Command("quit")


def test_many_ranks_take_several_lines_of_one_look() -> None:
    report = ProgressReport(STAMP, 3, ranks(64))
    lines = encode_report(report)
    parts = [decode_report(line) for line in lines]
    assert len(lines) > 1
    assert all(len(line) <= LONGEST + 1 and line.endswith("\n") for line in lines)
    assert [rank for part in parts if isinstance(part, ProgressReport) for rank in part.ranks] == list(
        report.ranks
    )
    assert [part.more for part in parts if isinstance(part, ProgressReport)] == [True] * (len(lines) - 1) + [False]
    assert {part.stamp for part in parts if part} == {STAMP}


def test_many_faults_and_values_take_several_lines() -> None:
    faults = tuple(
        Fault("gpu_ras_uncorrectable", "root", "gpu", 1.0, "gpu", f"GPU {gpu}: " + "word " * 30, gpu=str(gpu))
        for gpu in range(8)
    )
    values = {f"counter_{number}": number for number in range(80)}
    lines = encode_report(SensorReport(STAMP, "gpu", faults=faults, values=values))
    parts = [part for line in lines if isinstance(part := decode_report(line), SensorReport)]
    assert len(parts) == len(lines) > 2
    assert max(map(len, lines)) <= LONGEST + 1
    assert [fault for part in parts for fault in part.faults] == list(faults)
    assert {name: value for part in parts for name, value in part.values.items()} == values


def test_a_long_answer_is_joined() -> None:
    left = [[pid, "D", "python"] for pid in range(100_000, 100_100)]
    answer = Answer(STAMP, 8, ok=False, values={"left": left, "killed": [], "seconds": 2.5})
    lines = encode_report(answer)
    parts = [part for line in lines if isinstance(part := decode_report(line), Answer)]
    assert len(lines) > 1
    assert [part.done for part in parts] == [False] * (len(lines) - 1) + [True]
    assert joined(parts) == answer


@pytest.mark.parametrize(
    "words", ["x" * 5_000, "\u00e4" * 5_000, "\U0001f525" * 5_000, "\x00\n" * 5_000, "\udcff" * 900]
)
def test_words_without_end_are_cut(words: str) -> None:
    fault = Fault("nan_loss", "root", "user", 1.0, "log", words, node=words, gpu=words, nic=words)
    reports: list[Report] = [
        SensorReport(STAMP, "kernel_log", ok=False, why=words, faults=(fault,), values={"words": words}),
        AgentReport(STAMP, "started", {"reason": words}),
        Answer(STAMP, 8, ok=False, why=words, values={"problems": [words, words]}),
        ProgressReport(STAMP, 3, ranks(8), ok=False, why=words),
    ]
    for report in reports:
        lines = encode_report(report)
        assert all(len(line) <= LONGEST + 1 and line.isascii() and line.count("\n") == 1 for line in lines)
        read = [decode_report(line) for line in lines]
        assert all(read)
    (first, *_) = encode_report(SensorReport(STAMP, "kernel_log", faults=(fault,)))
    found = decode_report(first)
    assert isinstance(found, SensorReport) and found.faults and words.startswith(found.faults[0].line)
    assert found.faults[0].line


def test_a_label_in_front_is_ignored() -> None:
    (line,) = encode_report(REPORTS[0])
    assert decode_report("3: " + line) == REPORTS[0]


def good_body() -> dict[str, object]:
    (line,) = encode_report(REPORTS[0])
    body = json.loads(line.removeprefix(MARK))
    assert isinstance(body, dict)
    return body


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\n",
        MARK,
        MARK + "{",
        MARK + "[1, 2]",
        MARK + "{}",
        MARK + '"words"',
        MARK + "[" * 100_000,
        "{}",
        "srun: error: Node failure on node3",
        b"\xff\xfe\x00\x80",
        MARK.encode() + b'{"node": "\xff',
        MARK + json.dumps(good_body() | {"ranks": [[1, 2, 3]]}),
        MARK + json.dumps(good_body() | {"ranks": [[0, 1, 99, 1, 1, 1]]}),
        MARK + json.dumps(good_body() | {"ranks": 5}),
        MARK + json.dumps(good_body() | {"t": "yesterday"}),
        MARK + json.dumps(good_body() | {"t": float("nan")}),
        MARK + json.dumps(good_body() | {"seq": float("1e999")}),
        MARK + json.dumps(good_body() | {"seq": None}),
        MARK + json.dumps(good_body() | {"sensor": "gpu", "faults": [{"kind": "x"}]}),
        MARK + json.dumps(good_body() | {"sensor": "gpu", "faults": ["x"]}),
        MARK + json.dumps(good_body() | {"sensor": "answer"}),
    ],
)
def test_what_is_no_report_is_not_read(line: str | bytes) -> None:
    assert decode_report(line) is None


def test_no_beginning_of_a_report_is_a_report() -> None:
    (line,) = encode_report(REPORTS[2])
    whole = line.rstrip("\n")
    assert [decode_report(whole[:at]) for at in range(len(whole))] == [None] * len(whole)


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", "null", '{"do": "dance"}', '{"do": ["stacks"]}', '{"do": "stacks", "id": "seven"}',
     '{"heartbeat": 1}', '{"heartbeat": NaN, "attempt": 1, "generation": "a"}', '{"do": "check", "nodes": 5}',
     b"\xff\xff", "quit"],
)  # fmt: skip
def test_what_is_no_command_is_not_obeyed(line: str | bytes) -> None:
    assert decode_command(line) is None
