"""What follows an attempt: which nodes a requeued job avoids, and which it may use again."""

from __future__ import annotations

from tests.aegis.recorded import Recorder
from zslurm.aegis.core.following import FollowState, ReadRun, Requeue, RunRead, StopBetween, follow
from zslurm.aegis.core.messages import ProgressRead, StopState
from zslurm.aegis.core.policy.history import history_of
from zslurm.aegis.types import Decision
from zslurm.config.aegis import AegisSection


def test_a_requeued_job_may_use_the_nodes_again_that_were_allowed_or_whose_exclusion_is_over() -> None:
    recorder = Recorder()
    recorder.event("nodes_excluded", nodes="node[1-4]", reason="it died", expires=recorder.clock + 1000)
    recorder.event("nodes_excluded", nodes="node5", reason="it died", expires=recorder.clock + 1)
    recorder.event("nodes_excluded", nodes="node7", reason="of ann", expires=recorder.clock + 1000, shared=True)
    recorder.event("nodes_readmitted", nodes="node7")
    recorder.event("readmit", nodes="node[1-3]")
    recorder.event("nodes_excluded", nodes="node[8-9]", reason="of ann", expires=recorder.clock + 1, shared=True)
    recorder.event("readmit", nodes="node[8-9]")
    recorder.event("requeue", excluded="node8")
    recorder.event("nodes_excluded", nodes="node2", reason="it died again", expires=recorder.clock + 1000)
    state = FollowState(
        AegisSection(),
        2,
        unwanted=frozenset({"node9"}),
        requeues=Decision("requeue", "no spare is left", exclude=("node3",)),
    )
    history, wall = history_of(recorder.rows), recorder.clock + 100
    (action,) = follow(state, RunRead(history, ProgressRead(10, None), 1, wall))
    assert isinstance(action, Requeue)
    assert action.excluded == {"node2", "node3", "node4"}
    # A person has excluded node8 again, and the run file node9.
    assert action.expired == {"node1", "node5", "node7"}


def test_a_requeue_that_an_earlier_supervisor_has_decided_is_not_recorded_again() -> None:
    stop = StopState(True, "SIGUSR2", "SIGUSR2", comes_back=True)
    state = FollowState(AegisSection(), 2, stop=stop)
    decided = Decision("requeue", "the time limit of the job; requeue")
    assert follow(state, StopBetween(decided)) == [ReadRun()]
    (action,) = follow(state, RunRead(history_of([]), ProgressRead(-1, None), 0, Recorder().clock))
    assert isinstance(action, Requeue)
    assert action.decision == decided
