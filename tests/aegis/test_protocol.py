"""Messages between supervisor and agents: what goes in comes out, and what cannot be read is named and ignored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from zslurm.aegis.protocol import (
    MARK,
    AgentReport,
    Answer,
    Command,
    Heartbeat,
    ProgressReport,
    RankProgress,
    Report,
    ReportReader,
    SensorReport,
    Stamp,
    Unreadable,
    decode_command,
    encode_command,
    encode_report,
)
from zslurm.aegis.types import Fault
from zslurm.slurm.on_nodes.message_lines import split
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
    ProgressReport(
        STAMP,
        3,
        (
            RankProgress(3, 17, Phase.SAVE, 40, 39, 0.25, waiting=True, work_s=12.5, halted=True),
            RankProgress(4, 18, Phase.STEP, 40, 39, 0.25, gone=True),
        ),
    ),
    ProgressReport(STAMP, 3, ranks(64)),
    SensorReport(STAMP, "nic", faults=(FAULT,), values={"retransmitted": 12}, first=True),
    SensorReport(STAMP, "gpu", ok=False, why="amd-smi: not found"),
    SensorReport(STAMP, "gpu", values={f"counter_{number}": number for number in range(80)}),
    AgentReport(STAMP, "started", {"pid": 4711}),
    Answer(STAMP, 8, ok=False, why="1 process is left", values={"left": [[17, "D", "python"]], "seconds": 1.5}),
    Answer(STAMP, 8, ok=False, values={"left": [[pid, "D", "python"] for pid in range(100_000, 100_100)]}),
]


class Reading:
    """What a reader makes of lines: reports, and what it ignores with the nodes."""

    def __init__(self, *lines: str | bytes) -> None:
        self.ignored: list[tuple[str, Unreadable]] = []
        reader = ReportReader(lambda node, error: self.ignored.append((node, error)))
        read = [reader.read(line if isinstance(line, bytes) else line.encode()) for line in lines]
        self.reports = [report for report in read if report is not None]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_comes_back_as_it_was(report: Report) -> None:
    lines = encode_report(report)
    assert all(len(line) < 1024 and line.isascii() and line.count("\n") == 1 for line in lines)
    read = Reading(*("3: " + line for line in lines))
    assert (read.reports, read.ignored) == ([report], [])


def test_the_report_of_eight_ranks_is_one_line() -> None:
    row = RankProgress(1023, 4_194_304, Phase.STEP, 100_000, 99_000, 12.25, waiting=True, work_s=100_000.1234)
    assert len(encode_report(ProgressReport(STAMP, 3, (row,) * 8))) == 1


@pytest.mark.parametrize(
    "command",
    [
        Heartbeat(1_700_000_000.5, 3, "abc"),
        Command("stacks", 7, attempt=3),
        Command("clean_up", 8, attempt=3, kill=False),
        Command("check", 9, nodes=("node7",)),
        Command("reach", 10, address=("10.0.0.1", 6818)),
        Command("end_rank", 11, rank=0),
        Command("quit"),
    ],
)
def test_a_command_comes_back_as_it_was(command: Heartbeat | Command) -> None:
    line = encode_command(command)
    assert line.endswith("\n") and line.count("\n") == 1
    assert decode_command(line) == command
    assert decode_command(line.encode()) == command


@pytest.mark.parametrize(
    "words", ["x" * 5_000, "\u00e4" * 5_000, "\U0001f525" * 5_000, "\x00\n" * 5_000, "\udcff" * 900]
)
def test_text_without_end_is_cut(words: str) -> None:
    fault = Fault("nan_loss", "root", "user", 1.0, "log", words, node=words, gpu=words, nic=words)
    reports: list[Report] = [
        SensorReport(STAMP, "kernel_log", ok=False, why=words, faults=(fault,), values={"words": words}),
        AgentReport(STAMP, "started", {"reason": words}),
        Answer(STAMP, 8, ok=False, why=words, values={"problems": [words, words]}),
    ]
    for report in reports:
        lines = encode_report(report)
        assert all(len(line) < 1024 and line.isascii() and line.count("\n") == 1 for line in lines)
        read = Reading(*lines)
        assert len(read.reports) == 1 and not read.ignored
    found = Reading(*encode_report(reports[0])).reports[0]
    assert isinstance(found, SensorReport)
    assert found.faults[0].line == words.replace("\udcff", "?")[:260]


def body(**changes: Any) -> list[str]:
    """The lines of a report with other fields."""
    return split(MARK, ("node3", "17"), msgspec.to_builtins(REPORTS[0]) | changes)


def test_fields_of_a_newer_agent_are_ignored_and_those_of_an_older_one_have_their_defaults() -> None:
    row = [3, 17, 1, 40, 39, 0.25, False, 0.0, False, False, "new"]
    (read,) = Reading(*body(colour="blue", ranks=[row])).reports
    assert read == ProgressReport(STAMP, 3, (RankProgress(3, 17, Phase.STEP, 40, 39, 0.25),))
    (read,) = Reading(*body(ranks=[[3, 17, 1, 40, 39, 0.25]])).reports
    assert read == ProgressReport(STAMP, 3, (RankProgress(3, 17, Phase.STEP, 40, 39, 0.25),))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "weather"},
        {"ranks": [[1, 2, 3]]},
        {"ranks": [[0, 1, 99, 1, 1, 1.0]]},
        {"ranks": 5},
        {"stamp": {"node": "node3", "seq": None, "t": 0.0, "mono": 0.0}},
        {"kind": "sensor", "sensor": "gpu", "faults": [{"kind": "x"}]},
        {"kind": "sensor", "sensor": "gpu", "faults": ["x"]},
        {"kind": "answer"},
    ],
    ids=str,
)
def test_a_message_that_another_version_knows_is_named(changes: dict[str, Any]) -> None:
    read = Reading(*body(**changes), *encode_report(REPORTS[0]))
    assert read.reports == [REPORTS[0]], "the next one is read"
    ((node, error),) = read.ignored
    assert node == "node3" and not error.is_damaged and str(error)


@pytest.mark.parametrize(
    ("line", "node"),
    [
        (MARK, ""),
        (f"{MARK} node3", ""),
        (f'{MARK} {{"node":"node3","seq":17,"t":1.5,"mono":2.5,"sensor":"progress","ok":true}}', ""),
        (f"{MARK} node3 17 0 1 {{", "node3"),
        (f"{MARK} node3 17 0 1 {'[' * 100_000}", "node3"),
        (f"{MARK} node3 17 1 1 {{}}", "node3"),
        (f"{MARK} node3 17 0 99999 {{}}", "node3"),
        (MARK.encode() + b" node3 17 0 1 \xff\xfe", "node3"),
        (split(MARK, ("node3", "17"), {"t": float("nan")})[0], "node3"),
    ],
    ids=["mark", "cut head", "older version", "cut", "deep", "index", "oversize", "bytes", "nan"],
)
def test_a_damaged_line_is_named_and_hides_no_later_one(line: str | bytes, node: str) -> None:
    read = Reading(line, *encode_report(REPORTS[0]))
    assert read.reports == [REPORTS[0]]
    assert [name for name, _ in read.ignored] == [node]


@pytest.mark.parametrize("line", ["", "\n", "{}", "srun: error: Node failure on node3", b"\xff\xfe\x00\x80"])
def test_lines_of_others_are_not_reports_and_not_named(line: str | bytes) -> None:
    read = Reading(line)
    assert (read.reports, read.ignored) == ([], [])


def test_no_beginning_of_a_report_is_a_report() -> None:
    (line,) = encode_report(REPORTS[0])
    whole = line.rstrip("\n")
    assert all(not Reading(whole[:at]).reports for at in range(len(whole)))


def test_a_report_of_which_a_line_was_lost_is_named_when_the_next_one_comes() -> None:
    long = encode_report(REPORTS[3])
    assert len(long) > 2
    (other,) = split(MARK, ("node3", "18"), msgspec.to_builtins(REPORTS[0]))
    elsewhere = split(MARK, ("node4", "1"), msgspec.to_builtins(REPORTS[0]))
    read = Reading(*long[:1], *elsewhere, *long[2:], other)
    assert read.reports == [REPORTS[0]] * 2
    assert [node for node, _ in read.ignored] == ["node3"]


@pytest.mark.parametrize(
    ("line", "is_damaged"),
    [
        ("", True), ("quit", True), (b"\xff\xff", True), ("{" * 100_000, True),
        ("{}", False), ("[]", False), ("null", False),
        ('{"kind": "command", "do": "dance"}', False), ('{"kind": "command", "do": ["stacks"]}', False),
        ('{"kind": "command", "do": "stacks", "id": "seven"}', False),
        ('{"kind": "command", "do": "check", "nodes": 5}', False),
        ('{"kind": "heartbeat", "time": 1}', False), ('{"do": "quit"}', False),
        ('{"heartbeat": 1.5, "attempt": 1, "generation": "a"}', False),
    ],
)  # fmt: skip
def test_what_is_no_command_is_not_obeyed(line: str | bytes, is_damaged: bool) -> None:
    with pytest.raises(Unreadable) as raised:
        decode_command(line)
    assert raised.value.is_damaged == is_damaged


def test_a_field_of_a_newer_supervisor_is_ignored() -> None:
    newer = json.loads(encode_command(Command("stacks", 7))) | {"deeply": True}
    assert decode_command(json.dumps(newer)) == Command("stacks", 7)
