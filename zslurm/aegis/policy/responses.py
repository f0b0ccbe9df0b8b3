"""How each kind of fault is answered: a table that the policy looks up, and that docs/policy.md shows.

Who may be excluded is the heart of it. An innocent node that is excluded is lost for a week; a guilty one that is
not costs one more restart. So a node is excluded at once only where a machine says that it is broken
(`exclude_after` 1); where the evidence is weaker it must point at the same node again (2, 3); and where a program,
a configuration or a whole service is at fault nobody is excluded, however often it happens.

Likewise a run that is stopped without need stays stopped until somebody looks, while one that is retried without
need ends at its budget (`aegis.retries`): only what cannot change by itself stops the run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WhileRunning = Literal["give up", "tolerate", "record"]
"""End the attempt now; only if it lasts `aegis.tolerate_s`; or let it go on, it ends by itself if it must."""

Then = Literal["retry", "wait", "ask again", "test", "stop", "gpu_oom", "requeue", "time limit", "slurm"]
"""After the attempt: start again; wait first (`aegis.retry_wait_s`); wait and start again a fixed number of times
that no budget counts, then stop; test the GPU where it came from it again and again (`aegis.nan_repeats`); stop
for good; what `aegis.gpu_oom` says; requeue, for whatever reason or for the time limit; leave it to Slurm."""


@dataclass(frozen=True)
class Treatment:
    """How faults of one kind are answered, where they are the root.

    Attributes:
        words: what happened, as a part of a sentence.
        while_running: what to do while the attempt goes on.
        exclude_after: times that it must have been the root on one node before that node is excluded; None: never.
        then: what to do when the attempt is over.
        certain: the machine itself says that it is broken: it outranks every error of a program, also an earlier
            one, and every node of which it is said is excluded.
        lasting: excluded at once where it lasted `aegis.tolerate_s`.
        must_leave: never start there again, even where there are no other nodes.
    """

    words: str
    while_running: WhileRunning = "record"
    exclude_after: int | None = None
    then: Then = "retry"
    certain: bool = False
    lasting: bool = False
    must_leave: bool = False


def _broken(words: str, *, certain: bool = True, must_leave: bool = False) -> Treatment:
    """A machine that says so itself."""
    return Treatment(words, "give up", 1, certain=certain, must_leave=must_leave)


TREATMENTS: dict[str, Treatment] = {
    # The machine is broken.
    "gpu_ras_uncorrectable": _broken("uncorrectable memory error of a GPU"),
    "host_memory_error": _broken("uncorrectable memory error of the host"),
    "gpu_bad_pages": _broken("too many bad memory pages on a GPU"),
    "gpu_init_fail": _broken("a GPU does not come up"),
    "gpu_test_failed": _broken("a GPU computes wrong numbers", must_leave=True),
    "node_dead": _broken("the node is dead"),
    "slurm_node_fail": _broken("Slurm reports the node as failed"),
    "orphans": _broken("processes of the ended attempt are left on the node", must_leave=True),
    # Which of them is broken, if any, is not known: Slurm uses none before it could end everything there.
    "orphans_many": Treatment(
        "processes of the ended attempt are left on several nodes", then="requeue", must_leave=True
    ),
    # The machine is broken, unless the program did it: what came first decides.
    "gpu_hang_reset": _broken("a GPU hung or was reset", certain=False),
    "xgmi_error": _broken("error on a link between GPUs", certain=False),
    # It may have been the machine, a cable, a switch, or the other end.
    "nic_link_down": Treatment("the link of a NIC is down", "tolerate", 2, lasting=True),
    "nic_fault": Treatment("a NIC could not reach its peer", "tolerate", 2),
    "pcie_error": Treatment("error on the PCIe bus", exclude_after=2),
    # It may have been anything; the same node three times is no chance.
    "rank_killed": Treatment("a rank was killed", exclude_after=3),
    "rank_exit": Treatment("a rank ended without a word", exclude_after=3),
    "crash_segv": Treatment("a rank crashed", exclude_after=3),
    "rank_hang": Treatment("a rank hangs", "give up", 3),
    "gpu_memory_fault": Treatment("a rank touched GPU memory that is not its own", exclude_after=3),
    "straggler": Treatment("slower than its peers for a long time", exclude_after=1),
    # Those who say so wait for somebody else.
    "rccl_timeout": Treatment("a collective operation timed out", "tolerate"),
    "hang_heartbeat": Treatment("the watchdog of the collective operations is stuck", "tolerate"),
    # The program, its data, or the settings.
    "nan_loss": Treatment("the loss or a gradient is not a number", then="test"),
    "user_error": Treatment("error of the program"),
    "early_exit": Treatment("a rank exited before the end of the run"),
    "user_import": Treatment("a module cannot be imported", then="stop"),
    "config_error": Treatment("the configuration is wrong", then="stop"),
    "slurm_launch_config": Treatment("srun refuses the options of the step", then="stop"),
    "gpu_oom": Treatment("a GPU ran out of memory", then="gpu_oom"),
    "host_oom": Treatment("the host ran out of memory"),
    "memlock": Treatment("the limit of locked memory is too small"),
    "process_limit": Treatment("no more threads or processes may be started"),
    "net_config": Treatment("the network is set up wrongly"),
    "port_collision": Treatment("a port is in use already"),
    # Storage.
    "storage_full": Treatment("no space left on the file system", then="wait"),
    "storage_fault": Treatment("the file system fails", then="wait"),
    "checkpoint_corrupt": Treatment("a checkpoint is damaged"),
    # Slurm.
    "slurm_time_limit": Treatment("the time limit of the job", then="time limit"),
    "slurm_requeue": Treatment("the job was requeued", then="slurm"),
    "slurm_preempt": Treatment("the job was preempted", then="slurm"),
    "slurm_cancelled": Treatment("the Slurm step was cancelled"),
    "slurm_task_failure": Treatment("Slurm ended the step because a task failed"),
    "slurm_control_plane": Treatment("Slurm does not answer", then="wait"),
    "slurm_step_refused": Treatment("Slurm refuses to start the step", then="ask again"),
}

REMARKS = {
    "peer_lost": "a peer is gone",
    "nic_fault_cascade": "a NIC gave up after another fault",
    "teardown": "ended with the others",
    "agent_lost": "the agent of a node is silent",
    "gpu_ras_correctable": "corrected memory errors of a GPU",
    "gpu_throttled": "a GPU is throttled",
    "nic_errors": "a NIC sends much again",
    "memory_low": "little host memory is left",
    "disk_low": "little space is left for checkpoints",
    "clock_jump": "the clock jumped",
    "zombies": "processes that nobody waits for",
    "host_advisory": "the host is set up unfavourably",
    "telemetry_unavailable": "a counter cannot be read",
    "sensor_unavailable": "a sensor cannot read",
    "baseline_lost": "what an attempt began with is not known on a node",
    "benign": "nothing",
    "benign_after_fault": "nothing more",
}
"""Consequences, advice and noise: their role keeps them from ever taking the blame."""

UNKNOWN = Treatment("the cause is unknown")
"""Of an attempt for which nothing takes the blame."""


def treatment_of(kind: str) -> Treatment:
    """The treatment of a kind; of one that is not known here the mildest: start again, exclude nobody."""
    return TREATMENTS.get(kind) or Treatment(REMARKS.get(kind, kind.replace("_", " ")))
