"""What the core asks for about ranks that hang: ask witnesses, write stacks, kill ranks alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.messages import HangExamined
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.flight_dumps import described, examine, hangs
from zslurm.run.events import CollectivesExamined, RasAnswered, StacksDumped
from zslurm.run.events.event import Event
from zslurm.run.run_dir import AttemptDir

_RAS_S = 15.0
_END_S = 8.0
_STACKS_S = 5.0


def examine_hang(attempt: AttemptDir, state: AttemptState, agents: Agents | None) -> HangExamined:
    """Read the dumps of flight recorders, and ask the collective library's RAS service."""
    culprits, dumps = examine(attempt, state.rank_nodes)
    recorded: list[Event] = []
    if dumps:
        recorded.append(CollectivesExamined(attempt=attempt.number, dumps=dumps, found=described(culprits)))
    answer, behind = _ask_ras(state, agents)
    if answer is not None:
        recorded.append(answer)
    return HangExamined(tuple(culprits), behind, tuple(hangs(culprits, state.rank_nodes)), tuple(recorded))


def _ask_ras(state: AttemptState, agents: Agents | None) -> tuple[RasAnswered | None, frozenset[int]]:
    """Ask on one node: every process answers for all. Return the answer, and the ranks that are behind."""
    alive = state.alive
    if agents is None or not alive:
        return None, frozenset()
    for node, answer in agents.ask("ras", alive[:1], timeout_s=_RAS_S).items():
        values: Mapping[str, object] = answer.values
        if not answer.ok or not values.get("there"):
            continue
        lines_found, behind = values.get("found"), values.get("behind")
        version, lines = str(values.get("version") or ""), lines_found if isinstance(lines_found, list) else []
        ranks = behind if isinstance(behind, list) else []
        asked = RasAnswered(attempt=state.number, node=node, version=version, found=lines)
        return asked, frozenset(rank for rank in ranks if isinstance(rank, int))
    return None, frozenset()


def kill_ranks(ranks: Sequence[int], state: AttemptState, agents: Agents | None) -> str:
    """Kill these ranks; return why that is not possible, and nothing if they are gone."""
    if agents is None:
        return "no agent is there to kill it alone"
    for rank in ranks:
        node = state.rank_nodes[rank]
        answer = agents.ask("end_rank", [node], timeout_s=_END_S, rank=rank).get(node)
        if answer is None:
            return f"the agent on {node} does not answer, so rank {rank} cannot be killed alone"
        if not answer.ok:
            return answer.why
    return ""


def end_ranks(ranks: Sequence[tuple[int, str]], agents: Agents) -> None:
    """Kill ranks that others replace, in a thread; nothing depends on whether they end."""

    def end() -> None:
        for rank, node in ranks:
            agents.ask("end_rank", [node], timeout_s=_END_S, rank=rank)

    threading.Thread(target=end, name="end-ranks", daemon=True).start()


def dump_stacks(state: AttemptState, agents: Agents | None) -> StacksDumped | None:
    """Have every rank that is left write the stacks of its threads to its log; return what is to be recorded."""
    if agents is None:
        return None
    answers = agents.ask("stacks", state.alive, timeout_s=_STACKS_S)
    ranks = sorted(rank for answer in answers.values() for rank in answer.values.get("ranks", ()))
    return StacksDumped(attempt=state.number, nodes=sorted(answers), ranks=ranks) if ranks else None
