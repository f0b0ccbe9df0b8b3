"""Are variables set that do nothing, contradict each other, or undo what the profile sets?"""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rccl.environment import environment, left_out, lint, overridden, read_conf
from zslurm.doctor.check import Check, Outcome, failed, warned, worst
from zslurm.hardware.node_sources import Sources


def check(sources: Sources) -> Outcome | None:
    """The variables that a job would get from here: this shell's, under those of the profile's rules."""
    if not sources.cluster.gpus_per_node:
        return None
    job = {setting.name: setting.value for setting in environment(sources.cluster)}
    given = {**sources.environ, **job}
    conf = read_conf(given, sources.cluster, sources.root)
    findings = [*lint(given, sources.cluster, conf), *overridden(sources.environ, job)]
    problems = [
        (failed if finding.level == "fault" else warned)(
            f"{finding.name}: {finding.message}", "`zslurm env --explain` shows what a job gets"
        )
        for finding in findings
    ]
    problems += [
        warned(rule.line, "complete the profile (`zslurm init --probe` reads a node), or set it in cluster.env")
        for rule in left_out(sources.cluster)
    ]
    return worst(problems, f"{counted(len(job), 'variable is', 'variables are')} set, none is wrong")


CHECK = Check("environment", "network", "dead, misspelt or contradictory variables of RCCL", "login", check)
