"""What is the case in the simulated world: with its nodes, its ranks and the attempt that runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from zslurm.slurm.on_nodes.srun_output import TaskFailure

SLURM_TIMEOUT_S = 30
"""Seconds after which Slurm calls a silent node down."""


@dataclass
class NodeTruth:
    """What is the case with a node.

    Attributes:
        name: as Slurm calls it.
        died: when it died; None while it lives.
        silent_until: when its agent reports again.
        ecc: a GPU of it loses data.
        computes_wrong: a GPU of it computes other numbers than others.
        nic_until: when the link of its NIC comes back; 0 while it is up.
        late_s: seconds that its reports are late.
        twice: its reports come twice.
        clock_off: seconds that its wall clock is off.
        rank_ends: ranks that were killed on it.
        nic_downs: how often the link went down.
        called_down_until: until when Slurm calls the node down, though it is well.
        cut_off_at: when it lost its connections to all other nodes, Slurm's among them.
        cut_off_until: when it has them again.
        signalled: a signal has reached the processes of its steps, which its agent reports.
        sensed: sensors that have reported what is wrong.
        is_new: its agent has not reported yet.
    """

    name: str
    died: int | None = None
    silent_until: int = 0
    ecc: bool = False
    computes_wrong: bool = False
    nic_until: int = 0
    late_s: int = 0
    twice: bool = False
    clock_off: float = 0.0
    rank_ends: int = 0
    nic_downs: int = 0
    called_down_until: int = 0
    cut_off_at: int = 0
    cut_off_until: int = 0
    signalled: bool = False
    seq: int = 0
    sensed: set[str] = field(default_factory=set)
    is_new: bool = True

    def slurm_knows(self, now: int) -> bool:
        """Return whether Slurm calls the node down."""
        if self.died is not None:
            return now - self.died >= SLURM_TIMEOUT_S
        return now < self.called_down_until or self.cut_off_at + SLURM_TIMEOUT_S <= now < self.cut_off_until

    def is_cut_off(self, now: int) -> bool:
        """Return whether the node reaches no other one."""
        return self.cut_off_at <= now < self.cut_off_until

    def is_away(self, now: int) -> bool:
        """Return whether the node takes part in no collective."""
        return self.died is not None or now < self.nic_until or now < self.cut_off_until


@dataclass
class RankTruth:
    """What is the case with a rank of the attempt.

    Attributes:
        node: on which it is.
        ended: when its process ended; None while it runs.
        what: how srun reports its end; empty if it does not.
        fault: what it recorded, or its log shows.
        hangs: it makes no progress any more.
        loses_peers_at: when it gives up waiting for a peer.
        reported: srun has printed its end.
    """

    node: NodeTruth
    ended: int | None = None
    what: str = ""
    fault: str = ""
    hangs: bool = False
    loses_peers_at: int | None = None
    reported: bool = False
    code: int = 0
    pid: int = 0


@dataclass
class AttemptTruth:
    """The attempt that runs.

    Attributes:
        number: counted over the run.
        began: when its step was started.
        ranks: by number.
        step: the last one that all ranks have finished.
        moved: when it was finished, and `awake`, by the seconds that agents count.
        log: what srun has printed about tasks.
        failed_nodes: what it has printed about nodes.
        over: when the step ended; None while it runs.
        halted: no step is being done.
        ranks_on: the ranks of each node.
        nodes: on which it runs.
        others: the ranks whose processes are not of the step.
    """

    number: int
    began: int
    ranks: list[RankTruth]
    step: int
    moved: int
    log: list[TaskFailure] = field(default_factory=list)
    failed_nodes: list[str] = field(default_factory=list)
    over: int | None = None
    awake: int = 0
    progressed: bool = False
    worked_s: int = 0
    is_asked: bool = False
    halted: bool = False

    def __post_init__(self) -> None:
        """Remember the processes of the step: those of other steps may take their places."""
        self.tasks = list(self.ranks)
        self.place(self.ranks)

    def place(self, ranks: list[RankTruth]) -> None:
        """Let these processes be the ranks, by number."""
        self.ranks, self.ranks_on = ranks, dict[str, list[int]]()
        for number, rank in enumerate(ranks):
            self.ranks_on.setdefault(rank.node.name, []).append(number)
        for number, rank in enumerate(self.tasks):
            rank.pid = rank.pid or 1000 * self.number + number
        tasks = set(map(id, self.tasks))
        self.others = [rank for rank in ranks if id(rank) not in tasks]
        self.nodes = list({rank.node.name: rank.node for rank in ranks}.values())
