"""What a log shows of how a program ended."""

from __future__ import annotations

import pytest

from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.supervisor.rank_exits import fault_of_end
from zslurm.job.program.ending import CHILD_KILLED, error_in

TRACEBACK = """step 3
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    work()
ValueError: a matrix has the wrong shape
"""
OF_RANK_0 = """[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:51112: Connection reset by peer
"""
OF_RANK_1 = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB
"""


def torchrun(rank: int, code: int, what: str) -> str:
    """What torchrun prints in the end."""
    return f"""Traceback (most recent call last):
  File "/bin/torchrun", line 6, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{"=" * 60}
train.py FAILED
{"-" * 60}
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_05:04:59
  host      : node1
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 30177)
  error_file: <N/A>
  traceback : {what}
{"=" * 60}
"""


SEE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@pytest.mark.parametrize(
    ("log", "error", "message"),
    [
        (TRACEBACK, "ValueError", "a matrix has the wrong shape"),
        (TRACEBACK + "SomeWarning: and more is printed\n", "ValueError", "a matrix has the wrong shape"),
        (
            TRACEBACK + "Traceback (most recent call last):\n  cut off",
            "ValueError",
            "a matrix has the wrong shape",
        ),
        (OF_RANK_1 + OF_RANK_0 + torchrun(1, 1, SEE), "OutOfMemoryError", "HIP out of memory. Tried"),
        (OF_RANK_0 + OF_RANK_1 + torchrun(1, 1, SEE), "OutOfMemoryError", "HIP out of memory. Tried"),
        (
            OF_RANK_0 + torchrun(1, -9, "Signal 9 (SIGKILL) received by PID 3"),
            CHILD_KILLED,
            "rank 1 of",
        ),
        (OF_RANK_0 + torchrun(1, -15, "Signal 15 (SIGTERM) received by PID 3"), "RuntimeError", "[/gloo"),
        ("Traceback (most recent call last):\n  ...\nKeyError\n" + "x" * 9, None, None),
        (torchrun(1, 1, SEE), None, None),
        ("\ufffd\ufffd no text \x00", None, None),
    ],
)
def test_the_first_failure_is_found(log: str, error: str | None, message: str | None) -> None:
    found = error_in(log)
    assert found.get("error") == error
    assert str(found.get("message")).startswith(str(message))


def test_a_process_that_torchrun_lost_by_a_signal_is_a_killed_rank() -> None:
    end = {"rank": 0, "node": "node1", "exit_code": 1, "time": 1.0, "step": 3}
    end |= error_in(OF_RANK_0 + torchrun(1, -9, "Signal 9 (SIGKILL) received by PID 3"))
    fault = fault_of_end(end, ["node1"], Signatures.load())
    assert (fault.kind, fault.role, fault.node) == ("rank_killed", "root", "node1")
