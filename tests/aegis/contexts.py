"""Nodes for sensors to look at: a tree of files each, and the run that an agent there watches over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zslurm.aegis.agent.sensor import NodeContext
from zslurm.config.aegis import AegisSection
from zslurm.config.spec import ClusterSection
from zslurm.run.run_dir import RunDir

NOW = 1_700_000_000.0


def context(root: Path, *, environ: dict[str, str] | None = None, **settings: Any) -> NodeContext:
    """The node `node0` whose files lie below `root`.

    Args:
        root: of the node's files; the run lies next to it.
        environ: of the agent, on top of a small one.
        settings: of aegis.sensors; `aegis` and `cluster` are whole sections.
    """
    aegis, cluster = settings.pop("aegis", {}), settings.pop("cluster", {})
    run = RunDir(root.parent / "runs" / "main")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    return NodeContext(
        node="node0",
        run=run,
        aegis=AegisSection.model_validate(aegis | {"sensors": settings}),
        cluster=ClusterSection.model_validate(cluster),
        root=root,
        environ={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "node0", **(environ or {})},
        now=lambda: NOW,
    )
