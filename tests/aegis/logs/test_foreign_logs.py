"""Other systems' logs: no line of theirs excludes a node, and no evidence of hardware is lost behind a prefix.

The lines are quoted from the public samples of logpai/loghub; each of them was a false alarm once.
"""

from __future__ import annotations

import pytest

from tests.aegis.logs.log_samples import FORMS, RECORDED
from zslurm.aegis.fault_kinds import rule_of
from zslurm.aegis.logs.hardware_names import names_of
from zslurm.aegis.logs.scanner import findings_in
from zslurm.aegis.logs.signatures import Match, Signatures

FALSE_ALARMS = {
    "BGL: a packet on the tree network": "KERNREC 1130529611 2005.10.28 R63-M1-N5-C:J17-U01"
    " 2005-10-28-13.00.11.719498 R63-M1-N5-C:J17-U01 RAS KERNEL FATAL Error receiving packet on tree"
    " network, expecting type 57 instead of type 3 (softheader=0064588e 8aff0003 00000002 00000000)"
    " PSR0=00001f01 PSR1=00000000 PRXF=00000002 PIXF=00000007",
    "BGL: a program interrupt": "- 1118767381 2005.06.14 R20-M0-N2-C:J13-U11 2005-06-14-09.43.01.478244"
    " R20-M0-N2-C:J13-U11 RAS KERNEL FATAL program interrupt: illegal instruction......0",
    "BGL: a user's directory": "APPOUT 1134357549 2005.12.11 R63-M1-N0-I:J18-U11 2005-12-11-19.19.09.737509"
    " R63-M1-N0-I:J18-U11 RAS APP FATAL ciod: LOGIN chdir(/p/gb1/stella/RAPTOR/2183) failed: Input/output error",
    "Hadoop: a task's exception": "2015-10-18 18:06:26,029 FATAL [IPC Server handler 13 on 62270]"
    " org.apache.hadoop.mapred.TaskAttemptListenerImpl: Task: attempt_1445144423722_0020_m_000002_0 - exited :"
    " java.net.NoRouteToHostException: No Route to Host from  MININT-FNANLI5/127.0.0.1 to msra-sa-41:9000 failed",
    "Linux: ftpd's client left": "Jul 25 23:23:13 combo ftpd[26463]: getpeername (ftpd): Transport endpoint is not"
    " connected",
    "Mac: a messenger is offline": "Jul  3 16:28:34 authorMacBook-Pro QQ[10018]:"
    " tcp_connection_destination_perform_socket_connect 21152 connectx to 203.205.147.206:8080@0 failed: [51]"
    " Network is unreachable",
    "Thunderbird: sshd's port": "- 1131567055 2005.11.09 tbird-admin1 Nov 9 12:10:55 local@tbird-admin1"
    " sshd[1761]: error: Bind to port 22 on 0.0.0.0 failed: Address already in use.",
}


def match_of(line: str) -> Match | None:
    return next((finding.match for finding in findings_in([line.encode()])), None)


@pytest.mark.parametrize("line", FALSE_ALARMS.values(), ids=FALSE_ALARMS)
def test_a_line_of_another_system_is_no_root(line: str) -> None:
    found = match_of(line)
    assert found is None or found.role != "root"


@pytest.mark.parametrize(
    "line",
    [
        "RAS: fatal error in unit 3",
        "uncorrectable memory error in controller 7",
        "2 uncorrectable errors were found on the tape",
        "double-bit ECC error detected in cache",
        "GATEWAY: link down",
        "pump surprise down",
        "Nodes A and B are not responding",
        "BUG: Bad page state in process devlink  pfn:1f2e3",
    ],
)
def test_words_that_name_no_hardware_of_this_cluster_exclude_nothing(line: str) -> None:
    found = match_of(line)
    assert found is None or found.role != "root" or rule_of(found.kind).exclude_after is None


def test_every_rule_that_excludes_at_once_or_the_second_time_requires_a_name() -> None:
    for rule in Signatures.load().rules:
        excludes = rule_of(rule.match.kind).exclude_after in (1, 2)
        if rule.match.role == "root" and excludes and rule.match.kind != "node_dead":
            assert rule.names is not None, rule.any


