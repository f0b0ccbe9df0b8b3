"""The section `aegis` of a run: when the watchdog acts, what it may do, and when it gives up."""

from __future__ import annotations

from string import Template
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from zslurm.train.sections.section import Count, Positive, Section, Whole

Mode = Literal["act", "observe", "off"]
Recovery = Literal["auto", "memory", "restart"]
Heal = Literal["auto", "spare", "shrink", "helper", "requeue"]


def _web_address(value: str) -> str:
    """Refuse what is no web address. The message does not repeat it: a hook's path is often its secret."""
    try:
        parts = urlsplit(value)
        plain = parts.scheme.lower() in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        plain = port_is_fine = False
    if not (plain and port_is_fine) or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("must be http:// or https://, a host (no user or password before it) and a path")
    if not Template(value).is_valid():
        raise ValueError("`$` begins the name of a variable; write `$$` for one that does not")
    return value


class HangLimits(Section):
    """How long a rank may go without progress, by what it does."""

    setup_s: Positive = Field(900.0, description="from the start of a rank to its first step")
    step_s: Positive = Field(180.0, description="between two steps, at least")
    step_factor: Positive = Field(20.0, description="between two steps, in medians of the steps so far, at least")
    save_s: Positive = Field(600.0, description="while a checkpoint is written")
    eval_s: Positive = Field(600.0, description="between two signs of life of an evaluation")


class StragglerLimits(Section):
    """When a rank counts as slower than its peers."""

    factor: Annotated[float, Field(gt=1)] = Field(1.3, description="slower than the median of its peers by")
    after_s: Positive = Field(600.0, description="for so long without a pause")
    act: bool = Field(False, description="exclude its node, where a spare can take its place; else only report it")


class SensorSettings(Section):
    """What the agent on each node looks at."""

    period_s: Positive = Field(5.0, description="between two looks at GPUs, NICs, kernel log and host")
    progress_s: Positive = Field(1.0, description="between two looks at the progress of the ranks")
    kernel_log: str = Field(
        "auto",
        description="`auto` (/dev/kmsg, else journalctl), a file of kernel lines (`%n`: the node), or `off`",
    )
    amd_smi: str = Field("auto", description="`auto`, the path of amd-smi, or `off`")
    amd_smi_timeout_s: Positive = Field(10.0, description="after which amd-smi counts as hanging")
    disk_free_gb: Annotated[float, Field(ge=0)] = Field(
        10.0, description="less free space for checkpoints than this is advised about"
    )


class NotifySettings(Section):
    """Who hears of events."""

    command: str | None = Field(
        None, description="shell command that gets the event as JSON on its standard input"
    )
    url: Annotated[str, AfterValidator(_web_address)] | None = Field(
        None,
        description="http(s) address to which the event is sent by POST, as JSON; `$NAME` in it is taken from the "
        "job's environment",
    )
    apprise: tuple[str, ...] = Field(
        (),
        description="addresses of Apprise, such as `slack://$SLACK_TOKENS/#runs` or `mailtos://...`, that get one "
        "line for each event (needs the extra `apprise`); `$NAME` as in `url`",
    )
    events: tuple[str, ...] = Field(
        (
            *("fault_detected", "decision", "nodes_excluded", "exclusion_failed", "requeue_failed"),
            *("start_postponed", "spare_checked", "queue_overdue", "run_ended"),
        ),
        description="kinds of events that are sent",
    )
    timeout_s: Positive = Field(10.0, description="after which one notification is given up")


