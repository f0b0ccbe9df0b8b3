"""The kernel log: only new lines, through rotation and truncation, and one word if it cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.aegis.contexts import context
from tests.waiting import wait_for
from zslurm.aegis.agent.kernel_source.journal import Journal
from zslurm.aegis.agent.kernel_source.kmsg import Kmsg, parse_record
from zslurm.aegis.agent.kernel_source.log_file import LogFile
from zslurm.aegis.agent.kernel_source.source import NoMoreLines, Position, Source, Unavailable, text_of
from zslurm.aegis.agent.sensor import Reading
from zslurm.aegis.agent.sensors.kernel_log import KernelLog, make, open_source
from zslurm.aegis.fault_kinds import BENIGN, BENIGN_AFTER_FAULT, GPU_RAS_UNCORRECTABLE, NIC_LINK_DOWN
from zslurm.aegis.logs.signatures import Match


def match(line: str) -> Match | None:
    """A table of four signatures."""
    if "uncorrectable" in line:
        return Match(GPU_RAS_UNCORRECTABLE, "root", "gpu", gpu=line.split()[1].rstrip(":"))
    if "Link is Down" in line:
        return Match(NIC_LINK_DOWN, "root", "nic", nic="eth11")
    if "Link is Up" in line:
        return Match(BENIGN_AFTER_FAULT, "benign", "unknown", nic="eth11", clears=NIC_LINK_DOWN)
    return Match(BENIGN, "benign", "unknown") if "VM inv eng" in line else None


ECC = "amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!"


def sensor(tmp_path: Path, path: Path) -> KernelLog:
    return KernelLog(context(tmp_path / "root"), match, lambda at: LogFile(path, at))


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def kinds(reading: Reading) -> list[str]:
    return [fault.kind for fault in reading.faults]


def test_only_lines_after_the_start_count(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, ECC)
    followed = sensor(tmp_path, log)
    assert kinds(followed.read()) == []
    append(log, "[   12.5] " + ECC, "ring comp_1.0.1 uses VM inv eng 5", "usb 1-1: new device")
    reading = followed.read()
    (fault,) = reading.faults
    assert (fault.kind, fault.role, fault.scope, fault.gpu) == (
        "gpu_ras_uncorrectable", "root", "gpu", "0000:1c:00.0",
    )  # fmt: skip
    assert (fault.node, fault.source, fault.line) == ("node0", "kernel_log", ECC)
    assert reading.values == {"lines": 3, "left_out": 0}
    assert kinds(followed.read()) == []


def test_the_end_of_a_fault_is_told_as_such(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = sensor(tmp_path, log)
    append(log, "eth11: NIC Link is Down", "eth11: NIC Link is Up 10 Gbps")
    down, up = followed.read().faults
    assert (down.kind, down.nic, down.cleared) == ("nic_link_down", "eth11", False)
    assert (up.kind, up.nic, up.cleared) == ("nic_link_down", "eth11", True)


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = sensor(tmp_path, log)
    with log.open("a") as file:
        file.write(ECC[:40])
        file.flush()
        assert kinds(followed.read()) == []
        file.write(ECC[40:] + "\n")
    assert kinds(followed.read()) == ["gpu_ras_uncorrectable"]


def test_rotation_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = sensor(tmp_path, log)
    append(log, ECC)
    log.rename(tmp_path / "kern.log.1")
    append(log, "eth11: NIC Link is Down")
    assert kinds(followed.read()) == ["gpu_ras_uncorrectable", "nic_link_down"]
    log.rename(tmp_path / "kern.log.1")
    assert kinds(followed.read()) == [], "the new file is not there yet"
    append(tmp_path / "kern.log.1", ECC)
    assert kinds(followed.read()) == ["gpu_ras_uncorrectable"], "the old one is read on meanwhile"
    append(log, "eth11: NIC Link is Down")
    assert kinds(followed.read()) == ["nic_link_down"]


def test_a_truncated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, "x" * 500)
    followed = sensor(tmp_path, log)
    log.write_text("")
    append(log, ECC)
    assert kinds(followed.read()) == ["gpu_ras_uncorrectable"]


def test_a_log_that_is_missing_is_unavailable_until_it_is_there(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    followed = sensor(tmp_path, log)
    reading = followed.read()
    assert (reading.ok, reading.why) == (False, f"{log}: No such file or directory")
    append(log, ECC)
    reading = followed.read()
    assert reading.ok and kinds(reading) == ["gpu_ras_uncorrectable"]


def test_a_directory_is_unavailable(tmp_path: Path) -> None:
    reading = sensor(tmp_path, tmp_path).read()
    assert (reading.ok, reading.why) == (False, f"{tmp_path}: Is a directory")


def test_binary_garbage_and_lines_without_end(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = sensor(tmp_path, log)
    with log.open("ab") as file:
        file.write(os.urandom(4096).replace(b"\n", b"") + b"\n" + b"\xff\xfe" * 300_000 + b"\n")
        file.write(ECC.encode() + b"\n")
    assert kinds(followed.read()) == ["gpu_ras_uncorrectable"]


def test_a_storm_is_told_by_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = sensor(tmp_path, log)
    append(log, *[ECC] * 1000, "eth11: NIC Link is Down")
    reading = followed.read()
    assert kinds(reading) == ["gpu_ras_uncorrectable"] * 5 + ["nic_link_down"]
    assert reading.values == {"lines": 1001, "left_out": 995}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f"[13850.912648] {ECC}", ECC),
        (f"<4>[13850.912648] {ECC}", ECC),
        (f"[13850.912648] node7 kernel: {ECC}", ECC),
        (f"Nov 17 13:16:56 superserver kernel: [11314.655315] {ECC}", ECC),
        (f"2024-11-24T17:53:23,028841-06:00 node7 kernel: {ECC}", ECC),
        (ECC, ECC),
        ("", ""),
    ],
)
def test_time_and_host_are_left_out(line: str, text: str) -> None:
    assert text_of(line) == text


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (b"3,1337,5140900,-;amdgpu 0000:1c:00.0: hang\n DEVICE=+pci:0000:1c:00.0\n", "amdgpu 0000:1c:00.0: hang"),
        (b"4,1,2,-;tab\\x09and \\xff byte\n", "tab\tand \ufffd byte"),
        (b"30,1,2,-;systemd[1]: uncorrectable words of user space\n", None),
        (b"no record", None),
        (b";", None),
        (b"", None),
    ],
)  # fmt: skip
def test_records_of_kmsg(record: bytes, text: str | None) -> None:
    assert parse_record(record) == text


def test_kmsg_that_may_not_be_opened_and_no_journal(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"dev/kmsg: No such file or directory; no journalctl$"):
        open_source(context(tmp_path))
    followed = KernelLog(context(tmp_path / "root"), match, lambda at: Kmsg(tmp_path / "kmsg", at))
    for _ in range(2):
        reading = followed.read()
        assert (reading.ok, reading.why) == (False, f"{tmp_path}/kmsg: No such file or directory")
    followed.close()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_real_kmsg_starts_at_its_end() -> None:
    source = Kmsg(Path("/dev/kmsg"))
    assert len(source.lines()) < 50, "the buffer's old lines are not given"
    source.close()


def test_the_setting_names_a_file_of_the_node(tmp_path: Path) -> None:
    log = tmp_path / "kern-node0.log"
    log.touch()
    source = open_source(context(tmp_path / "root", kernel_log=str(tmp_path / "kern-%n.log")))
    append(log, ECC)
    assert source.lines() == [ECC]
    source.close()


def journalctl(tmp_path: Path, script: str) -> str:
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


ENVIRON = {"PATH": "/usr/bin:/bin"}


def test_journalctl_is_followed_and_ended(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    os.mkfifo(feed)
    old = "[ 1.000000] node0 kernel: old"
    program = journalctl(tmp_path, f'case "$*" in *-f*) exec cat {feed};; *) echo "{old}";; esac')
    source = Journal(program, ENVIRON, 30.0)
    assert source.lines() == []
    with feed.open("w") as file:
        file.write(f"[ 2.000000] node0 kernel: {ECC}\n")
        file.flush()
        assert wait_for(source.lines, "the line") == [ECC]

    def ended() -> bool:
        try:
            return source.lines() != []
        except NoMoreLines:
            return True

    wait_for(ended, "the end of journalctl")
    source.close()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'No journal files were opened due to insufficient permissions.' >&2", "insufficient permissions"),
        ("true", "shows no line of the kernel: it is empty"),
        ("exec sleep 600", "timed out after 0.2 s"),
    ],
)  # fmt: skip
def test_journalctl_that_does_not_answer(tmp_path: Path, script: str, why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        Journal(journalctl(tmp_path, script), ENVIRON, 0.2)


def test_a_log_that_ended_is_opened_again_later(tmp_path: Path) -> None:
    class Once(Source):
        def lines(self) -> list[str]:
            raise NoMoreLines("journalctl has ended")

        def position(self) -> Position:
            return {}

        def close(self) -> None:
            closed.append(self)

    closed: list[Source] = []
    opened: list[Source] = []

    def open_log(at: Position | None) -> Source:
        opened.append(Once())
        return opened[-1]

    followed = KernelLog(context(tmp_path / "root"), match, open_log)
    assert [followed.read().why for _ in range(3)] == ["journalctl has ended"] * 3
    assert len(opened) == len(closed) == 1, "not at once, or a dead journal would be started again and again"


def test_off_is_no_sensor(tmp_path: Path) -> None:
    assert make(context(tmp_path / "root", kernel_log="off")) is None


def test_the_journal_of_the_whole_machine_is_not_read_under_a_moved_root(tmp_path: Path) -> None:
    journalctl(tmp_path, f"touch {tmp_path}/called; echo '[ 1.0] node0 kernel: old'")
    with pytest.raises(Unavailable):
        open_source(context(tmp_path, environ={"PATH": f"{tmp_path}:/bin"}))
    assert not (tmp_path / "called").exists()