UNKNOWN_WORDS_OF_A_GPU_DRIVER = {
    "amdgpu 0000:c1:00.0: amdgpu: failed to initialize the overdrive tables": "gpu_init_fail",
    "amdgpu 0000:c1:00.0: amdgpu: reading the voltage timed out": "gpu_hang_reset",
    "[drm] a worker is stuck": "gpu_hang_reset",
}


@pytest.mark.parametrize(("line", "kind"), UNKNOWN_WORDS_OF_A_GPU_DRIVER.items())
def test_a_driver_and_a_verb_do_not_exclude_a_node(line: str, kind: str) -> None:
    """What excludes a node at once is known word for word: a GPU that fails also writes such a line."""
    found = match_of(line)
    assert found is not None
    assert (found.kind, found.role) == (kind, "advisory")


def test_names_of_hardware() -> None:
    assert names_of("gpu").search("GPU[3]\t\t: RAS")
    assert names_of("gpu").search("hipErrorNoDevice")
    assert not names_of("gpu").search("hipsters, RAS KERNEL FATAL")
    assert names_of("nic").search("hinic3 0000:84:00.0: link")
    assert names_of("nic").search("anydriver 0000:84:00.0 wan0: link")
    assert not names_of("nic").search("nice device, the link is down")
    assert names_of("nic").search("[node7:3957:0:3957]       ud_ep.c:248  Fatal: UD endpoint")
    assert not names_of("nic").search("sound_ep.c:248  Fatal: endpoint")
    with pytest.raises(KeyError):
        names_of("toaster")


WATCHDOGS = (
    "[rank3]:[E1019 01:04:03.357615073 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0 Rank 3] Process group"
    " watchdog thread terminated with exception: ",
    "[rank3]:[E1019 01:04:03.357615073 ProcessGroupNCCL.cpp:2057] [PG ID 0 Rank 3] Exception (either an error or"
    " timeout) detected by watchdog at work: 5, last enqueued NCCL work: 6, last completed NCCL work: 4: ",
    "[rank3]:[E1019 01:04:03.357615073 ProcessGroupNCCL.cpp:683] [Rank 3] Some NCCL operations have failed or"
    " timed out. To avoid data inconsistency, we are taking the entire process down: ",
)
EVIDENCE = {
    "HIP error: uncorrectable ECC error encountered": "gpu_ras_uncorrectable",
    "HIP error: hipErrorECCNotCorrectable": "gpu_ras_uncorrectable",
    "HIP error: an illegal memory access was encountered": "gpu_memory_fault",
    "HIP error: unspecified launch failure": "gpu_memory_fault",
    "HIP error: the launch timed out and was terminated": "gpu_hang_reset",
    "HIP error: device lost": "gpu_init_fail",
    "NCCL error: remote process exited. Last error: NET/IB : Got completion from peer 10.0.0.7<4711> with"
    " status=12 opcode=0 len=0 vendor err 129 (Send) hca ionic_3": "nic_fault",
    "NCCL error: Last error: ibv_post_send() failed with error Cannot allocate memory": "nic_fault",
    "HIP out of memory. Tried to allocate 3.31 GiB": "gpu_oom",
}


@pytest.mark.parametrize("prefix", WATCHDOGS, ids=["terminated", "detected", "failed"])
@pytest.mark.parametrize(("evidence", "kind"), EVIDENCE.items())
def test_evidence_behind_a_watchdogs_prefix_wins_over_the_prefix(prefix: str, evidence: str, kind: str) -> None:
    found = match_of(prefix + evidence)
    assert found is not None
    assert (found.kind, found.role, found.rank) == (kind, "root", 3)


def test_what_gpus_reported_wins_behind_a_watchdogs_prefix_in_every_recorded_form() -> None:
    for sample in RECORDED + FORMS:
        found = match_of(sample.line)
        if sample.kind.startswith(("gpu_ras", "gpu_hang", "gpu_bad", "xgmi")) and found and found.role == "root":
            behind = match_of(WATCHDOGS[0] + sample.line)
            assert behind is not None
            assert behind.kind.startswith(("gpu_", "xgmi")), sample.line
