"""What holds of the policy whatever was noticed, whatever was before, whatever there is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.attempts import BLAMELESS, NODES, NOW, attempt_state, excluded, fault, incident, settings
from zslurm.aegis.core.policy.policy import MOST_REFUSALS, alarm, decide
from zslurm.aegis.core.root_cause import without_overcome
from zslurm.aegis.fault_kinds import FAULT_RULES
from zslurm.aegis.types import AttemptSummary, Decision, Exclusion, Fault, History, Incident, Resources, WorkLeft
from zslurm.run.exclusions import active_exclusions

ALL_NODES = (*NODES, "node4", "node5")
SETTINGS = st.builds(
    settings,
    retries=st.integers(0, 4), max_excluded=st.integers(0, 4), restarts_per_hour=st.integers(1, 20),
    min_nodes=st.none() | st.integers(1, 3), gpu_oom=st.sampled_from(["stop", "retry"]),
    straggler=st.builds(dict, act=st.booleans()), requeue_at_time_limit=st.booleans(),
)  # fmt: skip
FAULTS = st.builds(
    fault,
    st.sampled_from([*FAULT_RULES, "a_kind_of_the_future"]),
    st.none() | st.sampled_from(NODES),
    ago=st.floats(0, 4000),
    role=st.sampled_from(["root", "root", "root", "cascade", "teardown", "advisory", "benign"]),
    source=st.sampled_from(["srun", "rank", "log", "agent", "gpu"]),
    rank=st.none() | st.integers(0, 7),
    step=st.none() | st.just(50),
    cleared=st.booleans(),
)
INCIDENTS = st.builds(
    incident,
    st.none() | FAULTS,
    step=st.integers(-1, 60),
    action=st.sampled_from(["restart", "swap", "requeue", "stop", "finish"]),
    ago=st.floats(4000, 9000),
    excluded=st.sampled_from([(), (), ("node5",)]),
)
HISTORIES = st.builds(
    History,
    st.lists(INCIDENTS, max_size=6).map(tuple),
    st.lists(st.sampled_from(ALL_NODES[3:]), max_size=4).map(lambda nodes: excluded(*nodes, ago=100.0)),
    st.lists(st.floats(0, 7000), max_size=14).map(lambda ago: tuple(NOW - each for each in sorted(ago)[::-1])),
)
SECONDS = st.none() | st.floats(0, 1e5)
RESOURCES = st.builds(
    Resources,
    st.sets(st.sampled_from(ALL_NODES)).map(lambda nodes: tuple(sorted(nodes))),
    st.just(NODES[:3]),
    st.just(3),
    outlives_nodes=st.booleans(),
    can_requeue=st.booleans(),
    elsewhere=st.none() | st.integers(0, 8),
    demanded=st.sampled_from([frozenset(), frozenset({"node1"})]),
    asked=st.none() | st.integers(3, 6),
    work=st.none() | st.builds(WorkLeft, st.integers(1, 20), st.just(1), st.integers(1, 2), SECONDS, SECONDS),
)
ATTEMPT_STATES = st.builds(
    lambda faults, **more: attempt_state(*faults, **more),
    st.lists(FAULTS, max_size=6),
    outcome=st.sampled_from(["completed", "interrupted", "failed", "failed", "failed", "lost"]),
    step=st.integers(-1, 60),
    asked_to_stop=st.sampled_from([None, None, None, "SIGUSR2", "SIGTERM"]),
    preempted=st.sampled_from([None, None, None, None, "requeue", "cancel"]),
    requeued=st.sampled_from([False, False, True]),
    progressed_at=st.none() | st.floats(NOW - 4000, NOW),
)


@given(ATTEMPT_STATES, HISTORIES, RESOURCES, SETTINGS)
def test_a_decision_can_be_carried_out(now: AttemptSummary, past: History, there: Resources, says: Any) -> None:
    decision = decide(now, past, there, says)
    assert decision.reason
    assert "\n" not in decision.reason
    assert not set(decision.nodes) & set(decision.exclude)
    if decision.action in ("restart", "swap", "shrink"):
        assert set(decision.nodes) <= set(there.nodes) or not there.nodes
        assert len(set(decision.nodes)) == len(decision.nodes) > 0
    if decision.action == "restart":
        assert decision.nodes == there.in_use
    if decision.action == "swap":
        assert len(decision.nodes) >= there.needed
    if decision.action == "shrink":
        assert says.min_nodes is not None
        assert says.min_nodes <= len(decision.nodes) < there.needed
    if decision.step_time_ratio is not None:
        assert decision.action in ("shrink", "requeue")
        assert decision.expected_wait_s is not None
    if decision.action == "requeue":
        assert there.can_requeue
        assert not set(decision.exclude) & there.demanded
    if decision.n_nodes is not None:
        assert there.elsewhere is not None
        assert min(there.needed, says.min_nodes or there.needed) <= decision.n_nodes <= there.elsewhere
    if decision.action in ("finish", "stop"):
        assert decision.exclude == ()


@given(ATTEMPT_STATES, HISTORIES, RESOURCES, SETTINGS)
def test_exclusions_are_few_and_never_without_evidence(
    now: AttemptSummary, past: History, there: Resources, says: Any
) -> None:
    decision = decide(now, past, there, says)
    if not decision.exclude:
        return
    known = active_exclusions(past.exclusions, NOW)
    assert not set(decision.exclude) & known.keys()
    assert len(decision.exclude) + len(known) <= says.max_excluded
    for node in decision.exclude:
        against = [f for f in now.faults if f.node == node and not f.cleared and f.role in ("root", "advisory")]
        assert any(f.rule.exclude_after is not None for f in against)


@given(
    st.lists(FAULTS.filter(lambda f: f.kind in BLAMELESS), max_size=5).map(lambda found: attempt_state(*found)),
    HISTORIES, RESOURCES, SETTINGS,
)  # fmt: skip
def test_nobody_is_excluded_for_a_program_a_setting_or_a_service(
    now: AttemptSummary, past: History, there: Resources, says: Any
) -> None:
    assert decide(now, past, there, says).exclude == ()
    running = AttemptSummary(now.now, 9, None, now.faults, nodes=now.nodes)
    assert alarm(running, past, says, spares=1).exclude == ()


@given(ATTEMPT_STATES, HISTORIES, RESOURCES, SETTINGS, st.randoms())
def test_the_order_in_which_faults_are_reported_does_not_matter(
    now: AttemptSummary, past: History, there: Resources, says: Any, order: random.Random
) -> None:
    times = {f.time for f in now.faults}
    if len(times) < len(now.faults):
        return
    shuffled = list(now.faults)
    order.shuffle(shuffled)
    again = attempt_state(*shuffled, outcome=now.outcome, step=now.committed_step, asked_to_stop=now.asked_to_stop,
                      requeued=now.requeued, progressed_at=now.progressed_at, preempted=now.preempted)  # fmt: skip
    assert decide(again, past, there, says) == decide(now, past, there, says)


@given(
    st.lists(FAULTS.filter(lambda f: not f.cleared), max_size=4),
    st.lists(FAULTS, max_size=6), HISTORIES, RESOURCES, SETTINGS,
    st.sampled_from(["cascade", "teardown", "benign"]),
)  # fmt: skip
def test_consequences_change_nothing(
    roots: list[Fault], others: list[Fault], past: History, there: Resources, says: Any, role: Any
) -> None:
    """Those that log and sensors tell of; what Slurm itself says about the job is no consequence."""
    mere = [Fault(f.kind, role, f.scope, f.time, "log", f.line, f.node) for f in others if f.kind != "straggler"]
    alone = decide(attempt_state(*roots), past, there, says)
    assert decide(attempt_state(*mere, *roots), past, there, says) == alone


@given(
    st.lists(st.tuples(st.sampled_from(["nic_link_down", "nic_fault", "rccl_timeout"]), st.floats(10, 4000)),
             max_size=6),
    HISTORIES, SETTINGS,
)  # fmt: skip
def test_a_network_that_recovered_ends_nothing(found: list[tuple[str, float]], past: History, says: Any) -> None:
    faults = [fault(kind, ago=ago, nic="n1") for kind, ago in found]
    over = fault("nic_link_down", ago=5.0, nic="n1", cleared=True)
    assert not alarm(attempt_state(*faults, over, outcome=None), past, says, spares=1).give_up


@given(ATTEMPT_STATES, HISTORIES, RESOURCES, SETTINGS)
def test_what_the_run_overcame_may_be_forgotten(
    now: AttemptSummary, past: History, there: Resources, says: Any
) -> None:
    running = replace(now, outcome=None)
    left = tuple(without_overcome(running, says))
    assert alarm(replace(running, faults=left), past, says, spares=1) == alarm(running, past, says, spares=1)
    assert decide(replace(now, faults=left), past, there, says) == decide(now, past, there, says)


@given(ATTEMPT_STATES, HISTORIES, SETTINGS, st.integers(0, 2))
def test_an_alarm_excludes_no_more_than_the_decision_may(
    now: AttemptSummary, past: History, says: Any, spares: int
) -> None:
    running = AttemptSummary(now.now, 9, None, now.faults, nodes=now.nodes, progressed_at=now.progressed_at)
    given_up = alarm(running, past, says, spares=spares)
    assert given_up.give_up or (given_up.root, given_up.reason, given_up.exclude) == (None, "", ())
    assert not given_up.give_up or given_up.reason


@given(
    st.lists(FAULTS.filter(lambda f: not f.cleared), min_size=1, max_size=5), SETTINGS, st.booleans(),
    st.booleans(), st.none() | st.integers(0, 6),
)  # fmt: skip
def test_a_run_that_always_fails_stops(
    found: list[Fault], says: Any, outlives: bool, can_requeue: bool, elsewhere: int | None
) -> None:
    """Each attempt fails for one of the faults, on whatever nodes; nothing is ever saved, and no hour passes.

    Between two failures that count, Slurm may refuse the step some times.
    """
    incidents: list[Incident] = []
    exclusions: dict[str, Exclusion] = {}
    for attempt in range((says.retries + says.max_excluded + 2) * MOST_REFUSALS):
        past = History(tuple(incidents), exclusions)
        there = Resources(
            tuple(node for node in ALL_NODES if node not in active_exclusions(past.exclusions, NOW)), NODES[:3], 3,
            outlives_nodes=outlives, can_requeue=can_requeue, elsewhere=elsewhere,
        )  # fmt: skip
        decision: Decision = decide(attempt_state(found[attempt % len(found)], step=-1), past, there, says)
        if decision.action in ("stop", "finish"):
            return
        incidents.append(Incident(NOW, attempt, decision.action, decision.root, -1, decision.exclude))
        exclusions |= excluded(*decision.exclude, ago=0.0)
        assert len(exclusions) <= says.max_excluded
    raise AssertionError("it never ends")
