"""The table of fault kinds: what each is called, what it means, and how the policy responds where it is the root.

A new kind is one row here and, where a log line can show it, its patterns in logs/signatures.yaml. Code names a
kind by its constant; events and logs hold its name, which is the kind itself, for a `FaultKind` is a string.

Which nodes may be excluded is the heart of the responses. An innocent node that is excluded is lost for a week; a
guilty one that is not costs one more restart. So a node is excluded at once only where a machine reports that it
is broken (`exclude_after=1`); where the sign is weaker it must name the same node again (2, 3); and where
a program, a configuration or a whole service is at fault no node is excluded, however often it happens.

Likewise a run that is stopped without need stays stopped until somebody looks, while one that is retried without
need ends at its budget (`aegis.retries`): only what cannot change by itself stops the run at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["root", "cascade", "teardown", "advisory", "benign"]
"""A fault's part in a failure: it came first, another fault caused it, it belongs to an end that was asked for, it
may matter one day, it does not matter."""

Scope = Literal["gpu", "nic", "node", "fabric", "storage", "user", "scheduler", "unknown"]
"""What is broken where the fault is a root."""

WhileRunning = Literal["give up", "tolerate", "record"]
"""End the attempt now; only if it lasts `aegis.tolerate_s`; or let it continue, it ends by itself if it must."""

Then = Literal["retry", "wait", "ask again", "test", "stop", "gpu_oom", "requeue", "time limit", "slurm"]
"""After the attempt: start again; wait first (`aegis.retry_wait_s`); wait and start again a fixed number of times
that no budget counts, then stop; test the GPU where it came from it again and again (`aegis.nan_repeats`); stop
for good; what `aegis.gpu_oom` sets; requeue, for whatever reason or for the time limit; leave it to Slurm."""


@dataclass(frozen=True, eq=False, repr=False)
class FaultKind(str):
    """One kind of fault: a row of the table, and, as a string, its name.

    Attributes:
        name: as in events and logs.
        role: its usual part in a failure; a pattern or a sensor may know better of one fault.
        scope: what is broken where it is the root.
        message: what happened, as a part of a sentence.
        advice: what to do, for a person; of kinds that a log line can show.
        while_running: what to do while the attempt runs.
        exclude_after: times that it must have been the root on one node before that node is excluded; None: never.
        then: what to do when the attempt is over.
        certain: the machine itself reports that it is broken: this outranks every error of a program, also an
            earlier one, and every node with such a fault is excluded.
        lasting: excluded at once where it lasted `aegis.tolerate_s`.
        must_leave: never start there again, even where there are no other nodes.
        advisory: a consequence, advice or noise, to which there is no response.
        unexplained: a rank ended, or makes no progress, and does not show why.
        waits: the rank that reports it waits for another one.
        of_network: it can end when another fault of the network does.
        explains_rank_ends: the kernel reports it, without a rank, of what ended a rank of its node.
        reports_end: the sensor that reports it also reports its end.
        logged_late: Slurm logs it only after what followed from it.
        vague: a root that one which is logged late explains.
        may_pass: in a log it is no root where its end is logged before anything follows from it.
        in_kernel_log: a kernel's log can show it.
        in_memory: the other ranks may continue in their processes, with another one in place of those that it
            took (aegis/policy/in_memory.py).
    """

    name: str
    role: Role
    scope: Scope
    message: str
    advice: str = ""
    while_running: WhileRunning = "record"
    exclude_after: int | None = None
    then: Then = "retry"
    certain: bool = False
    lasting: bool = False
    must_leave: bool = False
    advisory: bool = False
    unexplained: bool = False
    waits: bool = False
    of_network: bool = False
    explains_rank_ends: bool = False
    reports_end: bool = False
    logged_late: bool = False
    vague: bool = False
    may_pass: bool = False
    in_kernel_log: bool = True
    in_memory: bool = False

    def __new__(cls, name: str, *row: Any, **more: Any) -> FaultKind:
        """Return the name as a string; the row is set by the dataclass."""
        return super().__new__(cls, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a kind by its name."""
        return fault_kind, (str(self),)


