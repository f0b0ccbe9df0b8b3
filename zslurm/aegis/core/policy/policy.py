"""What to do about faults: pure functions of what was noticed, what the run went through, and what there is.

`alarm` says whether an attempt that still runs must be ended; `decide` what follows once it is over: the cheapest
action that will do, out of the same nodes again, a spare in place of a node, fewer nodes, the queue, the end.
attribution.py finds the root; the row of its kind (fault_kinds.py) says what follows.

It ends: whatever is not the end either excludes a node (`aegis.max_excluded`) or spends one of the restarts that
may follow each other without a new checkpoint (`aegis.retries`), or is one of a fixed number of times that Slurm
may refuse a step in a row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zslurm.aegis.core.policy.attribution import NAN_REPEATS, Attribution, attribute
from zslurm.aegis.core.policy.history import since_last_end, starts_since, without_progress
from zslurm.aegis.core.policy.shrinking import expected_wait_s, weigh
from zslurm.aegis.core.root_cause import roots_of
from zslurm.aegis.fault_kinds import SLURM_PREEMPT, SLURM_REQUEUE, SLURM_TIME_LIMIT, STRAGGLER, USER_ERROR
from zslurm.aegis.types import Alarm, AttemptSummary, Decision, Fault, History, Resources
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.fabric import Fabric
from zslurm.config.aegis import AegisSection
from zslurm.run.exclusions import excluded_by_run
from zslurm.slurm.hostlist import compress

SLURM_REQUEUES = "Slurm puts the job back into the queue"
_NO_SPARE = "no spare is left (aegis.heal: spare)"
_HOUR_S = 3600.0
_FEWEST_EXCLUDED, _SHARE_EXCLUDED = 8, 20
"""Nodes that may be excluded from every run at the same time; of a large one, one node in the second number."""
MOST_REFUSALS, _REFUSED_WAIT_S, _LONGEST_REFUSED_S = 12, 5.0, 120.0
"""Times in a row that Slurm may refuse a step, and the pauses between two of them, from the first, doubled each
time, to the longest: 16 minutes in all, longer than Slurm takes to notice a dead node (SlurmdTimeout)."""
_TIME_IS_UP = frozenset({"SIGUSR1", "SIGUSR2"})
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
"""What differs between two occurrences of one error: addresses, times, indices."""
_BY_SLURM = frozenset({"srun", "slurm"})
"""Sources that are believed when they say what Slurm did; a program's log may say anything."""


def alarm(attempt_state: AttemptSummary, history: History, settings: AegisSection, *, spares: int = 0) -> Alarm:
    """Return whether faults end an attempt that still runs; `spares` counts healthy nodes that are not in use."""
    serious = [
        fault
        for fault in roots_of(attempt_state, settings)
        if _ends_it(fault, attempt_state, settings, spares) and not _was_acted_on(fault, history)
    ]
    if not serious:
        return Alarm(give_up=False)
    chosen = attribute(serious, attempt_state, history, settings)
    if chosen.root is None:
        return Alarm(True, None, "no node of the attempt answers")
    tolerated = chosen.rule.while_running == "tolerate"
    lasted = f" for more than {settings.tolerate_s:g} s" if tolerated else ""
    return Alarm(True, chosen.root, f"{chosen.what}{lasted}", chosen.exclude)


def _ends_it(fault: Fault, attempt_state: AttemptSummary, settings: AegisSection, spares: int) -> bool:
    if fault.kind == STRAGGLER:
        return spares > 0
    while_running = fault.rule.while_running
    lasted = attempt_state.now - fault.time >= settings.tolerate_s
    return while_running == "give up" or (while_running == "tolerate" and lasted)


def _was_acted_on(fault: Fault, history: History) -> bool:
    """Return whether this very fault ended an attempt before and lasts: the node is used for want of another."""
    return any(
        incident.root is not None
        and incident.root.kind == fault.kind
        and incident.root.node in (None, fault.node)
        and incident.root.nic in (None, fault.nic)
        and fault.time <= incident.root.time
        for incident in history.incidents
    )