class AegisSection(Section):
    """The supervisor next to the run."""

    mode: Mode = Field(
        "act",
        description="`act`; `observe`: record what would be done, and end at the first failure; `off`: only end "
        "at the first failure",
    )
    recovery: Recovery = Field(
        "auto",
        description="what a fault leads to first: recovery in `memory`, where the surviving ranks stay alive and "
        "lose a step at most, and a restart where that fails; `restart` of all ranks from a checkpoint; `auto`: "
        "in memory where that is known to be safe (on CPUs with gloo; not on GPUs yet, where it was not tried) "
        "and the copies fit",
    )
    recovery_s: Positive = Field(
        10.0, description="seconds that a recovery in memory may take before the ranks are restarted instead"
    )
    planned_moves: bool = Field(
        True,
        description="with recovery in `memory` and a spare node: leave a node at a step's boundary, before it "
        "costs a step, when the site drains it, when a GPU of it corrects ever more memory errors, and, with "
        "`straggler.act`, when a rank of it is slower than its peers",
    )
    grace_s: Positive = Field(
        30.0,
        description="seconds in which the cause may still show where ranks only complain of lost peers",
    )
    settle_s: Positive = Field(
        2.0, description="seconds that the other ranks get to end by themselves once the cause is known"
    )
    lost_peer_s: Positive = Field(
        600.0,
        description="seconds that Slurm gets to name a dead node when ranks only complain of lost peers and there "
        "are no agents; longer than the site's SlurmdTimeout",
    )
    save_s: Positive = Field(
        600.0, description="seconds that ranks get to save and stop when asked, before they are killed"
    )
    run_dir_lost_s: Positive = Field(
        30.0,
        description="seconds for which the run directory must be missing (moved or removed) before the run is "
        "stopped; see checkpoint.rescue_dir",
    )
    poll_s: Positive = Field(0.25, description="seconds between two looks of the supervisor")
    heartbeat_timeout_s: Positive = Field(
        8.0, description="seconds without a report of a node's agent, and without progress, after which it is dead"
    )
    ask_after_s: Annotated[float, Field(ge=0)] = Field(
        1.5,
        description="seconds without a report of a node's agent after which its slurmd's port and its neighbours "
        "are asked: two of three witnesses confirm that it is dead; 0: never, and heartbeat_timeout_s decides",
    )
    standby_s: Positive = Field(
        20.0, description="seconds without a heartbeat of the supervisor after which an agent acts in its place"
    )
    tolerate_s: Positive = Field(
        60.0, description="seconds that a network fault may last before the attempt is given up for it"
    )
    teardown_s: Positive = Field(
        60.0,
        description="seconds within which every process of an attempt should be gone after it was killed; those "
        "that cannot die are waited for ten times as long on one node, sixty times on several",
    )
    retries: Whole = Field(3, description="failures without a new checkpoint between them, after which to stop")
    retry_wait_s: Positive = Field(
        30.0,
        description="seconds to wait before the next start while a file system is full or fails; doubled each "
        "time without a new checkpoint",
    )
    restarts_per_hour: Count = Field(12, description="starts within an hour, before it stops")
    max_excluded: Whole | None = Field(
        None,
        description="nodes that may be excluded at the same time, before it stops; default: a twentieth of the "
        "run's nodes, at least 8",
    )
    exclude_for_s: Positive = Field(7 * 86400.0, description="seconds after which an exclusion expires")
    min_nodes: Count | None = Field(
        None,
        description="fewest nodes to continue with, at the same global batch, where no spare is left and a wait "
        "for another node would cost more; default: as many as the run has, so the job is requeued",
    )
    heal: Heal = Field(
        "auto",
        description="what replaces a node that is lost if no spare is left: spare: nothing, the run ends; shrink: "
        "the others continue on fewer nodes (min_nodes, by default one); helper: as well, until a helper job "
        "brings the missing nodes into the run; requeue: all nodes are given back, and waited for; auto: a "
        "requeue, or with min_nodes whichever of the three costs least",
    )
    expected_wait_s: Positive | None = Field(
        None,
        description="seconds that a requeued job is expected to wait for its nodes, against which fewer nodes "
        "(min_nodes) are weighed; default: the median of the run's own waits, an hour before its first",
    )
    gpu_oom: Literal["stop", "retry"] = Field("stop", description="what to do when a GPU runs out of memory")
    requeue_at_time_limit: bool = Field(True, description="requeue the job after it saved at its time limit")
    comment: bool = Field(True, description="write the last root cause into the comment of the Slurm job")
    hang: HangLimits = Field(HangLimits(), description="when a rank counts as hanging")
    straggler: StragglerLimits = Field(StragglerLimits(), description="when a rank counts as slow")
    sensors: SensorSettings = Field(SensorSettings(), description="what each node looks at")
    notify: NotifySettings = Field(NotifySettings(), description="who hears of events")

    @property
    def fewest_nodes(self) -> int | None:
        """Return the fewest nodes to continue with; None if they are as many as the run has."""
        if self.heal in ("spare", "requeue"):
            return None
        return 1 if self.min_nodes is None and self.heal != "auto" else self.min_nodes

    @property
    def may_shrink(self) -> bool:
        """Return whether ranks may continue on fewer nodes if one is lost."""
        return self.fewest_nodes is not None

    @property
    def recovers_in_memory(self) -> bool:
        """Whether lost ranks may be replaced in memory: that is not forbidden, and the supervisor acts."""
        return self.recovery != "restart" and self.mode == "act"