# fmt: off
# The machine is broken.
GPU_RAS_UNCORRECTABLE = FaultKind(
    "gpu_ras_uncorrectable", "root", "gpu", "uncorrectable memory error of a GPU", while_running="give up",
    exclude_after=1, certain=True,
    advice="The GPU lost data. Exclude the node; a reset may not complete on MI300X, so have it rebooted and "
    "the GPU tested.",
)
HOST_MEMORY_ERROR = FaultKind(
    "host_memory_error", "root", "node", "uncorrectable memory error of the host", while_running="give up",
    exclude_after=1, certain=True,
    advice="The host's memory lost data. Exclude the node and have the module replaced that the line names.",
)
GPU_BAD_PAGES = FaultKind(
    "gpu_bad_pages", "root", "gpu", "too many bad memory pages on a GPU", while_running="give up",
    exclude_after=1, certain=True, advice="The GPU's memory is worn. Exclude the node and have the GPU replaced.",
)
GPU_INIT_FAIL = FaultKind(
    "gpu_init_fail", "root", "gpu", "a GPU does not come up", while_running="give up", exclude_after=1,
    certain=True,
    advice="The GPU does not come up. Exclude the node and have it rebooted; if that does not help, repaired.",
)
GPU_TEST_FAILED = FaultKind(
    "gpu_test_failed", "root", "gpu", "a GPU computes wrong numbers", while_running="give up", exclude_after=1,
    certain=True, must_leave=True,
)
NODE_DEAD = FaultKind(
    "node_dead", "root", "node", "the node is dead", while_running="give up", exclude_after=1, certain=True,
    in_memory=True,
    advice="The node stopped answering. Look at its own log for why; exclude it if it happens again.",
)
SLURM_NODE_FAIL = FaultKind(
    "slurm_node_fail", "root", "node", "Slurm reports the node as failed", while_running="give up",
    exclude_after=1, certain=True, logged_late=True, in_memory=True,
    advice="The node died, or Slurm lost it. Exclude it, and continue with a spare.",
)
ORPHANS = FaultKind(
    "orphans", "root", "node", "processes of the ended attempt are left on the node", while_running="give up",
    exclude_after=1, certain=True, must_leave=True,
)

# Which of them is broken, if any, is not known: Slurm uses none before it could end everything there.
ORPHANS_MANY = FaultKind(
    "orphans_many", "root", "unknown", "processes of the ended attempt are left on several nodes", then="requeue",
    must_leave=True,
)

# The machine is broken, unless the program did it: what came first decides.
GPU_HANG_RESET = FaultKind(
    "gpu_hang_reset", "root", "gpu", "a GPU hung or was reset", while_running="give up", exclude_after=1,
    advice="The GPU hung or was reset. Start again; exclude the node if it happens there twice.",
)
XGMI_ERROR = FaultKind(
    "xgmi_error", "root", "gpu", "error on a link between GPUs", while_running="give up", exclude_after=1,
    advice="A link between the GPUs of the node is faulty. Exclude the node and have it repaired.",
)

# It may have been the machine, a cable, a switch, or the other end.
NIC_LINK_DOWN = FaultKind(
    "nic_link_down", "root", "nic", "the link of a NIC is down", while_running="tolerate", exclude_after=2,
    lasting=True, of_network=True, reports_end=True, may_pass=True,
    advice="The link of a NIC is down. If it does not come back, exclude the node and have cable and port "
    "looked at.",
)
NIC_FAULT = FaultKind(
    "nic_fault", "root", "nic", "a NIC could not reach its peer", while_running="tolerate", exclude_after=2,
    of_network=True, reports_end=True, may_pass=True,
    advice="A NIC or its path failed. Tolerate it once; if it repeats, exclude the node that the lines have "
    "in common.",
)
PCIE_ERROR = FaultKind(
    "pcie_error", "root", "gpu", "error on the PCIe bus", exclude_after=2,
    advice="A device left its PCIe link, or the link lost data. Exclude the node and have card and slot "
    "looked at.",
)

