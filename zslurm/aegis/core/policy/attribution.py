"""What an attempt is attributed to, and which nodes are excluded for it, from its faults and those before it.

root_cause.py finds the roots and their order. Besides, a machine that reports itself broken outranks every
error of a program; and if faults of one kind name several nodes, none of them is suspected: it is the fabric
or a service, or one of them pulled the others down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zslurm.aegis.core.policy.history import roots_before
from zslurm.aegis.core.root_cause import believable, ends_of, first_cause, taken_back
from zslurm.aegis.fault_kinds import UNKNOWN, FaultRule, rule_of
from zslurm.aegis.types import AttemptSummary, Fault, History
from zslurm.config.aegis import AegisSection
from zslurm.run.exclusions import active_exclusions

NAN_REPEATS = 2
"""Times that NaN comes first from one and the same GPU, before that GPU is tested."""


@dataclass(frozen=True)
class Attribution:
    """The root of an attempt, and what that asks for.

    Attributes:
        root: the fault; without node, GPU and NIC if it is not known which one it was; None: unknown.
        exclude: nodes that must not be used any more.
        test_gpu: (node, GPU or rank) to be tested.
    """

    root: Fault | None
    exclude: tuple[str, ...] = ()
    test_gpu: tuple[str, str] | None = None

    @property
    def rule(self) -> FaultRule:
        """The rule of the root's kind."""
        return rule_of(UNKNOWN if self.root is None else self.root.kind)

    @property
    def what(self) -> str:
        """What happened and where, as the beginning of a line."""
        root = self.root
        if root is None:
            return self.rule.message
        parts = [
            root.node,
            None if root.gpu is None else f"GPU {root.gpu}",
            None if root.nic is None else f"NIC {root.nic}",
            None if root.rank is None else f"rank {root.rank}",
            f"after step {root.step}" if root.step is not None and root.step > 0 else None,
        ]
        where = ", ".join(word for word in parts if word)
        return f"{where}: {self.rule.message}" if where else self.rule.message


def attribute(
    roots: Sequence[Fault], attempt_state: AttemptSummary, history: History, settings: AegisSection
) -> Attribution:
    """Choose the root among `roots`, by time (`roots_of`), and the nodes that are excluded for it."""
    roots = believable(roots, attempt_state)
    active = active_exclusions(history.exclusions, attempt_state.now)
    certain = [fault for fault in roots if fault.rule.certain]
    leading = [fault for fault in roots if fault.rule.then == "requeue"] + certain
    if leading:
        nodes = dict.fromkeys(fault.node for fault in certain if fault.node is not None)
        exclude = tuple(node for node in nodes if node not in active)
        return Attribution(leading[0], exclude)
    root = first_cause(roots)
    if root is None:
        return Attribution(None)
    if root.rule.then == "test":
        return Attribution(root, test_gpu=_to_test(root, attempt_state, history, settings))
    if root.rule.exclude_after is None or root.node is None:
        return Attribution(root)
    if len({fault.node for fault in roots if fault.kind == root.kind and fault.node is not None}) > 1:
        return Attribution(replace(root, node=None, gpu=None, nic=None))
    if root.node in active or not _proven(root, root.node, attempt_state, history, settings):
        return Attribution(root)
    return Attribution(root, (root.node,))


def _proven(
    root: Fault, node: str, attempt_state: AttemptSummary, history: History, settings: AegisSection
) -> bool:
    """Return whether the root speaks against its node often enough."""
    ends = ends_of(attempt_state.faults)
    lasted = attempt_state.now - root.time >= settings.tolerate_s and taken_back(root, ends) is None
    if root.rule.exclude_after == 1 or (root.rule.lasting and lasted):
        return True
    times = root.rule.exclude_after or 0
    before = [
        fault
        for fault in roots_before(history, node, attempt_state.now - settings.exclude_for_s)
        if 0 < (fault.rule.exclude_after or 0) <= times
    ]
    if root.step is not None and {fault.step for fault in before} == {root.step}:
        return False  # always after the same step: a program that fails there, on whatever node
    return len(before) + 1 >= times


def _to_test(
    root: Fault, attempt_state: AttemptSummary, history: History, settings: AegisSection
) -> tuple[str, str] | None:
    """Return the GPU that must be tested, because NaN came first from it again and again."""
    if root.node is None or (root.gpu is None and root.rank is None):
        return None
    before = [
        fault
        for fault in roots_before(history, root.node, attempt_state.now - settings.exclude_for_s)
        if (fault.kind, fault.gpu, fault.rank) == (root.kind, root.gpu, root.rank)
    ]
    if len(before) + 1 < NAN_REPEATS:
        return None
    return root.node, str(root.rank) if root.gpu is None else root.gpu
