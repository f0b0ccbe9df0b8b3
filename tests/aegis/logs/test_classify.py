"""The diagnosis of a job, told from its logs."""

from __future__ import annotations

from zslurm.aegis.logs.classify import Diagnosis, Suspect, classify

RAS = "amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!"
WATCHDOG = (
    "[rank%d]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 Rank %d] Exception (either an error or timeout) detected by "
    "watchdog at work: %d, last enqueued NCCL work: 811, last completed NCCL work: %d."
)
OWN = "[rank3]: ValueError: no such shape"
KILLED = "srun: error: node3: tasks 24-31: Killed"


def diagnosis(*logs: str) -> Diagnosis:
    return classify((f"log{n}", [log.encode()]) for n, log in enumerate(logs))


def root_of(*logs: str) -> tuple[str, int] | None:
    root = diagnosis(*logs).root
    return None if root is None else (root.match.kind, root.finding.number)


def at(second: int, line: str) -> str:
    return f"2026-02-02T12:00:{second:02}+00:00 {line}"


def test_nothing_wrong() -> None:
    told = diagnosis("step 1 loss 2.1\nstep 2 loss 2.0\n")
    assert (told.root, told.lines, told.advice, told.suspect) == (None, (), "", Suspect())


def test_the_earliest_root_wins() -> None:
    assert root_of("\n".join([KILLED, WATCHDOG % (1, 1, 5, 4), RAS, "ValueError: x"])) == (
        "gpu_ras_uncorrectable",
        3,
    )


def test_over_files_by_time() -> None:
    late, early = at(30, "ValueError: x"), at(10, "OSError: [Errno 116] Stale file handle")
    assert root_of(late, early) == ("storage_fault", 1)
    assert root_of(early, late) == ("storage_fault", 1)


def test_over_files_by_their_order_where_there_is_no_time() -> None:
    assert root_of("ValueError: x", "OSError: [Errno 116] Stale file handle") == ("user_error", 1)


def test_a_line_without_a_stamp_keeps_its_place() -> None:
    assert root_of(
        at(10, "step 1") + "\nKeyError: 'x'\n", at(9, "OSError: [Errno 28] No space left on device")
    ) == (
        "storage_full",
        1,
    )


def test_advisories_never_are_the_root() -> None:
    told = diagnosis(
        'NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!'
    )
    assert told.root is None
    assert [line.match.role for line in told.lines] == ["advisory"]


def test_consequences_take_the_blame_only_where_there_is_nothing_else() -> None:
    told = diagnosis(KILLED)
    assert told.root is not None
    assert (told.root.match.kind, told.certain) == ("teardown", False)
    told = diagnosis(f"{KILLED}\n{OWN}")
    assert told.root is not None
    assert (told.root.match.kind, told.certain) == ("user_error", True)


def test_the_rank_that_came_least_far_is_suspect() -> None:
    log = "\n".join(WATCHDOG % (rank, rank, 808, done) for rank, done in ((0, 807), (1, 807), (2, 805), (3, 807)))
    told = diagnosis(log)
    assert told.suspect.rank == 2
    assert not told.certain


def test_where_all_came_equally_far_the_first_that_said_so_is_shown() -> None:
    told = diagnosis("\n".join(WATCHDOG % (rank, rank, 808, 807) for rank in (5, 6)))
    assert told.suspect.rank == 5


def test_slurm_says_only_afterwards_that_memory_ran_out() -> None:
    oom = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed."
    )
    assert root_of(f"{OWN}\n{KILLED}\n{oom}") == ("host_oom", 3)
    assert root_of(f"ModuleNotFoundError: No module named 'x'\n{oom}") == ("user_import", 1)


def test_a_link_that_came_back_in_time_is_passed_over() -> None:
    glitch = "ionic 0000:24:00.0 benic1p1: Link down\nionic 0000:24:00.0 benic1p1: Link up - 400 Gbps\n"
    assert root_of(glitch + "ValueError: x") == ("user_error", 3)
    assert root_of(glitch.splitlines()[0] + "\n" + WATCHDOG % (1, 1, 5, 4) + "\n" + glitch.splitlines()[1]) == (
        "nic_link_down",
        1,
    )


def test_links_that_come_up_at_boot_are_not_in_the_story() -> None:
    assert diagnosis("ionic 0000:24:00.0 benic1p1: Link up - 400 Gbps").lines == ()


def test_a_rank_is_on_a_node_only_where_a_line_says_so() -> None:
    told = diagnosis(f"[rank25]: RuntimeError: x\n{KILLED}")
    assert told.suspect == Suspect(node="node3", rank=25)
    assert diagnosis(f"[rank5]: RuntimeError: x\n{KILLED}").suspect == Suspect(rank=5)


def test_the_suspect_and_the_advice_are_those_of_the_root() -> None:
    told = diagnosis(f"Nov 17 13:16:56 node7 kernel: [11.655315] {RAS}\n{KILLED}")
    assert told.suspect == Suspect(node="node7", gpu="0000:1c:00.0")
    assert "Exclude the node" in told.advice


def test_of_very_many_lines_some_are_counted_only() -> None:
    told = diagnosis("ValueError: x\n" * 10_100)
    assert (len(told.lines), told.left_out) == (10_000, 100)