# It may have been anything; the same node three times is no chance.
RANK_KILLED = FaultKind(
    "rank_killed", "root", "unknown", "a rank was killed", exclude_after=3, unexplained=True, in_memory=True,
)
RANK_EXIT = FaultKind(
    "rank_exit", "root", "unknown", "a rank ended without a word", exclude_after=3, unexplained=True,
    in_memory=True,
)
CRASH_SEGV = FaultKind(
    "crash_segv", "root", "user", "a rank crashed", exclude_after=3, unexplained=True, vague=True,
    in_memory=True,
    advice="The program crashed in native code. Start again once; if it repeats at the same place, it is a "
    "bug, or a wrong device mapping.",
)
RANK_HANG = FaultKind(
    "rank_hang", "root", "unknown", "a rank hangs", while_running="give up", exclude_after=3, unexplained=True,
)
GPU_MEMORY_FAULT = FaultKind(
    "gpu_memory_fault", "root", "gpu", "a rank touched GPU memory that is not its own", exclude_after=3,
    explains_rank_ends=True,
    advice="A kernel touched memory that it may not; usually software. Start again, and look for a bad index; "
    "the same GPU twice is hardware.",
)
STRAGGLER = FaultKind(
    "straggler", "root", "gpu", "slower than its peers for a long time", exclude_after=1,
)

# A rank that reports one of these waits for another rank.
RCCL_TIMEOUT = FaultKind(
    "rccl_timeout", "cascade", "fabric", "a collective operation timed out", while_running="tolerate", waits=True,
    of_network=True,
    advice="A rank did not come to a collective operation. The rank that completed the fewest operations is "
    "the suspect; look at its node and its stacks.",
)
HANG_HEARTBEAT = FaultKind(
    "hang_heartbeat", "cascade", "fabric", "the watchdog of the collective operations is stuck",
    while_running="tolerate", waits=True, of_network=True,
    advice="A rank stopped making progress. Look at the stacks of the ranks that log nothing.",
)

# The program, its data, or the settings.
NAN_LOSS = FaultKind(
    "nan_loss", "root", "user", "the loss or a gradient is not a number", then="test", in_kernel_log=False,
    advice="The loss is not a number any more. Go back to an earlier checkpoint; if it always comes from one "
    "GPU first, test that GPU.",
)
USER_ERROR = FaultKind(
    "user_error", "root", "user", "error of the program", vague=True, in_kernel_log=False,
    advice="The program stopped with an error of its own. Read its traceback; starting again rarely helps.",
)
EARLY_EXIT = FaultKind(
    "early_exit", "root", "user", "a rank exited before the end of the run",
)
USER_IMPORT = FaultKind(
    "user_import", "root", "user", "a module cannot be imported", then="stop", in_kernel_log=False,
    advice="A Python module cannot be loaded. Repair the environment; starting again does not help.",
)
CONFIG_ERROR = FaultKind(
    "config_error", "root", "user", "the configuration is wrong", then="stop", in_kernel_log=False,
    advice="An option or a setting is wrong. Correct it; starting again does not help.",
)
SLURM_LAUNCH_CONFIG = FaultKind(
    "slurm_launch_config", "root", "user", "srun refuses the options of the step", then="stop",
    advice="Slurm could not start the tasks as they were asked for. Correct the options; SLURM_* variables "
    "that were inherited are a usual cause.",
)
GPU_OOM = FaultKind(
    "gpu_oom", "root", "user", "a GPU ran out of memory", then="gpu_oom",
    advice="A GPU ran out of memory. Make the microbatch smaller or recompute more; if other processes hold "
    "the memory, they were left behind.",
)
HOST_OOM = FaultKind(
    "host_oom", "root", "user", "the host ran out of memory", explains_rank_ends=True, logged_late=True,
    in_memory=True,
    advice="The host ran out of memory. Ask for more (--mem), use fewer data workers; the node is not to blame.",
)
MEMLOCK = FaultKind(
    "memlock", "root", "node", "the limit of locked memory is too small",
    advice="Too little memory may be locked (ulimit -l) in the job. Set unlimited in slurmd's limits; the "
    "login shell may look fine.",
)
PROCESS_LIMIT = FaultKind(
    "process_limit", "root", "user", "no more threads or processes may be started",
    advice="No more threads or processes may be started (ulimit -u, the cgroup's pids.max, OMP_NUM_THREADS). "
    "Start fewer, or raise the limit.",
)
NET_CONFIG = FaultKind(
    "net_config", "root", "user", "the network is set up wrongly",
    advice="The network is set up wrongly for the job (GID index, interface, GPUDirect, driver versions); no "
    "node is bad. See `zslurm doctor` and `zslurm env`.",
)
PORT_COLLISION = FaultKind(
    "port_collision", "root", "user", "a port is in use already",
    advice="The rendezvous port is taken, by another job or by a process left behind. Start again with "
    "another port.",
)

