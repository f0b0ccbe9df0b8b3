"""What the tests of the policy share: kinds in groups, and the policy asked about one attempt."""

from __future__ import annotations

from typing import Any

from tests.aegis.attempts import (
    BLAMELESS,
    HARDWARE,
    NETWORK,
    NODES,
    STOPPING,
    UNEXPLAINED,
    attempt_state,
    fault,
    history,
    incident,
    resources,
    settings,
)
from zslurm.aegis.core.policy.policy import alarm, decide
from zslurm.aegis.types import Alarm, Decision, Fault, History

EVERY = (*HARDWARE, *NETWORK, *UNEXPLAINED, *BLAMELESS)
GOES_ON = tuple(kind for kind in EVERY if kind not in STOPPING)
WITH_SPARE = {"alive": NODES}


def decided(
    *faults: Fault, past: History | None = None, there: dict[str, Any] | None = None,
    says: dict[str, Any] | None = None, **more: Any,
) -> Decision:  # fmt: skip
    return decide(
        attempt_state(*faults, **more), past or history(), resources(**there or {}), settings(**says or {})
    )


def raised(
    *faults: Fault, past: History | None = None, says: dict[str, Any] | None = None, spares: int = 0, **more: Any
) -> Alarm:
    now = attempt_state(*faults, outcome=None, **more)
    return alarm(now, past or history(), settings(**says or {}), spares=spares)


def past_of(kind: str, *nodes: str, step: int = 40, **more: Any) -> History:
    """Failures for the same reason on these nodes, one after the other, each a checkpoint further."""
    roots = [fault(kind, node, ago=600.0 - i, **more) for i, node in enumerate(nodes)]
    return history(*(incident(root, step=step - len(nodes) + i) for i, root in enumerate(roots)))
