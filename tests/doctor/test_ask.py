"""How nodes are asked: what their clocks are compared with, and that a node without an answer stays known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zslurm.cluster.site import load_site
from zslurm.doctor import ask as asking
from zslurm.doctor.nodes import Chosen
from zslurm.hardware.node_sources import NodeTask
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer


def test_the_clocks_of_nodes_are_compared_with_the_end_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waited for five minutes let a clock seem to be up to five minutes ahead."""
    now = iter([100.0, 150.0, 400.0])
    monkeypatch.setattr("time.time", lambda: next(now))
    monkeypatch.setattr(asking, "report_waiting", lambda: lambda job_id: None)

    def run_on_nodes(module: str, *, waiting: Callable[[str], None], **options: Any) -> dict[str, NodeAnswer]:
        waiting("7")
        waiting("7")
        return {"a": NodeAnswer("a", {"sent": 100.0, "began": 401.0}), "b": NodeAnswer("b", None, "no answer")}

    monkeypatch.setattr(asking, "run_on_nodes", run_on_nodes)
    answers = asking.ask(load_site("local"), Chosen(names=("a", "b")), NodeTask(), 600.0)
    assert answers["a"].value == {"sent": 400.0, "began": 401.0}
    assert answers["b"].error == "no answer"
