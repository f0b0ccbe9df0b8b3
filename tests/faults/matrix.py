"""The faults, one row each: how it is injected, what must be done about it, and how the run must end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.faults.harness import AT, FaultRun
from tests.faults.nodes import gpu_address
from tests.waiting import wait_for


@dataclass(frozen=True)
class Injected:
    """A fault that was injected.

    Attributes:
        time: when, UNIX seconds.
        guilty: nodes that are to blame: no other may be excluded.
    """

    time: float
    guilty: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        number: of the fault in the matrix.
        fault: what happens, in words.
        inject: does it, while the run trains.
        kinds: faults or events by which it is noticed, any of them; empty if nothing need be.
        actions: what must be decided, in order.
        ends: how the run ends: "gone" is a job that ended and does not come back, whatever the files say.
        same_size: no attempt has fewer ranks than the first.
        excludes: the guilty nodes are excluded. Not if the deputy acts: it leaves a dead node to Slurm.
        intervals: of checkpoints that may be lost at most.
        rank: which the first decision must blame, if it is a rank that is to blame.
        cause: words that `zslurm status` must show of a run that was stopped.
        sample: also run by `make test`.
        in_ranks, pace_s, nodes, slurm, aegis, checkpoint, integrity: see `FaultRun.submit`.
        small_disk_mb: size of the file system of its checkpoints, if they have one of their own.
        partition: nodes of the partition in which it runs, if it has one of its own.
    """

    number: int
    fault: str
    inject: Callable[[FaultRun], Injected]
    kinds: tuple[str, ...]
    actions: tuple[str, ...] = ("restart",)
    ends: Literal["completed", "stopped", "gone"] = "completed"
    same_size: bool = True
    excludes: bool = True
    intervals: int = 1
    rank: int | None = None
    cause: str = ""
    sample: bool = False
    in_ranks: tuple[dict[str, Any], ...] = ()
    pace_s: float = 0.1
    nodes: int = 3
    slurm: dict[str, Any] = field(default_factory=dict)
    aegis: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    integrity: dict[str, Any] = field(default_factory=dict)
    small_disk_mb: float | None = None
    partition: str | None = None

    @property
    def id(self) -> str:
        """As pytest shows it."""
        return f"{self.number:02d}-{self.fault.replace(' ', '-')}"


SPARE = {"spares": 1}
HURRY = {"time": "3", "save_margin_s": 100}
"""Slurm asks the job to stop between 50 and 80 s after its start: it may be half a minute early."""
VICTIM = 1
"""The rank, or the node of the rank, to which things happen; not rank 0, whose node holds the batch script."""


def kill_rank(run: FaultRun, rank: int = VICTIM) -> Injected:
    run.wait_for_step()
    return Injected(run.signal_rank(rank))


def stop_rank(run: FaultRun, rank: int = VICTIM) -> Injected:
    """Wherever it stands just now."""
    run.wait_for_step()
    return Injected(run.signal_rank(rank, signal.SIGSTOP))


def by_itself(run: FaultRun) -> Injected:
    """What the ranks' own plan holds."""
    return Injected(run.wait_for_mark())


def by_bad_gpu(run: FaultRun) -> Injected:
    """The same, and the node of the rank is to blame."""
    return Injected(run.wait_for_mark(), (run.node_of(VICTIM),))


def kill_nodes(*ranks: int) -> Callable[[FaultRun], Injected]:
    """The nodes of these ranks lose their power together."""

    def inject(run: FaultRun) -> Injected:
        run.wait_for_step()
        return _kill_nodes(run, [run.node_of(rank) for rank in ranks])

    return inject


def kill_node_that_saves(run: FaultRun) -> Injected:
    run.wait_for_mark()
    return _kill_nodes(run, [run.node_of(VICTIM)])


def kill_node_after_node(run: FaultRun) -> Injected:
    """The second dies when the spare has taken the place of the first."""
    first = kill_nodes(VICTIM)(run)
    run.wait_for_step(AT + 10, attempt=2)
    second = _kill_nodes(run, [run.node_of(2)])
    return Injected(first.time, first.guilty + second.guilty)


def _kill_nodes(run: FaultRun, nodes: list[str]) -> Injected:
    now = time.time()
    for node in nodes:
        run.cluster.kill_node(node)
    return Injected(now, tuple(nodes))


