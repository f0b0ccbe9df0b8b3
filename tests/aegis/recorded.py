"""Events as the supervisor records them, event by event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.aegis.attempts import NODES, NOW
from zslurm.aegis.fault_kinds import FaultKind
from zslurm.aegis.types import Fault, Resources


class Recorder:
    """The rows of an events file, one second apart."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.clock = NOW
        self.attempt = 0

    def event(self, event: str, /, **fields: Any) -> Recorder:
        self.clock += 1.0
        self.rows.append({"time": self.clock, "event": event, "job_id": "17", **fields})
        return self

    def started(self, nodes: str = "node[0-2]") -> Recorder:
        self.attempt += 1
        return self.event("attempt_started", attempt=self.attempt, nodes=nodes, world_size=6)

    def noticed(self, kind: str, node: str | None = "node1", **fields: Any) -> Recorder:
        body = {"role": "root", "scope": "unknown", "source": "srun"} | fields
        found = Fault(kind=FaultKind(kind), time=self.clock, line=f"words of {kind}", node=node, **body).fields()
        return self.event("fault_detected", attempt=self.attempt, fault_time=found.pop("time"), **found)

    def ended(self, outcome: str = "failed") -> Recorder:
        return self.event("attempt_ended", attempt=self.attempt, outcome=outcome, exit_code=1, cause=None)

    def decided(
        self,
        action: str,
        *,
        step: int = 40,
        exclude: Sequence[str] = (),
        there: Resources | None = None,
        **more: Any,
    ) -> Recorder:
        root = next((row for row in reversed(self.rows) if row["event"] == "fault_detected"), None)
        fields = {"reason": "because", "mode": "act", "committed_step": step, "exclude": list(exclude)} | more
        if root is not None:
            fields["root"] = {**root, "time": root["fault_time"]}
        if there is not None:
            fields["resources"] = json.loads(json.dumps(there.fields()))
        return self.event("decision", attempt=self.attempt, action=action, **fields)

    def failed(self, kind: str, action: str = "restart", node: str | None = "node1", **more: Any) -> Recorder:
        """One attempt from its start to what was decided about it."""
        return self.started().noticed(kind, node).ended().decided(action, **more)

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        return path


def there(alive: Sequence[str] = NODES[:3], **more: Any) -> Resources:
    """Three nodes in use, in a job that outlives its nodes."""
    return Resources(tuple(alive), NODES[:3], 3, outlives_nodes=True, elsewhere=16, **more)
