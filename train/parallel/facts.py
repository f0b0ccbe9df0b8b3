"""What the ranks agreed on at the start: a process that takes a rank's place later adopts it, without asking."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zslurm.kernels import dispatch


@dataclass(frozen=True)
class AgreedFacts:
    """Decisions that all ranks made together.

    Attributes:
        recomputed: layers that are computed again in backward.
        local: the fewest ranks of any node.
        overlap: gradients are reduced during backward.
        two_level: collectives are in two levels.
        tables: measured tables of the kernels' operations, by operation.
        missing: implementations that some rank cannot start, by operation.
        head_chunk: tokens whose logits exist at one time; None: the head's own number.
    """

    recomputed: int
    local: int
    overlap: bool
    two_level: bool
    tables: Mapping[str, Any]
    missing: Mapping[str, list[str]]
    head_chunk: int | None = None

    def to_json(self) -> str:
        """Return them as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes) -> AgreedFacts:
        """Read what `to_json` returned."""
        return cls(**json.loads(text))

    def adopt(self) -> None:
        """Choose kernels in this process as the ranks do."""
        dispatch.choose_by(self.tables)
        for name, operation in dispatch.operations().items():
            for implementation in set(self.missing.get(name, ())) - operation.missing():
                operation.leave_out(implementation, "another rank cannot start")


def kernel_facts() -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the tables and the missing implementations of this process, which all ranks share by now."""
    missing = {name: sorted(operation.missing()) for name, operation in dispatch.operations().items()}
    return dict(dispatch.tables()), missing