# Storage.
STORAGE_FULL = FaultKind(
    "storage_full", "root", "storage", "no space left on the file system", then="wait",
    advice="No space is left, or a quota is used up. Free some, then start again; no node is to blame.",
)
STORAGE_FAULT = FaultKind(
    "storage_fault", "root", "storage", "the file system fails", then="wait", reports_end=True, may_pass=True,
    advice="The file system failed. Start again; if only one node complains, exclude it, and tell the site.",
)
CHECKPOINT_CORRUPT = FaultKind(
    "checkpoint_corrupt", "root", "storage", "a checkpoint is damaged", in_kernel_log=False,
    advice="A checkpoint or data file is damaged. Continue from the checkpoint before it; `zslurm checkpoint "
    "verify` names the whole ones.",
)

# Slurm.
SLURM_TIME_LIMIT = FaultKind(
    "slurm_time_limit", "root", "scheduler", "the time limit of the job", then="time limit",
    advice="The job reached its time limit. Submit it again to continue from the newest checkpoint.",
)
SLURM_REQUEUE = FaultKind(
    "slurm_requeue", "root", "scheduler", "the job was requeued", then="slurm",
    advice="The job was put back into the queue. It continues when Slurm starts it again; nothing is broken.",
)
SLURM_PREEMPT = FaultKind(
    "slurm_preempt", "root", "scheduler", "the job was preempted", then="slurm",
    advice="Slurm took the nodes for another job. It continues when Slurm starts it again; nothing is broken.",
)
SLURM_CANCELLED = FaultKind(
    "slurm_cancelled", "teardown", "scheduler", "the Slurm step was cancelled",
    advice="The job or step was cancelled, by a person or after a failure. Look for what was logged before.",
)
SLURM_TASK_FAILURE = FaultKind(
    "slurm_task_failure", "cascade", "scheduler", "Slurm ended the step because a task failed",
    advice="Slurm ended the step because a task had failed. Look for what that task logged.",
)
SLURM_CONTROL_PLANE = FaultKind(
    "slurm_control_plane", "advisory", "scheduler", "Slurm does not answer", then="wait",
    advice="Slurm's controller or commands did not answer. The run is not to blame; try again later.",
)
SLURM_STEP_REFUSED = FaultKind(
    "slurm_step_refused", "root", "scheduler", "Slurm refuses to start the step", then="ask again",
)

