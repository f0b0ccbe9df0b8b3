"""Do files on this machine set variables of RCCL or NCCL behind the environment?"""

from __future__ import annotations

from dataclasses import replace

from zslurm.cluster.rccl.environment import environment, lint, read_conf
from zslurm.cluster.rccl.lint import concerns_us
from zslurm.doctor.check import Check, Outcome, Status, failed, passed, warned, worst
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """~/.rccl.conf, /etc/rccl.conf and NCCL_CONF_FILE; what they set must be the same on all nodes."""
    if not sources.cluster.gpus_per_node:
        return None
    given = {**sources.environ, **{setting.name: setting.value for setting in environment(sources.cluster)}}
    conf = read_conf(given, sources.cluster, sources.root)
    conf = replace(conf, settings=tuple(setting for setting in conf.settings if concerns_us(setting.name)))
    if not conf.settings and conf.unreadable is None:
        return passed("no file sets variables of RCCL", must_match={"files of RCCL": "none"})
    names = {setting.name for setting in conf.settings} | {"NCCL_CONF_FILE"}
    problems = [
        (failed if finding.level == "fault" else warned)(
            finding.line, "move what is wanted to cluster.env, where a dry run shows it"
        )
        for finding in lint(given, sources.cluster, conf)
        if finding.name in names
    ]
    listed = ", ".join(f"{setting.name}={setting.value}" for setting in conf.settings)
    return worst(problems, f"files set {listed}", must_match={"files of RCCL": listed})


CHECK = Check(
    "rccl-conf", "network", "files that set variables of RCCL behind the environment", "node", check,
    inconsistent=Status.WARN,
)  # fmt: skip