def break_gpu(run: FaultRun, rank: int = VICTIM) -> Injected:
    run.wait_for_step()
    node, now = run.node_of(rank), time.time()
    words = "{1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!"
    run.nodes.kernel_says(node, f"amdgpu {gpu_address(0)}: {words}")
    run.nodes.count_ecc(node, gpu=0, uncorrectable=1)
    return Injected(now, (node,))


def pull_cable(run: FaultRun, rank: int = VICTIM) -> Injected:
    run.wait_for_step()
    node, now = run.node_of(rank), time.time()
    run.nodes.rails[node].take_nic_down("ionic_0")
    return Injected(now, (node,))


def shake_cable(run: FaultRun) -> Injected:
    """It is back after 20 s."""
    pulled = pull_cable(run)
    time.sleep(20)
    run.nodes.rails[pulled.guilty[0]].bring_nic_up("ionic_0")
    return Injected(pulled.time)


def kill_rank_for_its_memory(run: FaultRun) -> Injected:
    run.wait_for_step()
    node, pid = run.node_of(VICTIM), run.rank(VICTIM).pid
    uid, now = run.cluster.user.pw_uid, time.time()
    run.nodes.kernel_says(
        node,
        f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,"
        f"task_memcg=/system.slice,task=python,pid={pid},uid={uid}",
    )
    run.nodes.kernel_says(
        node,
        f"Out of memory: Killed process {pid} (python) total-vm:201326592kB, anon-rss:198180864kB, file-rss:0kB, "
        f"shmem-rss:0kB, UID:{uid} pgtables:390000kB oom_score_adj:0",
    )
    run.nodes.count_oom_kills(node, 1)
    run.signal_rank(VICTIM)
    return Injected(now)


def damage_checkpoint(run: FaultRun) -> Injected:
    """The newest one, and then a rank dies, so that it is needed."""
    run.wait_for_step()
    wait_for(lambda: len(run.committed()) >= 2, "two checkpoints")
    run.damage_newest_checkpoint()
    return Injected(run.signal_rank(VICTIM))


def fill_disk(run: FaultRun) -> Injected:
    """The disk of the checkpoints is full until two saves have failed, or the run has come to an end over it."""
    run.wait_for_step(12)
    now, filler = time.time(), run.fill_disk()
    wait_for(lambda: sum(row["state"] == "FAILED" for row in run.metrics("checkpoint")) >= 2, "saves to fail")
    filler.unlink()
    return Injected(now)


def reach_time_limit(run: FaultRun) -> Injected:
    return Injected(float(run.wait_for_event("signal")["time"]))


def requeue_from_outside(run: FaultRun) -> Injected:
    """As Slurm does for preemption with PreemptMode=REQUEUE, or an administrator."""
    run.wait_for_step()
    now = time.time()
    run.cluster.run_as_root(["scontrol", "requeue", run.job_id()])
    return Injected(now)


def stop_controller(run: FaultRun) -> Injected:
    """It is away for 30 s, and a rank dies in that time."""
    run.wait_for_step(AT)
    run.cluster.stop_controller()
    try:
        time.sleep(5)
        killed = run.signal_rank(VICTIM)
        time.sleep(25)
    finally:
        run.cluster.start_controller()
    return Injected(killed)


def kill_agent(run: FaultRun, rank: int = VICTIM) -> Injected:
    run.wait_for_step()
    agent, now = run.agent(run.node_of(rank)), time.time()
    agent.kill()
    return Injected(now)


def kill_supervisor(run: FaultRun) -> Injected:
    run.wait_for_step()
    return Injected(run.kill_supervisor())


