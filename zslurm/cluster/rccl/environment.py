"""The environment that RCCL or NCCL gets on a cluster: the rules that apply there, under what the site sets.

Rules are data (rules.yaml); see docs/rccl.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rccl.rules import rules
from zslurm.config.spec import ClusterSection

RULES = "rule (zslurm/cluster/rccl/rules.yaml)"
"""Origin of a value that a rule gives."""

MEASURED = "measurement (zslurm cluster show --measured)"
"""Origin of a value that was faster than the rule's, or than the default."""


@dataclass(frozen=True)
class Setting:
    """A variable of a job.

    Attributes:
        reason: why it is set, in one line.
        source: of the reason; empty for what the site or the user sets.
        origin: RULES, or the layer, file and line of cluster.env.
    """

    name: str
    value: str
    reason: str
    source: str
    origin: str


def environment(
    cluster: ClusterSection, origin_of: Callable[[str], str] = lambda name: f"cluster.env.{name}"
) -> list[Setting]:
    """Return the variables of a cluster: of each the first rule that applies, then what was measured to be faster.

    What cluster.env sets wins over both.

    `origin_of` returns the origin of a variable's value in cluster.env.
    """
    by_name: dict[str, Setting] = {}
    for rule in rules().rules:
        if rule.variable not in by_name and rule.when.holds(cluster):
            value = rule.value_on(cluster)
            if value is not None:
                by_name[rule.variable] = Setting(rule.variable, value, rule.reason, rule.source, RULES)
    for candidate in rules().candidates_on(cluster):
        on_gpus = cluster.measured.device != "cpu"
        variable = cluster.measured.variables.get(candidate.variable) if on_gpus else None
        before_it = by_name.get(candidate.variable)
        value = before_it.value if before_it else ""
        if variable is not None and (ratio := variable.gain_over(value)) is not None:
            by_name.pop(candidate.variable, None)
            if variable.best:  # empty: it is better left unset
                gain = f"{ratio:.2f} times the bandwidth with {value or 'no value'}"
                reason = f"measured here {variable.date[:10]}: {gain}"
                by_name[candidate.variable] = Setting(
                    candidate.variable, variable.best, reason, candidate.source, MEASURED
                )
    for name, override in cluster.env.items():
        before = by_name.pop(name, None)
        if override is not None:
            reason = f"instead of the rule's {before.value}: {before.reason}" if before else "set in cluster.env"
            by_name[name] = Setting(name, override, reason, before.source if before else "", origin_of(name))
    return list(by_name.values())


def variables_of(cluster: ClusterSection) -> dict[str, str]:
    """Return the variables of `environment`, name to value."""
    return {setting.name: setting.value for setting in environment(cluster)}


FIND_OUT = "by `zslurm init --probe`, or by hand what a node does not show"
"""How a user completes a profile."""
_NOT_PROBED = "cluster.interface"
_READ_BY_DOCTOR = "cluster.traffic_class"
"""The doctor's check `lossless` reports it: many sites show users no class."""


@dataclass(frozen=True)
class LeftOut:
    """A rule that would apply if the profile stated more.

    Attributes:
        variable: what the rule sets.
        needs: the keys of the profile that are missing, such as `cluster.nics`.
        reason: why the rule sets it.
    """

    variable: str
    needs: str
    reason: str

    @property
    def line(self) -> str:
        """The rule in one line: `NCCL_IB_HCA is not set: the profile does not give cluster.nics (...)`."""
        return f"{self.variable} is not set: the profile does not give {self.needs} ({self.reason})"


def left_out_note(cluster: ClusterSection) -> str | None:
    """Return one line on the variables that a probe of a node would decide; None if there are none."""
    undecided = [rule for rule in left_out(cluster) if rule.needs != _NOT_PROBED]
    if not undecided:
        return None
    keys = list(dict.fromkeys(rule.needs for rule in undecided))
    return (
        f"{counted(len(undecided), 'variable')} of RCCL or NCCL {'is' if len(undecided) == 1 else 'are'} not set: "
        f"profile {cluster.name} does not give {', '.join(keys)}; complete it {FIND_OUT} "
        "(`zslurm cluster env --explain` lists the variables)"
    )


def left_out_lines(cluster: ClusterSection) -> list[str]:
    """Return a line for each key that the profile lacks, with the variables of the rules that need it."""
    variables: dict[str, list[str]] = {}
    for rule in left_out(cluster):
        variables.setdefault(rule.needs, []).append(rule.variable)
    return [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not set: the profile does not give {needs}"
        for needs, names in variables.items()
    ]


def left_out(cluster: ClusterSection) -> list[LeftOut]:
    """Return the rules that are left out because the profile does not state what they need, one for a variable.

    A variable that another rule or cluster.env sets is not among them, nor is any on a machine without Slurm:
    ranks talk to each other inside it.
    """
    if cluster.launcher == "local":
        return []
    set_already = variables_of(cluster).keys() | cluster.env.keys()
    by_name: dict[str, LeftOut] = {}
    for rule in rules().rules:
        if rule.variable in set_already or rule.variable in by_name:
            continue
        needs = rule.when.unknown(cluster)
        if needs is None and rule.when.holds(cluster):
            keys = (key.removeprefix("control_") for key in rule.missing(cluster))
            needs = " and ".join(f"cluster.{key}" for key in keys) or None
        if needs is not None and needs != _READ_BY_DOCTOR:
            by_name[rule.variable] = LeftOut(rule.variable, needs, rule.reason)
    return list(by_name.values())
