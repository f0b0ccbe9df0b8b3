"""A run in the simulated world: its job in Slurm's queue, and the batch script that starts its supervisors.

Slurm starts a requeued job elsewhere while a batch host that it cannot reach still has a supervisor: then there
are two, of which the newer one has the run.
"""

from __future__ import annotations

from typing import Literal

from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.simulation.run_record import PREEMPTED_S, REQUEUE_S, Killed, RunRecord
from zslurm.aegis.simulation.supervisor import Replaced, SimulatedSupervisor
from zslurm.checkpoint_tools.quantities import counted

STARTS_AGAIN_S = 2
"""Seconds until the batch script has started a supervisor again."""

Phase = Literal["queued", "starting", "watching", "clearing", "requeuing", "leaving", "over"]


class Run(RunRecord):
    """One run, from its submission to its end."""

    supervisor: SimulatedSupervisor | None
    former: SimulatedSupervisor | None

    @property
    def phase(self) -> Phase:
        """What the run does."""
        if self.outcome:
            return "over"
        return "queued" if self.supervisor is None else self.supervisor.phase

    @property
    def state(self) -> AttemptState | None:
        """The state of the attempt that runs, by the core."""
        return self.supervisor.state if self.supervisor is not None and self.alive else None

    # --- second by second ---------------------------------------------------------------------------------------

    def second(self) -> None:
        """Do what happens to the job in a second, and let its supervisors do what they do."""
        world = self.world
        if self.outcome or world.is_suspended:
            return
        self._let_former_act()
        self.tend_helpers()
        if self.supervisor is None:
            self._wait_in_queue()
            return
        if self._leaves_nodes(self.supervisor):
            return
        try:
            self._supervise(self.supervisor)
        except Killed:
            self.alive, self.until = False, world.now + STARTS_AGAIN_S

    def _supervise(self, supervisor: SimulatedSupervisor) -> None:
        world = self.world
        if world.by_name[self.allocated[0]].died is not None:
            return
        if world.kill_supervisor is not None and world.now >= world.kill_supervisor[1]:
            world.kill_supervisor = None
            raise Killed
        if not self.alive:
            if world.now < self.until:
                return
            self.alive, self.supervisor = True, (supervisor := SimulatedSupervisor(self))
            supervisor.come_back()
        supervisor.second()

    def _let_former_act(self) -> None:
        """Let a supervisor act that has lost the run, until it notices that, or its host is reached again."""
        former = self.former
        if former is None:
            return
        host = self.world.by_name[former.host]
        if host.died is not None or not host.is_cut_off(self.world.now):
            self.former, self.unreached = None, ""
            if former.attempt is self.world.attempt and former.attempt is not None and former.attempt.over is None:
                self.world.kill()  # slurmd hears that its job is over
            return
        try:
            former.second()
        except (Killed, Replaced):
            self.former, self.unreached = None, ""

    # --- the job ------------------------------------------------------------------------------------------------

    def _wait_in_queue(self) -> None:
        """Get nodes, if there are enough: Slurm gives those that it believes to be up."""
        world = self.world
        usable = world.usable_in_partition(self.excluded)
        if world.now < self.until or not world.slurm_works:
            return
        if len(usable) < self.asked:
            self.why = f"{counted(self.asked, 'node is', 'nodes are')} needed, and {len(usable)} usable"
            return
        self.end_helpers()  # those of the start before it
        self.allocated = usable[: self.asked]
        world.time_is_up, world.preempted_until = False, None
        self.left, self.dead, self.alive = set(range(1, world.attempts + 1)), set(), True
        world.agents_on, world.batch = set(self.allocated), self.allocated[0]
        self.starts += 1
        for name in self.allocated:
            world.by_name[name].is_new, world.by_name[name].signalled = True, False
        self.supervisor = SimulatedSupervisor(self)

    def _leaves_nodes(self, supervisor: SimulatedSupervisor) -> bool:
        """Return whether Slurm puts the job back: it calls the batch node down, or a grace time is over."""
        world, batch = self.world, self.world.by_name[self.allocated[0]]
        if not world.slurm_works:
            return False
        is_lost = batch.died is not None or batch.is_cut_off(world.now)
        if is_lost and batch.slurm_knows(world.now):
            if batch.died is None and self.alive:
                self.former, self.unreached = supervisor, supervisor.host
            self.put_back(REQUEUE_S, "its batch node died")
        elif world.preempted_until is not None and world.now >= world.preempted_until:
            self.put_back(PREEMPTED_S, "it was preempted")
        self.is_requeued_by_slurm = self.supervisor is None
        return self.is_requeued_by_slurm
