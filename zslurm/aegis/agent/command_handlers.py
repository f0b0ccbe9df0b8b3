"""What an agent does at the supervisor's command: dump stacks, clean up orphans, check its node, end one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zslurm.aegis.agent.one_rank import end_rank
from zslurm.aegis.agent.orphans import clean_up
from zslurm.aegis.agent.ras import ask_ras
from zslurm.aegis.agent.sensor import NodeContext
from zslurm.aegis.agent.stacks import dump_stacks
from zslurm.aegis.protocol import Command
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.reach import CONNECT_S, reach

Handled = tuple[bool, str, dict[str, Any]]
"""Whether the command succeeded, why not, and the values of the answer."""


def handle(context: NodeContext, command: Command) -> Handled:
    """Carry a command out; an error is part of the result."""
    try:
        return _HANDLERS[command.do](context, command)
    except Exception as error:  # whatever it is, the supervisor gets an answer
        return False, f"{command.do} failed: {reason_of(error)}", {}


def _stacks(context: NodeContext, command: Command) -> Handled:
    done = dump_stacks(context, context.run.attempt(command.attempt))
    why = "; ".join(f"rank {rank}: {reason}" for rank, reason in done.missed.items())
    return not done.missed, why, {"ranks": list(done.ranks), "missed": [*map(list, done.missed.items())]}


def _clean_up(context: NodeContext, command: Command) -> Handled:
    done = clean_up(context, context.run.attempt(command.attempt), kill=command.kill)
    problems = [counted(len(done.left), "process is left", "processes are left")] if done.left else []
    problems += ["memory of GPUs is not released"] if done.gpu_released is False else []
    values = {
        "killed": [[member.pid, member.state, member.name] for member in done.killed],
        "left": [[member.pid, member.state, member.name] for member in done.left],
        "seconds": round(done.seconds, 2),
        "gpu_used": list(done.gpu_used),
        "gpu_released": done.gpu_released,
        "progress_removed": done.progress_removed,
    }
    return done.clean, "; ".join(problems), values


def _check(context: NodeContext, _command: Command) -> Handled:
    from zslurm.aegis.agent.node_check import check_node  # a hundred modules that few agents ever need

    health = check_node(context)
    values = {"problems": list(health.problems), "notes": list(health.notes)}
    return not health.problems, "; ".join(health.problems), values


def _gpus_idle(context: NodeContext, _command: Command) -> Handled:
    from zslurm.aegis.agent.node_check import gpus_idle  # as above

    why = gpus_idle(context)
    return not why, why, {}


def _reach(_context: NodeContext, command: Command) -> Handled:
    port = reach(*command.address, CONNECT_S) if command.address else "unknown"
    return port != "unknown", "" if port != "unknown" else "the connection could not be tried", {"port": port}


def _end_rank(context: NodeContext, command: Command) -> Handled:
    ended = end_rank(context, context.run.attempt(command.attempt), command.rank)
    return not ended.why, ended.why, {"pid": ended.pid}


def _ras(context: NodeContext, command: Command) -> Handled:
    return True, "", ask_ras(context, context.run.attempt(command.attempt)).values()


_HANDLERS: dict[str, Callable[[NodeContext, Command], Handled]] = {
    "stacks": _stacks,
    "clean_up": _clean_up,
    "check": _check,
    "gpus_idle": _gpus_idle,
    "reach": _reach,
    "end_rank": _end_rank,
    "ras": _ras,
}