def most_excluded(settings: AegisSection, nodes: int) -> int:
    """Return how many nodes may be excluded at the same time from a run on a number of nodes."""
    if settings.max_excluded is not None:
        return settings.max_excluded
    return max(_FEWEST_EXCLUDED, nodes // _SHARE_EXCLUDED)


def decide(
    attempt_state: AttemptSummary, history: History, resources: Resources, settings: AegisSection
) -> Decision:
    """Return what to do after an attempt; `history` holds the attempts before it."""
    attempt_state = replace(attempt_state, nodes=resources.in_use)
    said = {fault.kind for fault in attempt_state.faults if fault.source in _BY_SLURM and fault.role != "benign"}
    asked = attempt_state.asked_to_stop
    preempted = attempt_state.preempted
    time_is_up = asked in _TIME_IS_UP or (asked is None and (SLURM_TIME_LIMIT in said or preempted is not None))
    roots = roots_of(attempt_state, settings)
    if len(resources.nodes) <= resources.needed:  # no spare: a slow node is better than none
        roots = [fault for fault in roots if fault.kind != STRAGGLER]
    if time_is_up:  # Slurm kills what has not ended by then
        roots = [fault for fault in roots if not fault.rule.unexplained and fault.kind != SLURM_TIME_LIMIT]
    chosen = attribute(roots, attempt_state, history, settings)
    case = _Case(attempt_state, history, resources, settings, chosen, time_is_up)
    root = case.cause.root
    if attempt_state.outcome == "completed":
        return Decision("finish", "the run is complete")
    if preempted == "cancel":
        return Decision("finish", "Slurm preempts the job and cancels it (PreemptMode=CANCEL)", root)
    if attempt_state.requeued or said & {SLURM_REQUEUE, SLURM_PREEMPT}:
        return Decision("finish", SLURM_REQUEUES, root)
    if asked is not None and not time_is_up:
        return Decision("finish", f"asked to stop ({asked})", root)
    if time_is_up:
        return case.out_of_time()
    if attempt_state.outcome == "interrupted" and root is None:
        return Decision("finish", "the ranks saved and stopped")
    return case.hopeless() or case.refused() or case.over_a_limit() or case.go_on()


@dataclass(frozen=True)
class _Case:
    """An attempt that failed, or ran out of time, and everything that matters for what comes next."""

    attempt_state: AttemptSummary
    history: History
    resources: Resources
    settings: AegisSection
    cause: Attribution
    time_is_up: bool

    def out_of_time(self) -> Decision:
        """At the time limit, or preempted: back into the queue, if that is wanted and possible."""
        preempted = self.attempt_state.preempted is not None
        what = "a preemption" if preempted else "the time limit"
        if not preempted and not self.settings.requeue_at_time_limit:
            return Decision("finish", "the time limit; aegis.requeue_at_time_limit is off", self.cause.root)
        if not self.resources.can_requeue:
            return Decision("finish", f"{what}, and the job cannot be requeued", self.cause.root)
        if self.cause.exclude or (self.cause.root is not None and self.attempt_state.outcome != "interrupted"):
            return self.hopeless() or self.over_a_limit() or self._requeue()
        kind, line = (SLURM_PREEMPT, "preemption") if preempted else (SLURM_TIME_LIMIT, "time limit")
        limit = Fault.of_kind(kind, self.attempt_state.now, "slurm", line, role="teardown")
        at_limit = replace(self, cause=Attribution(limit))
        before = without_progress(self.history, self.attempt_state.committed_step)
        in_vain = sum(not (_is_refused(i.root) or (i.root and i.root.kind == SLURM_PREEMPT)) for i in before)
        if not preempted and in_vain > self.settings.retries:
            return at_limit._stop(
                f"no new checkpoint in {counted(in_vain + 1, 'start')}; save more often, or ask for more time"
            )
        return at_limit._requeue()

    def hopeless(self) -> Decision | None:
        """Return a stop if no other start can end better."""
        then = self.cause.rule.then
        if then == "stop":
            return self._stop("another start would end in the same way")
        if then == "gpu_oom" and self.settings.gpu_oom == "stop":
            return self._stop("another start would end in the same way (aegis.gpu_oom: stop)")
        return self._raised_again() or self._computed_again()

    def _raised_again(self) -> Decision | None:
        """Return a stop if the program's own error came back on the same rank, and the run came no further."""
        root = self.cause.root
        if root is None or root.kind != USER_ERROR or root.source != "rank":
            return None
        before = [
            incident.attempt
            for incident in without_progress(self.history, self.attempt_state.committed_step)
            if incident.root is not None
            and (incident.root.kind, incident.root.rank) == (root.kind, root.rank)
            and _NUMBER.sub("", incident.root.line) == _NUMBER.sub("", root.line)
            and _steps(incident.root) >= _steps(root)
        ]
        if not before:
            return None
        return self._stop(
            f"the same error as in attempt {before[-1]} on rank {root.rank}, and no step more: {root.line}"
        )

    def _computed_again(self) -> Decision | None:
        """Return a stop, and the GPU to test before, if a numeric failure came back bit for bit."""
        root = self.cause.root
        if root is None or root.fingerprint is None:
            return None
        before = [
            incident.attempt
            for incident in without_progress(self.history, self.attempt_state.committed_step)
            if incident.root is not None
            and (incident.root.kind, incident.root.step) == (root.kind, root.step)
            and incident.root.fingerprint == root.fingerprint
        ]
        if not before:
            return None
        stop = self._stop(
            f"the numbers are those of attempt {before[-1]} to the last bit, and another start would compute them "
            "again: look at the data of these steps, lower phases[].lr, or skip more steps (optim.skip_limit)"
        )
        where = root.gpu if root.gpu is not None else root.rank
        tested = (root.node, str(where)) if root.node is not None and where is not None else None
        return replace(stop, test_gpu=tested)

    def refused(self) -> Decision | None:
        """Return a further try if Slurm did not start the step: no rank ran, so it costs the run nothing."""
        root = self.cause.root
        if root is None or not _is_refused(root):
            return None
        before = refusals_in_a_row(self.history)
        if before + 1 >= MOST_REFUSALS:
            return self._stop(f"{counted(before + 1, 'time')} in a row: {root.line}")
        wait = min(_REFUSED_WAIT_S * 2.0**before, _LONGEST_REFUSED_S)
        how = f"try again in {wait:g} s, {before + 1} of {counted(MOST_REFUSALS, 'time')} in a row"
        return Decision("restart", self._reason(how), root, (), self.resources.in_use, wait_s=wait)

    def over_a_limit(self) -> Decision | None:
        """Return a stop if the run failed too often or would exclude too many nodes; dead ones are replaced."""
        settings, now = self.settings, self.attempt_state.now
        starts = starts_since(self.history, now - _HOUR_S) - refusals_since(self.history, now - _HOUR_S)
        if starts >= settings.restarts_per_hour:
            return self._stop(
                f"{counted(starts, 'start')} within an hour; aegis.restarts_per_hour: {settings.restarts_per_hour}"
            )
        excluded = self._excluded_by_run()
        most = most_excluded(settings, self.resources.needed)
        if self.cause.exclude and excluded + len(self.cause.exclude) > most:
            already = counted(excluded, "node is", "nodes are")
            why = f"{already} excluded already; aegis.max_excluded: {most}"
            dead = not set(self.cause.exclude) & set(self.resources.nodes)
            return self._without_exclusion(why) if dead else self._stop(why)
        return None if self.cause.exclude else self._budget_spent()

    def _excluded_by_run(self) -> int:
        """Return how many nodes this run excludes."""
        return len(excluded_by_run(self.history.exclusions, self.attempt_state.now))

    def _failures(self) -> list[Fault | None]:
        """Return the roots of the failures since the newest checkpoint, this one's last."""
        before = [i.root for i in without_progress(self.history, self.attempt_state.committed_step)]
        return [*(root for root in before if not (_is_by_slurm(root) or _is_refused(root))), self.cause.root]

    def _budget_spent(self) -> Decision | None:
        failures, retries = self._failures(), self.settings.retries
        if len(failures) <= retries:
            return None
        errors = {(root.kind, root.step) if root is not None else None for root in failures}
        last = failures[-1]
        if len(failures) > 1 and len(errors) == 1 and last is not None and last.step is not None:
            return self._stop(f"the same error after the same step {counted(len(failures), 'time')}")
        times = counted(len(failures), "failure")
        return self._stop(f"{times} without a new checkpoint; aegis.retries: {retries}")

    def bad_spares(self) -> tuple[str, ...]:
        """Spares that broke while they waited, as many as may still be excluded: they are the root of nothing."""
        settings = self.settings
        in_use = set(self.resources.in_use)
        spares = tuple(node for node in self.resources.nodes if node not in in_use)
        waiting = replace(self.attempt_state, nodes=spares)
        broken = {f.node for f in roots_of(waiting, settings) if f.rule.certain}
        most = most_excluded(settings, self.resources.needed)
        room = most - self._excluded_by_run() - len(self.cause.exclude)
        return tuple(node for node in spares if node in broken)[: max(0, room)]

    def go_on(self) -> Decision:
        """Return the cheapest way to continue."""
        if self.cause.rule.then == "requeue":
            return self._requeue()
        resources, least = self.resources, self.settings.fewest_nodes or 0
        gone = {*self.cause.exclude, *self.bad_spares()}
        usable = [node for node in resources.nodes if node not in gone]
        remaining = set(usable)
        lost = [node for node in resources.in_use if node not in remaining]
        if not lost:
            return self._restart()
        if not resources.outlives_nodes and not set(lost) <= set(resources.nodes):
            return self._leave()  # a node died, and the job ends with it
        if len(usable) >= resources.needed:
            in_use = set(resources.in_use)
            kept = [node for node in usable if node in in_use]
            spares = self._nearest_spares(kept, [node for node in usable if node not in in_use])
            starts_on = in_use.union(spares)
            nodes = [node for node in usable if node in starts_on]
            return self._start("swap", nodes, f"{compress(spares)} in place of {compress(lost)}")
        if self.settings.may_shrink and len(usable) >= least:
            return self._shrink(usable, lost)
        return self._leave()

    def _leave(self) -> Decision:
        """Return a requeue, or the end if only spares are wanted in the place of lost nodes."""
        if self.settings.heal == "spare":
            return self._stop(_NO_SPARE)
        return self._requeue()

    def _nearest_spares(self, kept: Sequence[str], spares: Sequence[str]) -> list[str]:
        """Return the spares that take the places of lost nodes: those that cost the fewest hops, if known."""
        resources, count = self.resources, max(0, self.resources.needed - len(kept))
        if resources.slices is None or count >= len(spares):
            return list(spares[:count])
        return Fabric(resources.slices).join(kept, spares, count)

    def _shrink(self, usable: Sequence[str], lost: Sequence[str]) -> Decision:
        """Fewer nodes; or the queue, if the wait for all of them is expected to cost less."""
        resources, how = self.resources, f"continue with {counted(len(usable), 'node')}, without {compress(lost)}"
        after_wait = self._nodes_of_requeue()
        if after_wait <= len(usable):
            return self._start("shrink", usable, f"{how}: no other node can be had")
        if resources.work is None:
            return self._start("shrink", usable, how)
        wait_s = expected_wait_s(self.history, self.settings)
        weighed = weigh(
            resources.work, len(usable), after_wait, len(resources.in_use), wait_s, resources.helper_wait_s
        )
        decision = self._start("shrink", usable, f"{how}: {weighed}")
        if weighed.best == "requeue":
            decision = self._requeue()
            decision = replace(decision, reason=f"{decision.reason}: {weighed}")
        return replace(decision, step_time_ratio=weighed.step_time_ratio, expected_wait_s=weighed.expected_wait_s)

    def _nodes_of_requeue(self) -> int:
        """Return the nodes that the ranks would have after a requeue; 0 if it cannot be done."""
        resources = self.resources
        if not resources.can_requeue or resources.demanded & set(self.cause.exclude):
            return 0
        elsewhere = self._left_elsewhere()
        return resources.needed if elsewhere is None else min(resources.needed, elsewhere)

    def _left_elsewhere(self) -> int | None:
        """Return the usable nodes that a requeued job could have; None if Slurm does not report them.

        Slurm counts an excluded node that is alive as usable, until it is excluded there.
        """
        resources = self.resources
        if resources.elsewhere is None:
            return None
        return resources.elsewhere - len(set(self.cause.exclude) & set(resources.nodes))

    def _restart(self) -> Decision:
        """Return a start on the same nodes."""
        count, wait = len(self._failures()), None
        how = f"restart in place, {count} of {self.settings.retries} without a new checkpoint"
        if self.cause.rule.then == "wait":
            wait = min(self.settings.retry_wait_s * 2.0 ** min(count - 1, 16), _HOUR_S)
            how += f", after {wait:g} s"
        if self.cause.test_gpu is not None:
            how += f", once the GPU is tested: it came first from it {counted(NAN_REPEATS, 'time')}"
        nodes, test_gpu = self.resources.in_use, self.cause.test_gpu
        return Decision(
            "restart", self._reason(how), self.cause.root, self.bad_spares(), nodes,
            test_gpu=test_gpu, wait_s=wait,
        )  # fmt: skip

    def _start(self, action: Literal["swap", "shrink"], nodes: Sequence[str], how: str) -> Decision:
        exclude = self.cause.exclude + self.bad_spares()
        return Decision(action, self._reason(how), self.cause.root, exclude, tuple(nodes))

    def _requeue(self) -> Decision:
        """Back into the queue, on as many nodes as can be had."""
        resources, exclude = self.resources, self.cause.exclude
        if not resources.can_requeue:
            return self._without_exclusion("no other node is there, and the job cannot be requeued")
        if demanded := resources.demanded & set(exclude):
            return self._without_exclusion(
                f"no other node is there, and slurm.nodelist demands {compress(demanded)}"
            )
        asked = resources.needed if resources.asked is None else resources.asked
        elsewhere = self._left_elsewhere()
        available = asked if elsewhere is None else elsewhere
        without = f" without {compress(exclude)}" if exclude else ""
        if available >= asked:
            return Decision("requeue", self._reason(f"requeue{without}"), self.cause.root, exclude)
        if available >= min(resources.needed, self.settings.fewest_nodes or resources.needed):
            how = f"requeue on {counted(available, 'node')}{without}"
            return Decision("requeue", self._reason(how), self.cause.root, exclude, n_nodes=available)
        if not exclude:
            needed = counted(resources.needed, "node is", "nodes are")
            how = f"requeue, and wait until {needed} up; now there are {available}"
            return Decision("requeue", self._reason(how), self.cause.root)
        usable = counted(available, "usable node is", "usable nodes are")
        return self._without_exclusion(f"{usable} left, and the run needs {resources.needed}")

    def _without_exclusion(self, why: str) -> Decision:
        """Do not exclude a node: restart with it, within the budget; replace it or requeue if it is dead."""
        resources = self.resources
        if self.cause.rule.must_leave:
            return self._stop(why)
        case = replace(self, cause=replace(self.cause, exclude=()))
        if stop := case._budget_spent():
            return stop
        dead = [node for node in resources.in_use if node not in resources.nodes]
        if not dead and not self.time_is_up:
            return replace(case._restart(), reason=f"{case._reason(why)}; restart in place")
        spared = set(resources.nodes) - set(case.bad_spares())
        if dead and resources.outlives_nodes and len(spared) >= resources.needed and not self.time_is_up:
            decision = case.go_on()  # a spare takes the place
            return replace(decision, reason=f"{decision.reason}; {why}")
        if not resources.can_requeue:
            return self._stop(why)
        if self.settings.heal == "spare" and dead:
            return self._stop(f"{why}; {_NO_SPARE}")
        how = f"requeue, and wait for {compress(dead)}" if dead else "requeue with it"
        return Decision("requeue", self._reason(f"{why}; {how}"), self.cause.root)

    def _stop(self, why: str) -> Decision:
        return Decision("stop", self._reason(why), self.cause.root)

    def _reason(self, how: str) -> str:
        return f"{self.cause.what}; {how}"


def _steps(root: Fault) -> int:
    return -1 if root.step is None else root.step


def _is_by_slurm(root: Fault | None) -> bool:
    """Return whether Slurm itself, not only a log, reports the end at the time limit or by a preemption."""
    return root is not None and root.kind in (SLURM_TIME_LIMIT, SLURM_PREEMPT) and root.role == "teardown"


def _is_refused(root: Fault | None) -> bool:
    """Return whether an attempt ended before it began, because Slurm refused its step."""
    return root is not None and root.rule.then == "ask again"


def refusals_in_a_row(history: History) -> int:
    """Return how many of the last attempts Slurm refused to start, without another in between."""
    in_a_row = itertools.takewhile(lambda incident: _is_refused(incident.root), since_last_end(history))
    return sum(1 for _ in in_a_row)


def refusals_since(history: History, since: float) -> int:
    """Return how many attempts Slurm refused to start after `since` and after the run last finished or stopped."""
    return sum(_is_refused(incident.root) for incident in since_last_end(history) if incident.time > since)
