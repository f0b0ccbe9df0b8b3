"""The node and the rank that srun, Open MPI, MPICH, torchrun, DeepSpeed and Ray name in their summaries."""

from __future__ import annotations

import pytest

from zslurm.aegis.logs.classify import Suspect, classify
from zslurm.aegis.logs.scanner import as_fault, findings_in

TORCHRUN = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-05-21_15:43:03
  host      : node4
  rank      : 33 (local_rank: 1)
  exitcode  : 1 (pid: 14751)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-05-21_15:43:03
  host      : node3.cluster
  rank      : 25 (local_rank: 1)
  exitcode  : %s (pid: 14750)
  error_file: <N/A>
  traceback : Signal %s received by PID 14750
============================================================
"""
OPEN_MPI = """\
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[22380,1],3]
  Exit code:    1
--------------------------------------------------------------------------
"""
OPEN_MPI_WRAPPED = """\
mpiexec noticed that process rank 7 with PID 10313 on node proton exited on
signal 11 (Segmentation fault).
"""
MPICH = """\
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 3 PID 4711 RUNNING AT cn042
=   KILLED BY SIGNAL: 9 (Killed)
===================================================================================
"""


def suspect(log: str) -> Suspect:
    return classify([("log", [log.encode()])]).suspect


@pytest.mark.parametrize(
    ("log", "node", "rank"),
    [
        ("srun: error: node3: task 5: Killed", "node3", 5),
        ("srun: error: node3: tasks 8-15: Exited with exit code 1", "node3", 8),
        ("srun: error: node[1-3]: tasks 0-23: Killed", "node[1-3]", 0),
        ("mpirun noticed that process rank 4 with PID 0 on node n017 exited on signal 9 (Killed).", "n017", 4),
        ("prterun noticed that process rank 4 with PID 12 on node n01 exited on signal 6 (Aborted).", "n01", 4),
        (
            'mpirun has exited due to process rank 3 with PID 12 on node n017 calling "abort". This may',
            "n017",
            3,
        ),
        ("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD", None, 3),
        ("  Process name: [prterun-login1-4242@1,7]", None, 7),
        ("pdsh@head: node3: ssh exited with exit code 1", "node3", None),
        (OPEN_MPI, None, 3),
        (OPEN_MPI_WRAPPED, "proton", 7),
        (MPICH, "cn042", 3),
        (TORCHRUN % ("-9", "9 (SIGKILL)"), "node3.cluster", 25),
        (TORCHRUN % ("-11", "11 (SIGSEGV)"), "node3.cluster", 25),
        (
            "The node with node id: ada3a3771fac and address: 10.0.0.7 and node name: gpu7 has been marked dead"
            " because the detector has missed too many heartbeats from it.",
            "gpu7",
            None,
        ),
    ],
)
def test_the_suspect_is_whom_the_summary_names(log: str, node: str | None, rank: int | None) -> None:
    assert suspect(log) == Suspect(node=node, rank=rank)


def test_each_entry_of_torchruns_table_has_its_own_host_and_rank() -> None:
    exits = [f for f in findings_in([(TORCHRUN % ("-9", "9 (SIGKILL)")).encode()]) if "exitcode" in f.text]
    assert [(f.match.node, f.match.rank) for f in exits] == [("node4", 33), ("node3.cluster", 25)]


def test_a_local_rank_is_not_a_rank() -> None:
    line = "torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 5 (pid: 2630)"
    assert suspect(line).rank is None


def test_which_rank_of_several_nodes_ran_where_is_not_guessed() -> None:
    log = "[rank5]: ValueError: no such shape\nsrun: error: node[1-3]: tasks 0-23: Exited with exit code 1\n"
    assert suspect(log) == Suspect(rank=5)


def test_what_a_launcher_tells_is_of_the_node_that_it_names() -> None:
    line = "mpirun noticed that process rank 4 with PID 0 on node n017 exited on signal 11 (Segmentation fault)."
    (finding,) = findings_in([line.encode()])
    assert as_fault(finding, "log", node="login1", time=lambda: 0.0).node == "n017"


def test_the_address_of_an_error_belongs_to_the_error() -> None:
    log = (
        "amdgpu 0000:08:00.0: amdgpu: 1 new uncorrectable hardware errors detected in umc block\n"
        "amdgpu 0000:08:00.0: amdgpu: Error Address(PA):0x60d1a4480  Row:0x1834 Col:0x0  Bank:0x7 Channel:0x74\n"
    )
    first, second = findings_in([log.encode()])
    assert (first.match.kind, first.match.role) == (second.match.kind, "root")
    assert second.continues
    assert second.match.role == "cascade"
