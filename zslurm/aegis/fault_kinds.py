"""The table of fault kinds: what each is called, what it means, and how the policy responds if it is the root.

A new kind is one row here and, if a log line can show it, its patterns in logs/signatures.yaml. Code names a kind
by its constant, whose value is the name that events and logs hold.

Which nodes may be excluded is the heart of the responses. An innocent node that is excluded is lost for a week; a
guilty one that is not costs one more restart. So a node is excluded at once only if a machine reports that it
is broken (`exclude_after=1`); if the sign is weaker it must name the same node again (2, 3); and if
a program, a configuration or a whole service is at fault no node is excluded, however often it happens.

Likewise a run that is stopped without need stays stopped until a person looks, while one that is retried without
need ends at its budget (`aegis.retries`): only what cannot change by itself stops the run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

Role = Literal["root", "cascade", "teardown", "advisory", "benign"]
"""A fault's part in a failure: it came first, another fault caused it, it belongs to an end that was asked for, it
may matter one day, it does not matter."""

Scope = Literal["gpu", "nic", "node", "fabric", "storage", "user", "scheduler", "unknown"]
"""What is broken if the fault is a root."""

WhileRunning = Literal["give up", "tolerate", "record"]
"""End the attempt now; only if it lasts `aegis.tolerate_s`; or let it continue, it ends by itself if it must."""

Then = Literal["retry", "wait", "ask again", "test", "stop", "gpu_oom", "requeue", "time limit", "slurm"]
"""After the attempt: start again; wait first (`aegis.retry_wait_s`); wait and start again a fixed number of times
that no budget counts, then stop; test the GPU if it came from it again and again; stop for good;
what `aegis.gpu_oom` sets; requeue, for whatever reason or for the time limit; leave it to Slurm."""


InMemory = Literal["", "rank", "node"]
"""What is replaced while other ranks continue in their processes: nothing, and every rank is started again; the
ranks that it took; or every rank of the node that it is attributed to, which the run then leaves."""

FaultKind = NewType("FaultKind", str)
"""The name of a kind of fault, as in events and logs."""


@dataclass(frozen=True)
class FaultRule:
    """What a kind of fault means, and what is done about it: a row of the table.

    Attributes:
        role: its usual part in a failure; a pattern or a sensor may know better of one fault.
        scope: what is broken if it is the root.
        message: what happened, as a part of a sentence.
        advice: what to do, for a person; of kinds that a log line can show.
        while_running: what to do while the attempt runs.
        exclude_after: times that it must have been the root on one node before that node is excluded; None: never.
        then: what to do when the attempt is over.
        certain: the machine itself reports that it is broken: this outranks every error of a program, also an
            earlier one, and every node with such a fault is excluded.
        lasting: excluded at once if it lasted `aegis.tolerate_s`.
        must_leave: never start there again, even if there are no other nodes.
        advisory: a consequence, advice or noise, to which there is no response.
        unexplained: a rank ended, or makes no progress, and does not show why.
        waits: the rank that reports it waits for another one.
        of_network: it can end when another fault of the network does.
        explains_rank_ends: the kernel reports it, without a rank, of what ended a rank of its node.
        reports_end: the sensor that reports it also reports its end.
        logged_late: Slurm logs it only after what followed from it.
        vague: a root that one which is logged late explains.
        may_pass: in a log it is no root if its end is logged before anything follows from it.
        in_kernel_log: a kernel's log can show it.
        in_memory: what is replaced while the other ranks continue (aegis/core/policy/in_memory.py).
    """

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
    in_memory: InMemory = ""


FAULT_RULES: dict[FaultKind, FaultRule] = {}
"""The table, in its order."""


def new_kind(name: str, rule: FaultRule) -> FaultKind:
    """Enter a kind of fault into the table, and return its name."""
    kind = FaultKind(name)
    FAULT_RULES[kind] = rule
    return kind


# fmt: off
# The machine is broken.
GPU_RAS_UNCORRECTABLE = new_kind("gpu_ras_uncorrectable", FaultRule(
    "root", "gpu", "uncorrectable memory error of a GPU", while_running="give up",
    exclude_after=1, in_memory="node", certain=True,
    advice="The GPU lost data. Exclude the node; a reset may not complete on MI300X, so have it rebooted and "
    "the GPU tested.",
))
HOST_MEMORY_ERROR = new_kind("host_memory_error", FaultRule(
    "root", "node", "uncorrectable memory error of the host", while_running="give up",
    exclude_after=1, in_memory="node", certain=True,
    advice="The host's memory lost data. Exclude the node and have the module replaced that the line names.",
))
GPU_BAD_PAGES = new_kind("gpu_bad_pages", FaultRule(
    "root", "gpu", "too many bad memory pages on a GPU", while_running="give up",
    exclude_after=1, in_memory="node", certain=True,
    advice="The GPU's memory is worn. Exclude the node and have the GPU replaced.",
))
GPU_INIT_FAIL = new_kind("gpu_init_fail", FaultRule(
    "root", "gpu", "a GPU does not come up", while_running="give up", exclude_after=1, in_memory="node",
    certain=True,
    advice="The GPU does not come up. Exclude the node and have it rebooted; if that does not help, repaired.",
))
GPU_TEST_FAILED = new_kind("gpu_test_failed", FaultRule(
    "root", "gpu", "a GPU computes wrong numbers", while_running="give up", exclude_after=1, in_memory="node",
    certain=True, must_leave=True,
))
NUMBERS_WRONG = new_kind("numbers_wrong", FaultRule(
    "root", "gpu", "a GPU computed other numbers than two others", while_running="give up", exclude_after=1,
    certain=True, in_kernel_log=False,
))
NODE_DEAD = new_kind("node_dead", FaultRule(
    "root", "node", "the node is dead", while_running="give up", exclude_after=1, certain=True,
    in_memory="rank",
    advice="The node stopped answering. Look at its own log for why; exclude it if it happens again.",
))
SLURM_NODE_FAIL = new_kind("slurm_node_fail", FaultRule(
    "root", "node", "Slurm reports the node as failed", while_running="give up",
    exclude_after=1, certain=True, logged_late=True, in_memory="rank",
    advice="The node died, or Slurm lost it. Exclude it, and continue with a spare.",
))
ORPHANS = new_kind("orphans", FaultRule(
    "root", "node", "processes of the ended attempt are left on the node", while_running="give up",
    exclude_after=1, certain=True, must_leave=True,
))

# Which of them is broken, if any, is not known: Slurm uses none before it could end everything there.
ORPHANS_MANY = new_kind("orphans_many", FaultRule(
    "root", "unknown", "processes of the ended attempt are left on several nodes", then="requeue",
    must_leave=True,
))

# The machine is broken, unless the program did it: what came first decides.
GPU_HANG_RESET = new_kind("gpu_hang_reset", FaultRule(
    "root", "gpu", "a GPU hung or was reset", while_running="give up", exclude_after=1, in_memory="node",
    advice="The GPU hung or was reset. Start again; exclude the node if it happens there twice.",
))
XGMI_ERROR = new_kind("xgmi_error", FaultRule(
    "root", "gpu", "error on a link between GPUs", while_running="give up", exclude_after=1, in_memory="node",
    advice="A link between the GPUs of the node is faulty. Exclude the node and have it repaired.",
))

# It may have been the machine, a cable, a switch, or the other end.
NIC_LINK_DOWN = new_kind("nic_link_down", FaultRule(
    "root", "nic", "the link of a NIC is down", while_running="tolerate", exclude_after=2, in_memory="node",
    lasting=True, of_network=True, reports_end=True, may_pass=True,
    advice="The link of a NIC is down. If it does not come back, exclude the node and have cable and port "
    "looked at.",
))
NIC_FAULT = new_kind("nic_fault", FaultRule(
    "root", "nic", "a NIC could not reach its peer", while_running="tolerate", exclude_after=2, in_memory="node",
    of_network=True, reports_end=True, may_pass=True,
    advice="A NIC or its path failed. Tolerate it once; if it repeats, exclude the node that the lines have "
    "in common.",
))
MEMORY_CHANGED = new_kind("memory_changed", FaultRule(
    "root", "gpu", "the training state changed in memory", while_running="give up", exclude_after=2,
    in_kernel_log=False,
))
TRANSFER_WRONG = new_kind("transfer_wrong", FaultRule(
    "root", "nic", "a rank received other numbers than were sent", while_running="give up", exclude_after=2,
    in_kernel_log=False,
))
PCIE_ERROR = new_kind("pcie_error", FaultRule(
    "root", "gpu", "error on the PCIe bus", exclude_after=2, in_memory="node",
    advice="A device left its PCIe link, or the link lost data. Exclude the node and have card and slot "
    "looked at.",
))

# It may have been anything; the same node three times is no chance.
RANK_KILLED = new_kind("rank_killed", FaultRule(
    "root", "unknown", "a rank was killed", exclude_after=3, unexplained=True, in_memory="rank",
))
RANK_EXIT = new_kind("rank_exit", FaultRule(
    "root", "unknown", "a rank ended without a word", exclude_after=3, unexplained=True,
    in_memory="rank",
))
CRASH_SEGV = new_kind("crash_segv", FaultRule(
    "root", "user", "a rank crashed", exclude_after=3, unexplained=True, vague=True,
    in_memory="rank",
    advice="The program crashed in native code. Start again once; if it repeats at the same place, it is a "
    "bug, or a wrong device mapping.",
))
RANK_HANG = new_kind("rank_hang", FaultRule(
    "root", "unknown", "a rank hangs", while_running="give up", exclude_after=3, unexplained=True,
))
GPU_MEMORY_FAULT = new_kind("gpu_memory_fault", FaultRule(
    "root", "gpu", "a rank touched GPU memory that is not its own", exclude_after=3,
    explains_rank_ends=True,
    advice="A kernel touched memory that it may not; usually software. Start again, and look for a bad index; "
    "the same GPU twice is hardware.",
))
STRAGGLER = new_kind("straggler", FaultRule(
    "root", "gpu", "slower than its peers for a long time", exclude_after=1, in_memory="node",
))

# A rank that reports one of these waits for another rank.
RCCL_TIMEOUT = new_kind("rccl_timeout", FaultRule(
    "cascade", "fabric", "a collective operation timed out", while_running="tolerate", waits=True,
    of_network=True,
    advice="A rank did not come to a collective operation. The rank that completed the fewest operations is "
    "the suspect; look at its node and its stacks.",
))
HANG_HEARTBEAT = new_kind("hang_heartbeat", FaultRule(
    "cascade", "fabric", "the watchdog of the collective operations is stuck",
    while_running="tolerate", waits=True, of_network=True,
    advice="A rank stopped making progress. Look at the stacks of the ranks that log nothing.",
))

# The program, its data, or the settings.
NAN_LOSS = new_kind("nan_loss", FaultRule(
    "root", "user", "the loss or a gradient is not a number", then="test", in_kernel_log=False,
    advice="The loss is not a number any more. Go back to an earlier checkpoint; if it always comes from one "
    "GPU first, test that GPU.",
))
USER_ERROR = new_kind("user_error", FaultRule(
    "root", "user", "error of the program", vague=True, in_kernel_log=False,
    advice="The program stopped with an error of its own. Read its traceback; starting again rarely helps.",
))
EARLY_EXIT = new_kind("early_exit", FaultRule(
    "root", "user", "a rank exited before the end of the run",
))
USER_IMPORT = new_kind("user_import", FaultRule(
    "root", "user", "a module cannot be imported", then="stop", in_kernel_log=False,
    advice="A Python module cannot be loaded. Repair the environment; starting again does not help.",
))
CONFIG_ERROR = new_kind("config_error", FaultRule(
    "root", "user", "the configuration is wrong", then="stop", in_kernel_log=False,
    advice="An option or a setting is wrong. Correct it; starting again does not help.",
))
SLURM_LAUNCH_CONFIG = new_kind("slurm_launch_config", FaultRule(
    "root", "user", "srun refuses the options of the step", then="stop",
    advice="Slurm could not start the tasks as they were asked for. Correct the options; SLURM_* variables "
    "that were inherited are a usual cause.",
))
GPU_OOM = new_kind("gpu_oom", FaultRule(
    "root", "user", "a GPU ran out of memory", then="gpu_oom",
    advice="A GPU ran out of memory. Make `micro_batch` smaller or set `parallel.recompute: auto`; if other "
    "processes hold the memory, they were left behind.",
))
HOST_OOM = new_kind("host_oom", FaultRule(
    "root", "user", "the host ran out of memory", explains_rank_ends=True, logged_late=True,
    in_memory="rank",
    advice="The host ran out of memory; the node is not to blame. Ask for more (`slurm.mem`), or use less: fewer "
    "data workers of a program; `checkpoint.background: false`, a lower `data.prefetch` and, on CPUs, a smaller "
    "`micro_batch` with zslurm's trainer.",
))
MEMLOCK = new_kind("memlock", FaultRule(
    "root", "node", "the limit of locked memory is too small",
    advice="Too little memory may be locked (ulimit -l) in the job. Set unlimited in slurmd's limits; the "
    "login shell may look fine.",
))
PROCESS_LIMIT = new_kind("process_limit", FaultRule(
    "root", "user", "no more threads or processes may be started",
    advice="No more threads or processes may be started (ulimit -u, the cgroup's pids.max, OMP_NUM_THREADS). "
    "Start fewer, or raise the limit.",
))
NET_CONFIG = new_kind("net_config", FaultRule(
    "root", "user", "the network is set up wrongly",
    advice="The network is set up wrongly for the job (names of nodes, GID index, interface, GPUDirect, drivers); "
    "no node is bad. See `zslurm doctor` and `zslurm cluster env`.",
))
PORT_COLLISION = new_kind("port_collision", FaultRule(
    "root", "user", "a port is in use already",
    advice="The rendezvous port is taken, by another job or by a process left behind. Start again with "
    "another port.",
))

# Storage.
STORAGE_FULL = new_kind("storage_full", FaultRule(
    "root", "storage", "no space left on the file system", then="wait",
    advice="No space is left, or a quota is used up. Free some, then start again; no node is to blame.",
))
STORAGE_FAULT = new_kind("storage_fault", FaultRule(
    "root", "storage", "the file system fails", then="wait", reports_end=True, may_pass=True,
    advice="The file system failed. Start again; if only one node complains, exclude it, and tell the site.",
))
CHECKPOINT_CORRUPT = new_kind("checkpoint_corrupt", FaultRule(
    "root", "storage", "a checkpoint is damaged", in_kernel_log=False,
    advice="A checkpoint or data file is damaged. Continue from the checkpoint before it; `zslurm checkpoint "
    "verify` names the whole ones.",
))

# Slurm.
SLURM_TIME_LIMIT = new_kind("slurm_time_limit", FaultRule(
    "root", "scheduler", "the time limit of the job", then="time limit",
    advice="The job reached its time limit. Submit it again to continue from the newest checkpoint.",
))
SLURM_REQUEUE = new_kind("slurm_requeue", FaultRule(
    "root", "scheduler", "the job was requeued", then="slurm",
    advice="The job was put back into the queue. It continues when Slurm starts it again; nothing is broken.",
))
SLURM_PREEMPT = new_kind("slurm_preempt", FaultRule(
    "root", "scheduler", "the job was preempted", then="slurm",
    advice="Slurm took the nodes for another job. It continues when Slurm starts it again; nothing is broken.",
))
SLURM_CANCELLED = new_kind("slurm_cancelled", FaultRule(
    "teardown", "scheduler", "the Slurm step was cancelled",
    advice="The job or step was cancelled, by a person or after a failure. Look for what was logged before.",
))
SLURM_TASK_FAILURE = new_kind("slurm_task_failure", FaultRule(
    "cascade", "scheduler", "Slurm ended the step because a task failed",
    advice="Slurm ended the step because a task had failed. Look for what that task logged.",
))
SLURM_CONTROL_PLANE = new_kind("slurm_control_plane", FaultRule(
    "advisory", "scheduler", "Slurm does not answer", then="wait",
    advice="Slurm's controller or commands did not answer. The run is not to blame; try again later.",
))
SLURM_STEP_REFUSED = new_kind("slurm_step_refused", FaultRule(
    "root", "scheduler", "Slurm refuses to start the step", then="ask again",
))

# Advisory kinds: consequences, advice and noise.
PEER_LOST = new_kind("peer_lost", FaultRule(
    "cascade", "fabric", "a peer is gone", in_kernel_log=False, advisory=True,
    advice="Another rank went away before. Look for the first failure.",
))
NIC_FAULT_CASCADE = new_kind("nic_fault_cascade", FaultRule(
    "cascade", "fabric", "a NIC gave up after another fault", advisory=True,
    advice="Another rank or NIC failed before. Look for the first failure.",
))
TEARDOWN = new_kind("teardown", FaultRule(
    "teardown", "unknown", "ended with the others", advisory=True,
    advice="Processes were ended after something else. Look for what was logged before.",
))
AGENT_LOST = new_kind("agent_lost", FaultRule(
    "advisory", "node", "the agent of a node sends no heartbeats", advisory=True,
))
GPU_RAS_CORRECTABLE = new_kind("gpu_ras_correctable", FaultRule(
    "advisory", "gpu", "corrected memory errors of a GPU", advisory=True,
    advice="The hardware corrected it. Nothing, unless it repeats; then have the GPU looked at.",
))
GPU_THROTTLED = new_kind("gpu_throttled", FaultRule(
    "advisory", "gpu", "a GPU is throttled", reports_end=True, advisory=True,
    advice="The GPU runs slower than its peers. Look at its temperature and power; its node slows the whole run.",
))
NIC_ERRORS = new_kind("nic_errors", FaultRule(
    "advisory", "nic", "a NIC sends much again", of_network=True, reports_end=True, advisory=True,
))
MEMORY_LOW = new_kind("memory_low", FaultRule(
    "advisory", "node", "little host memory is left", reports_end=True, advisory=True,
))
DISK_LOW = new_kind("disk_low", FaultRule(
    "advisory", "storage", "little space is left for checkpoints", reports_end=True, advisory=True,
))
NUMBERS_UNREPEATABLE = new_kind("numbers_unrepeatable", FaultRule(
    "advisory", "user", "the program does not repeat its numbers", in_kernel_log=False, advisory=True,
    advice="The same numbers give other results each time, or on several nodes: software, not one GPU. Look at "
    "the tensor that the line names, and set parallel.deterministic: true to find wrong GPUs.",
))
CLOCK_JUMP = new_kind("clock_jump", FaultRule(
    "advisory", "node", "the clock jumped", advisory=True,
))
ZOMBIES = new_kind("zombies", FaultRule(
    "advisory", "node", "zombie processes", reports_end=True, advisory=True,
))
NODE_DRAINED = new_kind("node_drained", FaultRule(
    "advisory", "node", "the site drains the node", reports_end=True, advisory=True,
))
HOST_ADVISORY = new_kind("host_advisory", FaultRule(
    "advisory", "node", "the host is set up unfavourably", advisory=True,
    advice="The node is not set up as it should be. Nothing now; tell the site.",
))
TELEMETRY_UNAVAILABLE = new_kind("telemetry_unavailable", FaultRule(
    "advisory", "node", "a counter cannot be read", advisory=True,
    advice="A sensor has no readings here. That is not the same as healthy; read another (on MI300X the "
    "XGMI_WAFL block of the ECC counts).",
))
SENSOR_UNAVAILABLE = new_kind("sensor_unavailable", FaultRule(
    "advisory", "node", "a sensor cannot read", advisory=True,
))
BASELINE_LOST = new_kind("baseline_lost", FaultRule(
    "advisory", "node", "what an attempt began with is not known on a node", advisory=True,
))
BENIGN = new_kind("benign", FaultRule(
    "benign", "unknown", "nothing", advisory=True, advice="Nothing.",
))
BENIGN_AFTER_FAULT = new_kind("benign_after_fault", FaultRule(
    "benign", "unknown", "nothing more", advisory=True,
    advice="Nothing; it reports the end of an earlier fault.",
))
# fmt: on

UNKNOWN = FaultKind("unknown")
"""Of an attempt for which no fault can be the root."""
_UNKNOWN = FaultRule("root", "unknown", "the cause is unknown")


def rule_of(kind: str) -> FaultRule:
    """Return the rule of a kind.

    The response to one that is not in the table, which another version of zslurm may have recorded, is the
    mildest: start again, exclude no node.
    """
    if kind == UNKNOWN:
        return _UNKNOWN
    return FAULT_RULES.get(FaultKind(kind)) or FaultRule("root", "unknown", kind.replace("_", " "))