# Advisory kinds: consequences, advice and noise.
PEER_LOST = FaultKind(
    "peer_lost", "cascade", "fabric", "a peer is gone", in_kernel_log=False, advisory=True,
    advice="Another rank went away before. Look for the first failure.",
)
NIC_FAULT_CASCADE = FaultKind(
    "nic_fault_cascade", "cascade", "fabric", "a NIC gave up after another fault", advisory=True,
    advice="Another rank or NIC failed before. Look for the first failure.",
)
TEARDOWN = FaultKind(
    "teardown", "teardown", "unknown", "ended with the others", advisory=True,
    advice="Processes were ended after something else. Look for what was logged before.",
)
AGENT_LOST = FaultKind(
    "agent_lost", "advisory", "node", "the agent of a node sends no heartbeats", advisory=True,
)
GPU_RAS_CORRECTABLE = FaultKind(
    "gpu_ras_correctable", "advisory", "gpu", "corrected memory errors of a GPU", advisory=True,
    advice="The hardware corrected it. Nothing, unless it repeats; then have the GPU looked at.",
)
GPU_THROTTLED = FaultKind(
    "gpu_throttled", "advisory", "gpu", "a GPU is throttled", reports_end=True, advisory=True,
    advice="The GPU runs slower than its peers. Look at its temperature and power; its node slows the whole run.",
)
NIC_ERRORS = FaultKind(
    "nic_errors", "advisory", "nic", "a NIC sends much again", of_network=True, reports_end=True, advisory=True,
)
MEMORY_LOW = FaultKind(
    "memory_low", "advisory", "node", "little host memory is left", reports_end=True, advisory=True,
)
DISK_LOW = FaultKind(
    "disk_low", "advisory", "storage", "little space is left for checkpoints", reports_end=True, advisory=True,
)
CLOCK_JUMP = FaultKind(
    "clock_jump", "advisory", "node", "the clock jumped", advisory=True,
)
ZOMBIES = FaultKind(
    "zombies", "advisory", "node", "zombie processes", reports_end=True, advisory=True,
)
NODE_DRAINED = FaultKind(
    "node_drained", "advisory", "node", "the site drains the node", reports_end=True, advisory=True,
)
HOST_ADVISORY = FaultKind(
    "host_advisory", "advisory", "node", "the host is set up unfavourably", advisory=True,
    advice="The node is not set up as it should be. Nothing now; tell the site.",
)
TELEMETRY_UNAVAILABLE = FaultKind(
    "telemetry_unavailable", "advisory", "node", "a counter cannot be read", advisory=True,
    advice="A sensor has no readings here. That is not the same as healthy; read another (on MI300X the "
    "XGMI_WAFL block of the ECC counts).",
)
SENSOR_UNAVAILABLE = FaultKind(
    "sensor_unavailable", "advisory", "node", "a sensor cannot read", advisory=True,
)
BASELINE_LOST = FaultKind(
    "baseline_lost", "advisory", "node", "what an attempt began with is not known on a node", advisory=True,
)
BENIGN = FaultKind(
    "benign", "benign", "unknown", "nothing", advisory=True, advice="Nothing.",
)
BENIGN_AFTER_FAULT = FaultKind(
    "benign_after_fault", "benign", "unknown", "nothing more", advisory=True,
    advice="Nothing; it reports the end of an earlier fault.",
)
# fmt: on

FAULT_KINDS: Mapping[str, FaultKind] = {
    value: value for value in tuple(globals().values()) if isinstance(value, FaultKind)
}
"""Every kind by its name, in the order of the table."""

UNKNOWN = FaultKind("unknown", "root", "unknown", "the cause is unknown")
"""Of an attempt for which no fault can be the root."""


def fault_kind(name: str) -> FaultKind:
    """Return the kind of a name.

    The response to one that is not in the table, which another version of zslurm may have recorded, is the
    mildest: start again, exclude no node.
    """
    return FAULT_KINDS.get(name) or FaultKind(name, "root", "unknown", name.replace("_", " "))
