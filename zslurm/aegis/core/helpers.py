"""Helper jobs: nodes that a second job brings into a run which has lost some of its nodes, while the ranks train.

    too few nodes   -> AskForHelper -> HelperAsked -> HelperStarted   (the shell: supervisor/helper_jobs.py)
    helper started  -> its nodes are spares that came late: warm processes start there, each node is checked
    all are ready   -> HoldForMove: at a step's boundary the number of ranks grows
    HelperEnded     -> its nodes are gone: ranks there are lost, and replaced, or left out again

One helper job at a time waits in the queue. With `aegis.heal: helper` the job of the run itself is never requeued
for the missing nodes; with `auto` a helper job is asked for if it costs least (policy/shrinking.py).
"""

from __future__ import annotations

from dataclasses import replace

from zslurm.aegis.core.attempt import AttemptState, MemoryState, Move
from zslurm.aegis.core.memory import has_fit_spares, hold, memory_of, ranks_now, start_warm
from zslurm.aegis.core.messages import (
    AskForHelper,
    CoreAction,
    DismissHelper,
    HelperAsked,
    HelperEnded,
    HelperStarted,
    WeighFewer,
)
from zslurm.aegis.core.policy.in_memory import plan_growth

_WEIGH_AGAIN_S = 600.0
"""Seconds after which a helper job is weighed again that did not pay."""


def take_asked(state: AttemptState, event: HelperAsked) -> None:
    """Take whether a helper job waits in the queue."""
    memory = memory_of(state)
    memory.awaits_helper, memory.ask_at = event.waits, event.again_at


def take_start(state: AttemptState, event: HelperStarted) -> None:
    """Take the nodes of a helper job that has started as spares."""
    memory = memory_of(state)
    memory.awaits_helper = False
    memory.helpers[event.helper] = event.nodes
    memory.ended_helpers -= set(event.nodes)
    memory.spares = tuple(dict.fromkeys([*memory.spares, *event.nodes]))


def take_end(state: AttemptState, event: HelperEnded) -> None:
    """Take that the nodes of a helper job are gone; ranks that are on them are lost."""
    memory, nodes = memory_of(state), set(event.nodes)
    if memory.helpers.pop(event.helper, None) is None and not nodes:
        memory.awaits_helper = False
    memory.ended_helpers |= nodes
    memory.spares = tuple(node for node in memory.spares if node not in nodes)
    for node in nodes:
        memory.waiting.pop(node, None)
        memory.coming.pop(node, None)
    gone = {rank for rank, node in enumerate(state.rank_nodes) if node in nodes}
    if memory.regrouping is not None:
        memory.regrouping.plan_again = True
    if gone:
        state.lost |= gone
        state.failed_at = state.failed_at or event.now


def tend_helpers(state: AttemptState, now: float) -> list[CoreAction]:
    """Ask for a helper job if nodes are missing, get its nodes ready, and have their ranks join."""
    memory = state.memory
    if memory is None or memory.given_up or memory.active or memory.move is not None or state.stop.asked:
        return []
    missing = memory.wanted - len(set(state.rank_nodes))
    if state.detector.step < 0 or state.lost or memory.held_in_vain or not (missing > 0 or memory.helpers):
        return []
    unusable = {*state.dead_nodes, *memory.left, *memory.unfit, *memory.ended_helpers}
    spares = [node for node in memory.spares if node not in {*state.rank_nodes, *unusable}]
    actions = _dismiss(state, memory, spares, missing)
    if missing <= 0:
        return actions
    late = [node for node in memory.nodes_of_helpers if node in spares]
    for node in late:
        actions += start_warm(memory, (node,), memory.per_node - memory.ready_or_coming(node))
    ready = [node for node in spares if len(memory.waiting.get(node, ())) >= memory.per_node][:missing]
    if ready and not any(memory.coming[node] for node in late):
        return [*actions, *_grow(state, memory, ready)]
    if missing > len(spares) and not memory.awaits_helper and now >= memory.ask_at:
        avoid = unusable - memory.ended_helpers  # a job may be over whose nodes are fine
        actions += _ask(state, memory, AskForHelper(missing - len(spares), tuple(sorted(avoid))), now)
    return actions


def _ask(state: AttemptState, memory: MemoryState, wanted: AskForHelper, now: float) -> list[CoreAction]:
    """Ask for a helper job; if it must pay, weigh it before, and again from time to time."""
    in_use = len(set(state.rank_nodes))
    if memory.weighs_helper:
        if in_use not in memory.fewer:
            return [WeighFewer(in_use, in_use)]
        del memory.fewer[in_use]
        wanted = replace(wanted, weighed=memory.weighed.pop(in_use, None))
        if wanted.weighed is None or not wanted.weighed.helper_pays:
            memory.ask_at = now + _WEIGH_AGAIN_S
            return []
    memory.awaits_helper = True
    return [wanted]


def _dismiss(state: AttemptState, memory: MemoryState, spares: list[str], missing: int) -> list[CoreAction]:
    """End helper jobs of which no node has ranks, and none can have or needs to have some."""
    idle = {name: nodes for name, nodes in memory.helpers.items() if not set(nodes) & set(state.rank_nodes)}
    unfit = {name for name, nodes in idle.items() if not set(nodes) & set(spares)}
    return [
        DismissHelper(name, "its nodes can have no ranks" if name in unfit else "no node is missing any more")
        for name in idle
        if name in unfit or missing <= 0
    ]


def _grow(state: AttemptState, memory: MemoryState, nodes: list[str]) -> list[CoreAction]:
    """Have ranks on these nodes join, if the batch can be divided among so many."""
    in_use, actions = len(set(state.rank_nodes)), list[CoreAction]()
    count = in_use + len(nodes)
    if count < memory.wanted:
        if count not in memory.fewer:
            return [WeighFewer(count, in_use)]
        # A reason with costs is that a requeue costs less. It does not count: the ranks train on even fewer nodes.
        if memory.fewer[count] and count not in memory.weighed:
            return []
    plan = plan_growth(ranks_now(state), nodes)
    if not has_fit_spares(state, plan, actions):
        return actions
    move = Move("", plan, (), memory.number + 1, "a helper job has brought its nodes")
    return [*actions, *hold(state, move)]
