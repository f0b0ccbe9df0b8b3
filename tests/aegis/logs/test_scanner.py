"""Faults that logs tell of: evidence of several lines, many writers, and bytes of any kind."""

from __future__ import annotations

import random
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aegis.logs.log_samples import EVERY, RECORDED
from zslurm.aegis.logs.scanner import Finding, LogScanner, faults_in, findings_in

OOM = b"torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB."


def findings(text: str | bytes) -> list[Finding]:
    return list(findings_in([text.encode() if isinstance(text, str) else text]))


def kinds(text: str | bytes) -> list[tuple[int, str, str]]:
    return [(found.number, found.match.kind, found.match.role) for found in findings(text)]


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 12, in step
    raise RuntimeError("CUDA out of memory, loss: nan")
  File "train.py", line 14, in other
    assert error, "Segmentation fault"
           ^^^^^
ValueError: no such shape
"""


def test_of_a_traceback_the_last_line_counts() -> None:
    assert kinds(TRACEBACK) == [(7, "user_error", "root")]


def test_of_a_traceback_with_labels_the_last_line_counts() -> None:
    text = "".join(f"17: [rank17]: {line}\n" for line in TRACEBACK.splitlines())
    assert kinds(text) == [(7, "user_error", "root")]
    assert findings(text)[0].match.rank == 17


def test_tracebacks_of_interleaved_writers() -> None:
    lines = TRACEBACK.splitlines()
    text = "".join(f"{rank}: {line}\n" for line in lines for rank in (3, 4))
    assert [(found.match.kind, found.match.rank) for found in findings(text)] == [
        ("user_error", 3),
        ("user_error", 4),
    ]


def test_an_exception_while_another_is_handled_is_its_cascade() -> None:
    chained = (
        "OSError: [Errno 28] No space left on device\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
    )
    assert kinds(chained + TRACEBACK) == [(1, "storage_full", "root"), (11, "user_error", "cascade")]


def test_a_page_fault_report_is_one_fault() -> None:
    gpu = "amdgpu 0000:3d:00.0: amdgpu: "
    report = [
        "[mmhub0] retry page fault (src_id:0 ring:0 vmid:3 pasid:32790)",
        " for process python pid 4711 thread python pid 4711)",
        "  in page starting at address 0x00007f5e00000000 from IH client 0x12 (VMC)",
        "VM_L2_PROTECTION_FAULT_STATUS:0x00360251",
        "     Faulty UTCL2 client ID: MP1 (0x1)",
        "     MORE_FAULTS: 0x1",
        "     WALKER_ERROR: 0x0",
        "     PERMISSION_FAULTS: 0x5",
        "     MAPPING_ERROR: 0x0",
        "     RW: 0x1",
    ]
    lines = [f"[19277.97{n:04}] {gpu}{line}".encode() for n, line in enumerate(report)]
    (fault,) = faults_in(lines, "kernel_log", node="node3", kernel=True, time=lambda: 5.0)
    assert (fault.kind, fault.role, fault.node, fault.gpu) == ("gpu_memory_fault", "root", "node3", "0000:3d:00.0")
    assert (fault.time, fault.source) == (5.0, "kernel_log")


def test_of_several_gpus_of_a_node_the_first_is_the_root() -> None:
    text = "".join(
        f"amdgpu 0000:{bus}:00.0: {{1}}[Hardware Error]: aca entry[00].STATUS=0x98000800003e0000\n"
        for bus in ("1c", "42", "42", "1c", "68")
    )
    assert [found.match.role for found in findings(text)] == ["root", "cascade", "cascade", "root", "cascade"]


LOOKUP = (
    "[W1128 08:25:10.460675212 socket.cpp:764] [c10d] The IPv6 network addresses of (node9, 29511) cannot be "
    "retrieved (gai error: -2 - Name or service not known).\n"
)
TIMED_OUT = "The client socket has timed out after 40000ms while trying to connect to (node9, 29511).\n"
REFUSED = "[W1128 08:25:10.460675 socket.cpp:752] [c10d] The client socket has failed to connect to [::1]:29511.\n"


@pytest.mark.parametrize(
    ("before", "kind", "role"),
    [
        (2 * LOOKUP, "net_config", "root"),
        (LOOKUP.replace("node9", "node8"), "peer_lost", "cascade"),
        (LOOKUP + REFUSED, "peer_lost", "cascade"),
        ("", "peer_lost", "cascade"),
    ],
    ids=["its name", "another name", "no IPv6", "no warning"],
)
def test_a_connection_that_timed_out_for_its_name_is_no_lost_peer(before: str, kind: str, role: str) -> None:
    """As torch 2.13 writes it, first by itself and then as an exception."""
    log = f"{before}[E1128 08:25:47.249730486 socket.cpp:1028] [c10d] {TIMED_OUT}"
    log += f"Traceback (most recent call last):\ntorch.distributed.DistNetworkError: {TIMED_OUT}"
    assert {(found.match.kind, found.match.role) for found in findings(log)} == {(kind, role)}


def test_what_will_be_tried_again_is_no_root() -> None:
    assert kinds("OSError: [Errno 5] Input/output error; retrying in 5 s") == [(1, "storage_fault", "advisory")]


def test_a_link_that_comes_back_ends_its_fault() -> None:
    lines = [b"ionic 0000:24:00.0 benic1p1: Link down", b"ionic 0000:24:00.0 benic1p1: Link up - 400 Gbps"]
    down, up = faults_in(lines, "kernel_log")
    assert (down.kind, down.role, down.cleared, down.nic) == ("nic_link_down", "root", False, "benic1p1")
    assert (up.kind, up.role, up.cleared, up.nic) == ("nic_link_down", "benign", True, "benic1p1")


def test_slurm_names_nodes_of_others_and_a_rank_its_own() -> None:
    (of_slurm,) = faults_in([b"srun: error: node7: task 9: Killed"], "log", node="node0")
    (own,) = faults_in(
        [b"n7.site:1:2 [0] NCCL WARN NET/IB : Got completion with error 12, opcode 0"], "log", node="n7"
    )
    assert (of_slurm.node, of_slurm.rank, own.node) == ("node7", 9, "n7")


def test_a_line_without_a_stamp_has_the_time_of_the_last_before() -> None:
    log = b"2026-02-02T12:00:00+00:00 step 7\nstep 8\n2026-02-02T12:00:09+00:00 step 9\nstep 10\n" + OOM
    (found,) = findings(log)
    assert found.time == 1770033609.0
    assert found.number == 5


def test_a_fault_behind_a_progress_bar() -> None:
    bar = b"".join(b"\r %2d%%|##   | %d/100 [00:01<00:02, 1.2it/s]" % (n, n) for n in range(100))
    assert [(found.number, found.match.kind) for found in findings(b"begin\n" + bar + OOM + b"\nend\n")] == [
        (2, "gpu_oom")
    ]


def test_a_fault_in_the_midst_of_ten_megabytes_without_a_line_break() -> None:
    filler = b"0123456789abcdef" * (5 << 16)
    log = filler + b" " + OOM + b" " + filler + b"\nKilled\n"
    chunks = [log[at : at + 65536] for at in range(0, len(log), 65536)]
    tracemalloc.start()
    found = [(one.number, one.match.kind) for one in findings_in(chunks)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(1, "gpu_oom"), (2, "teardown")]
    assert peak < 32 << 20


def test_memory_does_not_grow_with_the_log() -> None:
    noise = random.Random(2)
    scanner = LogScanner()
    peaks = []
    tracemalloc.start()
    for _ in range(3):
        tracemalloc.reset_peak()
        for _ in range(12):
            scanner.feed(b"".join(b"step of %s\n" % noise.randbytes(90).hex().encode() for _ in range(1000)))
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[2] < peaks[0] + (2 << 20), "less than half of what came after the first peak"


def test_binary_garbage_is_read() -> None:
    garbage = random.Random(3).randbytes(1 << 18)
    assert [found.match.kind for found in findings(garbage + b"\n" + OOM + b"\n" + garbage)] == ["gpu_oom"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=4000))
def test_any_bytes_are_read(data: bytes) -> None:
    for found in findings_in([data]):
        assert 1 <= found.number <= data.count(b"\n") + 1


SOME = st.sampled_from([sample.line.encode() for sample in RECORDED]) | st.binary(max_size=60)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SOME, st.sampled_from([b"\n", b"\r", b"\r\n"]))), st.randoms(use_true_random=False))
def test_how_a_log_arrives_does_not_matter(lines: list[tuple[bytes, bytes]], chance: random.Random) -> None:
    log = b"".join(line + end for line, end in lines)
    scanner, at, found = LogScanner(), 0, []
    while at < len(log):
        size = chance.randint(1, 200)
        found += scanner.feed(log[at : at + size])
        at += size
    found += scanner.close()
    assert found == findings(log)


def test_a_file_and_its_lines_tell_the_same(tmp_path: Path) -> None:
    lines = [sample.line.encode() for sample in RECORDED]
    path = tmp_path / "log"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert list(faults_in(path, "log", time=lambda: 0.0)) == list(faults_in(lines, "log", time=lambda: 0.0))


_OF_SLURMSTEPD = re.compile(r"slurmstepd: (?=error: )")
SLURMSTEPD = [line for line in dict.fromkeys(sample.line for sample in EVERY) if _OF_SLURMSTEPD.search(line)]


@pytest.mark.parametrize("line", SLURMSTEPD)
def test_slurmstepd_without_its_name_means_the_same(line: str) -> None:
    """Slurm 26.05 writes the batch step's errors with a time and without the program's name."""
    nameless = _OF_SLURMSTEPD.sub("[2026-11-28T05:00:00.123] ", line, count=1)

    def meaning(text: str) -> list[tuple[object, ...]]:
        faults = faults_in([text.encode()], "log", node="of-the-log")
        return [(fault.kind, fault.role, fault.scope, fault.node, fault.rank) for fault in faults]

    assert meaning(nameless) == meaning(line)
