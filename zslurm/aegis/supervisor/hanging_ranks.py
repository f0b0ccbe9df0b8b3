"""Ranks that hang, before anything is ended: who they are by all witnesses, and whether they are replaced alone.

    a hang -> flight recorders' dumps, RAS service -> policy/hanging.py -> stacks -> the node's agent kills the
           rank -> recovery in memory takes it up like any other lost rank

Where recovery in memory is not on, the same witnesses are asked, for the record: every rank is ended then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from zslurm.aegis.core.detection.flight_records import Culprits
from zslurm.aegis.core.policy.hanging import Witnesses, who_hangs
from zslurm.aegis.fault_kinds import HANG_HEARTBEAT, RANK_HANG, RCCL_TIMEOUT
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.fault_collector import FaultCollector
from zslurm.aegis.supervisor.flight_dumps import described, examine, hangs
from zslurm.aegis.supervisor.in_memory.memory_recovery import MemoryRecovery
from zslurm.aegis.types import Fault
from zslurm.run.events import CollectivesExamined, HangingRanksEnded, RasAnswered, StacksDumped

_WAITS = (RANK_HANG, RCCL_TIMEOUT, HANG_HEARTBEAT)
"""Kinds of faults after which the witnesses may show who was waited for."""

_RAS_S = 15.0
_END_S = 8.0
_STACKS_S = 5.0
_REPORTED_S = 20.0
"""Seconds in which srun must have reported the end of a rank that was killed."""


class HangingRanks:
    """The hangs of one attempt."""

    def __init__(self, collected: FaultCollector, agents: Agents | None, memory: MemoryRecovery | None) -> None:
        """Nothing hangs yet."""
        self._collected, self._agents, self._memory = collected, agents, memory
        self._job = collected.job
        self._culprits: list[Culprits] = []
        self._behind: frozenset[int] = frozenset()
        self._examined = False
        self._until: float | None = None  # when srun should have reported what was killed

    def examine(self) -> None:
        """Ask all witnesses, once for a hang, and note whom the others wait for."""
        collected, attempt = self._collected, self._collected.attempt
        if self._examined or not any(fault.kind in _WAITS for fault in collected.state.faults):
            return
        self._examined = True
        self._culprits, dumps = examine(attempt, collected.rank_nodes())
        if dumps:
            self._job.record(
                CollectivesExamined(attempt=attempt.number, dumps=dumps, found=described(self._culprits))
            )
        self._ask_ras()
        collected.note(hangs(self._culprits, collected.rank_nodes()))

    def _ask_ras(self) -> None:
        """Ask the collective library's RAS service, on one node: every process answers for all."""
        alive = self._collected.alive()
        if self._agents is None or not alive:
            return
        for node, answer in self._agents.ask("ras", alive[:1], timeout_s=_RAS_S).items():
            values: Mapping[str, object] = answer.values
            if not answer.ok or not values.get("there"):
                continue
            found, behind = values.get("found"), values.get("behind")
            self._job.record(
                RasAnswered(
                    attempt=self._collected.attempt.number,
                    node=node,
                    version=str(values.get("version") or ""),
                    found=found if isinstance(found, list) else [],
                )
            )
            ranks = behind if isinstance(behind, list) else []
            self._behind = frozenset(rank for rank in ranks if isinstance(rank, int))

    def replace(self, root: Fault | None) -> bool:
        """Kill ranks that hang where the others may continue; returns whether the attempt continues.

        Args:
            root: why the attempt would be ended.
        """
        memory = self._memory
        if memory is None or memory.given_up or root is None or root.kind != RANK_HANG or self._job.stop.asked:
            return False  # nothing is recovered in memory once the ranks were asked to save and stop
        if self._until is not None:
            if time.monotonic() < self._until:
                return True
            memory.refuse(sorted(memory.ended), "a rank that hung was killed, and Slurm did not report its end")
            return False
        if memory.active:
            return True
        self.examine()
        hanging = who_hangs(self._witnesses())
        ranks, reason = sorted(hanging.ranks), hanging.reason
        reason = reason or memory.why_not(ranks, self._collected.state.faults, self._collected.state.detector.step)
        if not reason:
            dump_stacks(self._collected, self._agents)
            reason = self._end(ranks)
        if reason:
            memory.refuse(ranks, f"a rank hangs: {reason}")
            return False
        memory.ended |= set(ranks)
        self._until = time.monotonic() + _REPORTED_S
        nodes = [self._collected.rank_nodes()[rank] for rank in ranks]
        self._job.record(
            HangingRanksEnded(attempt=self._collected.attempt.number, ranks=ranks, nodes=nodes, reason=root.line)
        )
        return True

    def replaced(self) -> None:
        """Note that other processes are in the place of what was lost: the next hang is another one."""
        self._until, self._examined, self._culprits, self._behind = None, False, [], frozenset()

    def _witnesses(self) -> Witnesses:
        faults = [fault for fault in self._collected.state.faults if fault.kind == RANK_HANG]
        by_progress = [fault for fault in faults if fault.source == "progress"]
        return Witnesses(
            progress=frozenset(fault.rank for fault in by_progress if fault.rank is not None),
            unnamed=any(fault.rank is None for fault in by_progress),
            recorded={rank: found.how for found in self._culprits for rank in found.ranks},
            behind=self._behind,
        )

    def _end(self, ranks: list[int]) -> str:
        """Kill these ranks; returns why that is not possible, and empty where they are gone."""
        if self._agents is None:
            return "no agent is there to kill it alone"
        nodes = self._collected.rank_nodes()
        for rank in ranks:
            node = nodes[rank]
            answer = self._agents.ask("end_rank", [node], timeout_s=_END_S, rank=rank).get(node)
            if answer is None:
                return f"the agent on {node} does not answer, so rank {rank} cannot be killed alone"
            if not answer.ok:
                return answer.why
        return ""


def dump_stacks(collected: FaultCollector, agents: Agents | None) -> None:
    """Have every rank that is left write the stacks of its threads to its log, before anything is ended."""
    if agents is None:
        return
    answers = agents.ask("stacks", collected.alive(), timeout_s=_STACKS_S)
    if ranks := sorted(rank for answer in answers.values() for rank in answer.values.get("ranks", ())):
        collected.job.record(StacksDumped(attempt=collected.attempt.number, nodes=sorted(answers), ranks=ranks))
