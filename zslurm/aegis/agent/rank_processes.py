"""Whether the process of a rank on this node has ended, only by /proc: srun may report that late, or never.

A pid in a record proves nothing by itself: a rank in a container may have its own pid namespace. So a process
counts as ended only if this agent has seen it alive as a part of the attempt. A rank may also have processes of
the attempt above it (a shell, a container runtime, the process that runs a program for zslurm). While one of them
is alive, the task of the rank has not ended, and that process may still record how the rank ended.
"""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from zslurm.aegis.agent.orphans import Member, carries_mark, read_member
from zslurm.run.run_dir import AttemptDir


class RankProcesses:
    """The processes of an attempt's ranks on this node, as they were seen alive."""

    def __init__(self, attempt: AttemptDir, environ: Mapping[str, str]) -> None:
        self.attempt, self._environ = attempt, environ
        self._seen: dict[int, tuple[Member, ...]] = {}

    def is_gone(self, pid: int) -> bool:
        """Return whether a process that was seen alive has ended, and the attempt's processes above it as well."""
        seen = self._seen.get(pid)
        if seen is None:
            if task := self._task_of(pid):
                self._seen[pid] = task
            return False
        return all(_has_ended(member) for member in seen)

    def _task_of(self, pid: int) -> tuple[Member, ...]:
        """Return a living process of the attempt and its ancestors in the attempt; nothing if it is none."""
        members_of_task: list[Member] = []
        while pid > 1 and carries_mark(pid, self.attempt, self._environ):
            member = read_member(pid)
            if member is None or member.is_gone:
                break
            members_of_task.append(member)
            pid = member.parent
        return tuple(members_of_task)


def _has_ended(member: Member) -> bool:
    now = read_member(member.pid)
    if now is None:  # it may also be unreadable, if this process has no file descriptors left
        return not psutil.pid_exists(member.pid)
    return now.started != member.started or now.is_gone
