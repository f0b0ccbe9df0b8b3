"""Events in words, for a person who was just woken: what broke, where, and what was done about it.

An event of a kind that is not known here, or that lacks what its words need, is shown as its fields. Everything
else that may be missing (written by an older version, or cut short) is left out of the sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.core.errors import ZslurmError
from zslurm.core.units import show_time
from zslurm.slurm.hostlist import compress

Row = Mapping[str, Any]

_HEADER = ("time", "event", "job_id", "attempt", "action")
_ACRONYMS = {
    word.lower(): word
    for word in "GPU NIC RAS OOM NaN XGMI PCIe RCCL NCCL IO ECC CPU memlock xGMI SIGSEGV".split()
}


def describe(event: Row) -> str:
    """An event in words; one of a kind that is not known here as its fields."""
    words = _WORDS.get(event.get("event") or event.get("action") or "")
    try:
        return words(event) if words is not None else _fields(event)
    except (KeyError, TypeError, ValueError, AttributeError, ZslurmError):
        return _fields(event)


def _fields(event: Row) -> str:
    shown = {name: value for name, value in event.items() if name not in _HEADER and value is not None}
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in shown.items()
    )


# --- causes and faults -----------------------------------------------------------------------------------------


def describe_cause(cause: Row) -> str:
    """The root of a failure in one line: who, when, what."""
    where = [f"rank {cause['rank']}" if cause.get("rank") is not None else ""]
    where.append(f"on {cause['node']}" if cause.get("node") else "")
    where.append(f"after step {cause['step']}" if (cause.get("step") or -1) > 0 else "")
    place = " ".join(word for word in where if word)
    return f"{place}: {cause['message']}" if place else str(cause["message"])


def kind_in_words(kind: str) -> str:
    """`gpu_ras_uncorrectable` as `GPU RAS uncorrectable`."""
    return " ".join(_ACRONYMS.get(word, word) for word in kind.split("_"))


def describe_fault(fault: Row) -> str:
    """A fault in one line: what, where, and the line that says so."""
    devices = [f"GPU {fault['gpu']}" if fault.get("gpu") is not None else ""]
    devices.append(f"NIC {fault['nic']}" if fault.get("nic") is not None else "")
    devices.append(f"rank {fault['rank']}" if fault.get("rank") is not None else "")
    on_node = f"on {fault['node']}" if fault.get("node") else ""
    place = ", ".join(word for word in (on_node, *devices) if word)
    after = f" after step {fault['step']}" if (fault.get("step") or -1) > 0 else ""
    line = f": {fault['line']}" if fault.get("line") else ""
    return f"{kind_in_words(str(fault['kind']))}{' ' if on_node else ', ' if place else ''}{place}{after}{line}"


_ROLES = {
    "root": "fault",
    "cascade": "follows from another fault",
    "teardown": "part of the end that was asked for",
    "advisory": "to note",
    "benign": "harmless",
}


def _fault_detected(event: Row) -> str:
    role = "over" if event.get("cleared") else _ROLES.get(str(event.get("role")), "fault")
    return f"{role}: {describe_fault(event)}"


# --- decisions -------------------------------------------------------------------------------------------------

_ACTIONS = {
    "finish": "nothing more to do",
    "restart": "start again in place",
    "swap": "start again with a spare node",
    "shrink": "go on with fewer nodes",
    "requeue": "requeue the job",
    "stop": "stop for good",
}
_NOT_DONE = {"observe": "would (mode observe)", "off": "would (mode off)"}


def _decision(event: Row) -> str:
    action = str(event["action"])
    verb = _NOT_DONE.get(str(event.get("mode")), "decided to")
    which = f"attempt {event['attempt']}: " if event.get("attempt") is not None else ""
    done = "decided:" if action == "finish" else verb
    text = f"{which}{done} {_ACTIONS.get(action, action)}"
    if action in ("swap", "shrink", "restart") and event.get("nodes"):
        text += f" on {node_list(event['nodes'])}"
    if action == "requeue" and event.get("n_nodes"):
        text += f" with {counted(event['n_nodes'], 'node')}"
    if event.get("exclude"):
        text += f", without {node_list(event['exclude'])} from now on"
    if action not in ("finish", "stop") and (event.get("committed_step") or -1) >= 0:
        text += f", from step {event['committed_step']}"
    if event.get("wait_s"):
        text += f", in {show_duration(float(event['wait_s']))}"
    if event.get("test_gpu"):
        node, gpu = event["test_gpu"]
        text += f", after a test of GPU {gpu} on {node}"
    reason = event.get("reason")
    root = event.get("root")
    if reason:
        return f"{text}: {reason}"
    return f"{text}: {describe_fault(root)}" if root else text


# --- the others ------------------------------------------------------------------------------------------------


def node_list(nodes: object) -> str:
    """Nodes, in an event a hostlist or a list of names, as a hostlist."""
    return nodes if isinstance(nodes, str) else compress(map(str, nodes)) if isinstance(nodes, Iterable) else "?"


def _because(event: Row) -> str:
    return f": {event['reason']}" if event.get("reason") else ""


def _on(event: Row) -> str:
    return f" on {node_list(event['nodes'])}" if event.get("nodes") else ""


def _ended(event: Row) -> str:
    cause = f": {describe_cause(event['cause'])}" if event.get("cause") else ""
    which = f"attempt {event['attempt']}" if "attempt" in event else "the run"
    return f"{which} {event['outcome']} (exit code {event['exit_code']}){cause}"


def _by(verb: str) -> Callable[[Row], str]:
    def words(row: Row) -> str:
        without = f", without {row['excluded']} from now on" if row.get("excluded") else ""
        return f"{verb} by {row['user']} as job {row['job_id']}{without}"

    return words


def _rank_list(ranks: object) -> str:
    if not isinstance(ranks, list):
        return f"ranks {ranks}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _stacks_dumped(event: Row) -> str:
    ranks = event.get("ranks")
    which = _rank_list(ranks) if ranks else "every rank"
    return f"the stacks of {which}{_on(event)} are in the ranks' logs"


def _cleared(event: Row) -> str:
    took = f" in {float(event['seconds']):.1f} s" if event.get("seconds") is not None else ""
    killed = f", {counted(event['killed'], 'left-over process')} killed" if event.get("killed") else ""
    unseen = f"; nobody could look on {node_list(event['unseen'])}" if event.get("unseen") else ""
    which = f"attempt {event['attempt']}"
    if left := event.get("left"):
        where = (
            "; ".join(f"{node}: {why}" for node, why in left.items()) if isinstance(left, Mapping) else str(left)
        )
        return f"{which} could not be ended everywhere{took}{killed}{unseen}: {where}"
    return f"every process of {which} is gone{took}{killed}{unseen}"


def _nodes_excluded(event: Row) -> str:
    until = f" until {show_time(float(event['expires']))}" if event.get("expires") else ""
    return f"the run does not use {node_list(event['nodes'])} any more{until}{_because(event)}"


def _checked(event: Row) -> str:
    return f"spare node {event['node']} {'is in order' if event['ok'] else 'is not usable'}{_because(event)}"


def _gpu_tested(event: Row) -> str:
    results = {True: "computes correctly", False: "computes wrongly"}
    result = results.get(event["ok"], "could not be tested")
    device = event.get("device")
    if device == "CPU":
        return f"the CPU of {event['node']}, on which the run computes, {result}{_because(event)}"
    if event["ok"] is False and event.get("device", "") is None:  # nothing ran
        result = "fails its test"
    what = device or f"GPU {event['gpu']}"
    return f"{what} of {event['node']} {result}{_because(event)}"


def _deputy_acted(event: Row) -> str:
    where = f" on {event['batch_node']}" if event.get("batch_node") else ""
    return f"the agent on {event['node']} acted in place of the lost supervisor{where}{_because(event)}"


def _rails_incomplete(event: Row) -> str:
    done = {"start": "the ranks start all the same", "refuse": "the run stops", "exclude": "excluding"}
    action = str(event.get("action"))
    return f"rails are incomplete{_on(event)}{_because(event)} ({done.get(action, action)})"


def _container_checked(event: Row) -> str:
    abi = event.get("rdma_abi") or {}
    said = "; ".join(f"RDMA {what} (on {nodes})" for what, nodes in abi.items())
    return f"the container works{_on(event)}{': ' + said if said else ''}"


def _preempted(event: Row) -> str:
    then = "puts it back into the queue" if event["mode"] == "requeue" else "ends it (PreemptMode=CANCEL)"
    grace = f"; the grace time ends {show_time(float(event['ends_at']))}" if event.get("ends_at") else ""
    return f"preempted: Slurm takes the nodes for another job and {then}{grace}"


_WORDS: dict[str, Callable[[Row], str]] = {
    # the supervisor and its agents
    "supervisor_started": lambda e: (
        f"the supervisor started on {e['host']}"
        + (f" and took attempt {e['adopted']} up" if "adopted" in e else "")
    ),
    "agents_started": lambda e: f"agents watch{_on(e) or ' the nodes'}",
    "agent_lost": lambda e: f"the agent on {e['node']} is silent{_because(e)}",
    "agent_restarted": lambda e: f"the agents were started again{_on(e)}",
    "run_dir_lost": lambda e: f"the run directory is gone, and the ranks are ended{_because(e)}",
    "lease_lost": lambda e: "another supervisor has taken over the run",
    "agents_unavailable": lambda e: f"no agents watch the nodes{_because(e)}",
    "start_postponed": lambda e: f"the ranks cannot be started yet{_because(e)}",
    "deputy_acted": _deputy_acted,
    "notify_failed": lambda e: f"could not tell anybody: {e['reason']}",
    "notify_test": lambda e: "a test of aegis.notify: this hook works",
    # before the ranks start
    "rails_unknown": lambda e: f"rails could not be checked{_on(e)}{_because(e)}",
    "rails_differ": lambda e: f"rails differ from those of other nodes{_on(e)}{_because(e)}",
    "rails_doubtful": lambda e: f"rails look doubtful{_on(e)}{_because(e)}",
    "rails_incomplete": _rails_incomplete,
    "container_checked": _container_checked,
    "environment_staged": lambda e: f"the Python environment lies in {e['path']} on each node",
    "spare_checked": _checked,
    "gpu_tested": _gpu_tested,
    "lock_taken_over": lambda e: f"took the checkpoints' lock over from {e['holder']}, which is gone",
    # an attempt
    "attempt_started": lambda e: (
        f"attempt {e['attempt']} started on {e['nodes']}, {counted(e['world_size'], 'rank')}"
    ),
    "signal": lambda e: f"asked {'the ranks ' if e.get('to') == 'ranks' else ''}to save and stop ({e['signal']})",
    "preempted": _preempted,
    "fault_detected": _fault_detected,
    "ranks_ended": lambda e: f"{_rank_list(e['ranks'])} on {e['node']}: {e['what']}",
    "stacks_dumped": _stacks_dumped,
    "step_killed": lambda e: f"attempt {e['attempt']} was torn down: {e['reason']}",
    "attempt_ended": _ended,
    "attempt_cleared": _cleared,
    # what was decided and done
    "decision": _decision,
    "nodes_excluded": _nodes_excluded,
    "excluded_nodes_used": lambda e: f"{node_list(e['nodes'])} is used although excluded: there are no others",
    "exclusion_failed": lambda e: f"{node_list(e['nodes'])} could not be excluded{_because(e)}",
    "requeue_failed": lambda e: f"the job could not be requeued{_because(e)}",
    "requeued": lambda e: (
        "put back into the queue"
        + (f", without {node_list(e['excluded'])}" if e.get("excluded") else "")
        + _because(e)
    ),
    "run_ended": _ended,
    "successor": lambda e: f"job {e['successor']} waits to continue the run if job {e['job_id']} ends early",
    "successor_ended": lambda e: f"job {e['job_id']} had nothing to continue: {e['reason']}",
    # what people did
    "submit": _by("submitted"),
    "requeue": _by("requeued"),
    "exclude": _by("changed"),
    "cancel": _by("cancelled"),
    "hold": _by("held"),
    "release": _by("released"),
}

KINDS = tuple(_WORDS)
"""Every kind of event."""
