"""What Slurm's own configuration means for a run: patience with dead nodes, preemption, accounting."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from zslurm.slurm.version import LACKS, Version, parse_version

# Slurm 22.05 reads `preempt_send_user_signal` of the first, newer versions also `send_user_signal` of the second.
_PREEMPT_SIGNAL_IN = ("SlurmctldParameters", "PreemptParameters")
_SECONDS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of a cluster that a run depends on.

    Attributes:
        cluster: its name; empty if it is not shown.
        version: None if it cannot be read.
        accounting: whether jobs are remembered (slurmdbd).
        requeues: whether jobs are requeued unless they ask not to be; ours ask for it.
        preempt_mode: OFF, CANCEL, REQUEUE, SUSPEND, ...
        preempt_signal: whether a job is sent its --signal before it is preempted.
        kill_wait_s: seconds from SIGTERM to SIGKILL.
        slurmd_timeout_s: seconds after which a silent node is DOWN; 0 is never.
        message_timeout_s: seconds after which a message is given up.
    """

    cluster: str
    version: Version | None
    accounting: bool
    requeues: bool
    preempt_mode: str
    preempt_signal: bool
    kill_wait_s: int | None
    slurmd_timeout_s: int | None
    message_timeout_s: int | None

    @property
    def lost_peer_s(self) -> int | None:
        """Seconds after which Slurm has surely named a dead node; None if it never does, or that is not known.

        A node is asked every third of SlurmdTimeout, is DOWN after the whole of it, and a message to it is tried
        for MessageTimeout, three times at most.
        """
        if not self.slurmd_timeout_s:
            return None
        return math.ceil(self.slurmd_timeout_s * 4 / 3) + 3 * (self.message_timeout_s or 10) + 30

    def notes(self) -> list[str]:
        """Return what a person who submits here should know, a line each."""
        notes = [*self._on_version()]
        notes.append(
            "Accounting: yes; `zslurm status` remembers jobs that the controller has forgotten."
            if self.accounting
            else "No accounting: what becomes of a job is known as long as the controller remembers it."
        )
        if not self.requeues:
            notes.append("JobRequeue=0: jobs are not requeued by themselves; ours ask for it with --requeue.")
        if self.preempt_mode.upper() not in ("OFF", ""):
            warned = (
                "a job is sent its signal first and saves"
                if self.preempt_signal
                else "Slurm does not send a job its signal first: it has its GraceTime and KillWait to save"
            )
            notes.append(f"Jobs can be preempted (PreemptMode={self.preempt_mode}); {warned}.")
        if self.kill_wait_s is not None:
            notes.append(f"KillWait: {self.kill_wait_s} s from SIGTERM to SIGKILL.")
        if self.slurmd_timeout_s == 0:
            notes.append("SlurmdTimeout=0: Slurm never calls a silent node dead; a run finds out by itself.")
        return notes

    def _on_version(self) -> list[str]:
        version = self.version
        older = [(since, lack) for since, lack in LACKS if version is not None and version < since]
        return [f"Slurm {version} is older than {Version(since)}{lack}" for since, lack in older]


def read_settings(config: Mapping[str, str]) -> SlurmSettings:
    """Return the settings in the answer of `scontrol show config` (`parse_config`)."""
    return SlurmSettings(
        cluster=config.get("ClusterName", ""),
        version=parse_version(config.get("SLURM_VERSION", "")),
        accounting=config.get("AccountingStorageType", "").rpartition("/")[2] not in ("", "none", "(null)"),
        requeues=config.get("JobRequeue", "1") != "0",
        preempt_mode=config.get("PreemptMode", "OFF"),
        preempt_signal=any("send_user_signal" in config.get(key, "") for key in _PREEMPT_SIGNAL_IN),
        kill_wait_s=_seconds(config.get("KillWait")),
        slurmd_timeout_s=_seconds(config.get("SlurmdTimeout")),
        message_timeout_s=_seconds(config.get("MessageTimeout")),
    )


def _seconds(text: str | None) -> int | None:
    """`300 sec` as 300."""
    match = _SECONDS.match(text or "")
    return int(match[1]) if match else None
