"""From what agents report to faults: ranks that hang, nodes that are dead, ranks that are slow, what sensors saw.

Pure: fed with reports and the time, it yields faults; it reads no clock and no file. Times are monotonic seconds
of the supervisor; a wall clock is only written into the faults.

    reports -> attempt_progress.py -> dead_nodes.py, hangs.py   (ranks and nodes)
                       witnesses.py -> dead_nodes.py            (nodes that were asked about)
            -> stragglers.py                                    (slow ranks)
            -> sensor_faults.py                                 (what the sensors saw)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from zslurm.aegis.core.detection.attempt_progress import AttemptProgress
from zslurm.aegis.core.detection.dead_nodes import DeadNodes
from zslurm.aegis.core.detection.hangs import Hangs
from zslurm.aegis.core.detection.nodes import NodeTable
from zslurm.aegis.core.detection.sensor_faults import SensorFaults
from zslurm.aegis.core.detection.stragglers import StragglerDetector
from zslurm.aegis.protocol import ProgressReport, Report, SensorReport
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection


class Detector:
    """Turns reports into faults. One for the life of a supervisor; `begin` for each attempt."""

    def __init__(self, settings: AegisSection) -> None:
        """Know nothing yet."""
        self._progress, self._sensors = AttemptProgress(settings), SensorFaults()
        self._dead_nodes = DeadNodes(self._progress)
        self.begin(0, (), 0.0)

    def begin(
        self,
        attempt: int,
        rank_nodes: Sequence[str],
        now: float,
        *,
        adopted: bool = False,
        step_times: Iterable[float] = (),
    ) -> None:
        """Begin with a new attempt.

        Args:
            attempt: its number; progress of other attempts is ignored.
            rank_nodes: the node of each rank.
            now: monotonic seconds.
            adopted: it runs since before this supervisor, so missed heartbeats and records prove nothing at first.
            step_times: seconds of steps that are known to have been finished, in an adopted attempt.
        """
        progress = self._progress
        progress.nodes.forget(self._dead_nodes.dead)
        progress.begin(attempt, rank_nodes, now, adopted=adopted, step_times=step_times)
        self._sensors.begin_attempt()
        self._dead_nodes, self._hangs = DeadNodes(progress), Hangs(progress)
        self._stragglers = StragglerDetector(progress.settings.straggler, rank_nodes)

    def restore(self, faults: Iterable[Fault]) -> None:
        """Know the faults that another supervisor has recorded of this attempt; call it after `begin`."""
        self._sensors.restore(faults)

    @property
    def nodes(self) -> NodeTable:
        """The table of nodes."""
        return self._progress.nodes

    @property
    def step(self) -> int:
        """The last step that any rank has finished in this attempt; -1 before the first."""
        return self._progress.front

    def gone(self, now: float) -> dict[int, float]:
        """Return the ranks whose processes ended long enough ago for srun to report it, with the seconds since."""
        return self._progress.gone(now)

    def move(self, rank: int, node: str) -> None:
        """Note that another process, on this node, is a rank of the attempt from now on."""
        self._progress.move(rank, node)
        self._stragglers.move(rank, node)

    def regroup(self, now: float) -> None:
        """Note that the ranks have regrouped in memory, and train on: none of them hangs."""
        self._progress.regroup(now)
        self._hangs.forget()

    def excuse(self, seconds: float, now: float) -> None:
        """Count a time until now in which no report could be read: it shows no missed heartbeat or hang.

        This process was stopped, or nothing came from any node. Perhaps the whole job was suspended: no rank could
        start, finish a step, or be slow meanwhile.
        """
        self._progress.excuse(seconds, now)
        self._stragglers.forget_window()

    def feed(self, report: Report, now: float, wall: float | None = None) -> None:
        """Take a report; its faults come with the next `check`.

        It came at `now` (monotonic seconds), or `wall` (UNIX seconds; None: the clock of its node is right).
        """
        progress, name = self._progress, report.stamp.node
        if (silent_s := progress.take_silence(now)) > 0:
            self.excuse(silent_s, now)
        node = progress.nodes.hear(name, now)
        self._dead_nodes.dead.discard(name)
        if isinstance(report, ProgressReport):
            if report.ok and report.attempt == progress.attempt:
                rows = progress.known(report, now)
                self._stragglers.feed(rows)
                progress.feed(name, rows, node, now)
        elif isinstance(report, SensorReport):
            self._sensors.feed(report, now, wall)

    def check(
        self,
        now: float,
        wall: float,
        *,
        dead: Mapping[str, str] | None = None,
        lost_peers: bool = False,
        ended_at: float | None = None,
        halted_by: Collection[str | None] = (),
        own_node: str | None = None,
    ) -> list[Fault]:
        """Return what was found since the last call. Feed all reports first.

        Args:
            now: monotonic seconds.
            wall: UNIX seconds; only written into the faults.
            dead: nodes that Slurm has declared failed (srun's "Node failure on"), with the reason.
            lost_peers: ranks complain of peers that have left, and none of those is known.
            ended_at: when every process of the attempt was ended (monotonic seconds); None before. A node that was
                heard later did not end it.
            halted_by: nodes that explain why no step is finished; None among them: nothing could be finished.
            own_node: the node that the supervisor itself runs on.
        """
        faults = self._sensors.take()
        if self._progress.ranks:
            faults += self._dead_nodes.check(
                now, wall, dead or {}, lost_peers=lost_peers, ended_at=ended_at, halted_by=halted_by,
                own_node=own_node,
            )  # fmt: skip
            if self._hangs.is_suspected(now):
                faults += self._check_halt(now, wall)
            faults += self._stragglers.check(now, wall)
        return faults

    def _check_halt(self, now: float, wall: float) -> list[Fault]:
        """Return dead nodes, else ranks that hang: none hangs that waits for a dead node or a lost rank."""
        progress, suspects = self._progress, self._dead_nodes.suspects(now)
        unheard = progress.unheard(now)
        if self._dead_nodes.is_cut_off:  # the ranks of this node hang, whichever side is at fault
            suspects.clear()
        if suspects and any(progress.ranks[number].node not in unheard for number in progress.over_limit):
            return self._dead_nodes.by_passed_limit(suspects, now, wall)
        if suspects or self._dead_nodes.dead & progress.ranks_on.keys():  # not one whose ranks are elsewhere now
            return []
        if progress.waits_for_gone(now):
            return []
        return self._hangs.check(now, wall)