ROWS = (
    Row(1, "one rank killed", kill_rank, ("rank_killed",), rank=VICTIM),
    Row(
        2, "one rank exits 1 once", by_itself, ("rank_exit",), rank=VICTIM,
        in_ranks=({"what": "exit", "step": AT, "rank": VICTIM},),
    ),
    Row(3, "rank stopped", stop_rank, ("rank_hang",), rank=VICTIM),
    Row(
        4, "node dies", kill_nodes(VICTIM), ("node_dead", "slurm_node_fail"), ("swap",),
        slurm=SPARE, sample=True,
    ),
    Row(
        5, "two nodes die together", kill_nodes(1, 2), ("node_dead", "slurm_node_fail"), ("swap",),
        slurm={"spares": 2},
    ),
    Row(
        6, "node dies during a checkpoint write", kill_node_that_saves, ("node_dead", "slurm_node_fail"),
        ("swap",), slurm=SPARE, intervals=2,
        in_ranks=({"what": "slow_save", "step": 20, "rank": VICTIM, "seconds": 30},),
    ),
    Row(7, "uncorrectable ECC error", break_gpu, ("gpu_ras_uncorrectable",), ("swap",), slurm=SPARE, pace_s=0.3),
    Row(
        8, "NIC link down", pull_cable, ("nic_link_down",), ("swap",),
        slurm=SPARE, pace_s=1.0, aegis={"tolerate_s": 25},
    ),
    Row(9, "NIC glitch of 20 s", shake_cable, ("nic_link_down",), (), pace_s=1.0, aegis={"tolerate_s": 25}),
    Row(10, "host OOM kill", kill_rank_for_its_memory, ("host_oom",)),
    Row(
        11, "GPU out of memory", by_itself, ("gpu_oom",), ("stop",), "stopped",
        cause="HIP out of memory", in_ranks=({"what": "gpu_oom", "step": AT, "rank": VICTIM},),
    ),
    Row(
        12, "NaN burst", by_itself, ("nan_loss",),
        in_ranks=({"what": "nan", "step": AT, "rank": 2, "times": 6},),
    ),
    Row(13, "newest checkpoint damaged", damage_checkpoint, ("rank_killed",), intervals=2, pace_s=0.3),
    Row(
        14, "disk full while saving", fill_disk, (), (),
        small_disk_mb=16, pace_s=0.3, checkpoint={"keep_last": 2},
    ),
    Row(
        15, "time limit", reach_time_limit, (), ("requeue",),
        slurm=HURRY, pace_s=1.3,
    ),
    Row(16, "requeue from outside", requeue_from_outside, (), ()),
    Row(17, "slurmctld down for 30 s", stop_controller, ("rank_killed",), pace_s=0.5),
    Row(
        18, "batch host dies", kill_nodes(0), ("deputy_acted",), (), slurm=SPARE, excludes=False,
    ),
    Row(
        19, "deterministic bug at step 50", by_itself, ("user_error",),
        ("restart", "stop"), "stopped", cause="mat1 and mat2 shapes cannot be multiplied",
        in_ranks=({"what": "raise", "step": 51, "times": 1000},), aegis={"retries": 1},
    ),
    Row(
        20, "bug at import", by_itself, ("user_import",), ("stop",), "stopped",
        cause="No module named 'my_attention'",
        in_ranks=({"what": "import", "times": 1000},),
    ),
    Row(
        21, "spares used up and one more node lost", kill_node_after_node, ("node_dead", "slurm_node_fail"),
        ("swap", "shrink"), slurm=SPARE, same_size=False, pace_s=0.2, aegis={"min_nodes": 2},
    ),
    Row(22, "agent killed", kill_agent, ("agent_lost",), (), pace_s=0.3),
    Row(23, "supervisor killed", kill_supervisor, ("supervisor_started",), (), pace_s=0.3),
    Row(
        # It continues without the node at once. Then the time is up, and two nodes of the partition are left.
        24, "excluded node on a full partition", break_gpu, ("gpu_ras_uncorrectable",), ("shrink", "requeue"),
        same_size=False, partition="node[0-2]", aegis={"min_nodes": 2}, pace_s=1.3,
        slurm=HURRY,
    ),
    Row(
        25, "NaN from one and the same rank", by_bad_gpu, ("gpu_test_failed",),
        ("restart", "swap"), slurm=SPARE,
        in_ranks=({"what": "nan", "step": AT, "rank": VICTIM, "times": 1000, "bad_node": True},),
    ),
    Row(
        30, "a GPU computes other numbers", by_bad_gpu, ("numbers_wrong",), ("swap",), slurm=SPARE, intervals=2,
        rank=VICTIM, integrity={"every_steps": 4},
        in_ranks=({"what": "wrong_product", "step": AT, "rank": VICTIM, "times": 1000, "bad_node": True},),
    ),
)  # fmt: skip
