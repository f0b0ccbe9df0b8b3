"""What a line of a log means: the table signatures.yaml, made quick.

A line is compared with eight hundred expressions only if it must be. Every expression requires literals, one
of which is in each line that it matches, and each of these contains a literal of the prefilter: a short one that
lines of healthy training seldom have. So a log is searched for the prefilter first (scanner.py); a line that has
some of it is searched for the required literals, and only the expressions of those that are there are tried, in
the order of the table.

Of a line only what was observed counts: guesses ("might be caused by ...") are cut off before anything is tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from zslurm.aegis.fault_kinds import FAULT_RULES, PCIE_ERROR, FaultKind, rule_of
from zslurm.aegis.logs.hardware_names import names_of
from zslurm.aegis.logs.lines import MAX_LINE, body_of, without_labels
from zslurm.aegis.logs.location import location_of
from zslurm.aegis.logs.prefilter import TableError, any_of, required_literals
from zslurm.aegis.types import Role, Scope

# Without ASCII a K would match the Kelvin sign, which has no k when in lower case.
_FLAGS = re.IGNORECASE | re.ASCII

_REMEMBERED = 512
"""Lines of which the rule is remembered."""


@dataclass(frozen=True)
class Match:
    """What a line means.

    Attributes:
        kind: of the fault; `benign` and `benign_after_fault` are none.
        role: its part in the diagnosis, as far as one line shows.
        scope: what is broken if it is a root.
        node: host or Slurm node that the line names as the place of the fault.
        gpu: PCI address, local index, or `kfd:N` (a node of the kernel's topology, which counts CPUs as well).
        nic: name of the interface or RDMA device, else PCI address.
        rank: global rank that wrote the line, or that it names.
        advice: what to do, for a person.
        clears: the kind of fault whose end the line reports, for benign_after_fault.
    """

    kind: FaultKind
    role: Role
    scope: Scope
    node: str | None = None
    gpu: str | None = None
    nic: str | None = None
    rank: int | None = None
    advice: str = ""
    clears: FaultKind | None = None


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        match: what its lines mean; without who and where.
        any: expressions of which one must match.
        unless: expression that must not.
        matches: a line that it must match.
        rejects: a line that it must not.
        names: the hardware (hardware_names.py) that a line must name besides, so that no other system's words are
            taken for this hardware's.
        last: it is tried after all others.
    """

    match: Match
    any: tuple[str, ...]
    unless: str | None
    matches: str
    rejects: str
    names: str | None = None
    last: bool = False


class _Expression(NamedTuple):
    """One expression of a rule, with words of which one is in every line that it matches."""

    words: tuple[str, ...]
    text: str
    rule: Rule


class Signatures:
    """The table, ready to match."""

    def __init__(self, rules: Sequence[Rule], prefilter: Sequence[str], *, ignore: Iterable[str]) -> None:
        """Prepare rules, in the order in which they are tried.

        Args:
            rules: rows of the table.
            prefilter: short words without digits, one of which is in the required literals of each expression.
            ignore: what healthy runs write all the time although it has a literal in it.

        Raises:
            TableError: an expression requires no literal with one of the prefilter, or one of these has digits.
        """
        if with_digits := [literal for literal in prefilter if any(char.isdigit() for char in literal)]:
            raise TableError(
                f"prefilter: literals with digits, which scanner.py removes from a line: {with_digits}"
            )
        self.rules = tuple(rules)
        self.prefilter = tuple(literal.encode() for literal in prefilter)
        self._prefilter = tuple(prefilter)
        self._ignored = [(phrase.encode(), b" " * len(phrase)) for phrase in ignore]
        # The ranks of a job say the same when it fails, each behind its own label.
        self._rule_of = lru_cache(maxsize=_REMEMBERED)(self._find_rule)
        self._any_literal = any_of(self._prefilter)
        self._expressions: list[_Expression] = []
        self._behind: dict[str, list[int]] = {literal: [] for literal in prefilter}
        for rule in self.rules:
            for expression in rule.any:
                self._add(rule, expression)

    def _add(self, rule: Rule, expression: str) -> None:
        words = required_literals(expression, self._any_literal)
        if not words:
            raise TableError(f"{rule.match.kind}: no required literal of the prefilter in {expression!r}")
        for literal in {literal_match[0] for word in words if (literal_match := self._any_literal.search(word))}:
            self._behind[literal].append(len(self._expressions))
        self._expressions.append(_Expression(tuple(words), expression, rule))

    def without_ignored(self, lowered: bytes) -> bytes:
        """Return a log in lower case, with blanks over the ignored phrases; as long as before."""
        for phrase, blanks in self._ignored:
            lowered = lowered.replace(phrase, blanks)
        return lowered

    @classmethod
    def load(cls) -> Signatures:
        """Return the table that comes with zslurm; read once per process."""
        return _load()

    @classmethod
    def of(cls, text: str) -> Signatures:
        """Return the table in the text of a signatures.yaml.

        Raises:
            TableError: an expression requires no literal, or a kind is not in the table of fault_kinds.py.
        """
        table = yaml.load(text, Loader=_LOADER)
        rules = [rule for kind, body in table["kinds"].items() for rule in _rules(kind, body)]
        rules.sort(key=lambda rule: rule.last)
        return cls(rules, table["prefilter"], ignore=table["ignore"])

    def match(self, text: str, *, kernel: bool = False) -> Match | None:
        """Return what a logical line (lines.py) means; None if nothing is known to be wrong with it.

        A line of the kernel's log (`kernel`) cannot hold a program's own errors.
        """
        text = text[:MAX_LINE]
        if _CODE.match(without_labels(text)):
            return None
        observed = without_guesses(body_of(text))
        if (slurm := _SLURM_LOG.search(text)) is not None:
            observed = f"{'slurmstepd' if slurm['stamp'] else 'slurmd'}: {_STEP_LABEL.sub('', observed)}"
        rule = self._rule_of(observed, kernel)
        return _placed(rule.match, text) if rule is not None else None

    def _find_rule(self, observed: str, kernel: bool) -> Rule | None:
        """Return the first rule that a line without labels matches."""
        lowered = observed.lower()
        tried = {n for literal in self._prefilter if literal in lowered for n in self._behind[literal]}
        refused: Rule | None = None
        for number in sorted(tried):
            words, expression, rule = self._expressions[number]
            if rule is refused or not any(word in lowered for word in words):
                continue
            if kernel and not rule_of(rule.match.kind).in_kernel_log:
                continue
            if not _compiled(expression).search(observed):
                continue
            if rule.names is not None and not names_of(rule.names).search(observed):
                refused = rule
                continue
            if rule.unless is not None and _compiled(rule.unless).search(observed):
                refused = rule
                continue
            return rule
        return None


def _placed(match: Match, text: str) -> Match:
    """Return what a line means, with the node, GPU, NIC and rank that the line itself names."""
    location = location_of(text, match.kind, match.scope)
    if match.kind == PCIE_ERROR and location.nic is not None:
        match = replace(match, scope="nic")
    return replace(match, node=location.node, gpu=location.gpu, nic=location.nic, rank=location.rank)


@cache
def _compiled(expression: str) -> re.Pattern[str]:
    """Return an expression, compiled when the first line has one of its words: most logs need few of them."""
    return re.compile(expression, _FLAGS)


@cache
def _load() -> Signatures:
    return Signatures.of(files("zslurm.aegis.logs").joinpath("signatures.yaml").read_text("utf-8"))


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _rules(kind: str, body: Mapping[str, Any]) -> list[Rule]:
    meaning = rule_of(known_kind := _known(kind))
    of_kind = Match(known_kind, meaning.role, meaning.scope, advice=meaning.advice)
    rules = []
    for row in body["rules"]:
        overrides = {name: row[name] for name in ("role", "scope", "advice") if name in row}
        if "clears" in row:
            overrides["clears"] = _known(row["clears"])
        match, names = replace(of_kind, **overrides), row.get("names", body.get("names"))
        rules.append(
            Rule(
                match, tuple(row["any"]), row.get("unless"), row["matches"], row["rejects"], names,
                row.get("last", False),
            )
        )  # fmt: skip
    return rules


def _known(name: str) -> FaultKind:
    """Raise TableError."""
    if name not in FAULT_RULES:
        raise TableError(f"signatures.yaml: there is no kind `{name}` in zslurm/aegis/fault_kinds.py")
    return FaultKind(name)


_GUESS = re.compile(
    r"\b(?:may|might|could|can|probably|possibly|typically|usually|likely)"
    r"(?: (?:also|be|have been|often|likely|well))* "
    r"(?:caused by|triggered by|due to|because|indicates?|a sign of|the result of)\b[^\n]*?(?:[.!?](?=\s|$)|$)"
    r"|\b(?:some |the )?(?:possible|potential|common|likely|usual) (?:root )?(?:reasons?|causes?)\b[^\n]*",
    re.IGNORECASE,
)
_CODE = re.compile(r"^\s+(?:raise|assert|return|print|logger|logging|self|if|elif|with|for|except|await|yield)\b")

# The files that Slurm's daemons write do not name the daemon: [2026-02-02T12:00:00.123] [4242.0] error: ...
# Since Slurm 26.05 the batch step's lines in a job's log do not either, so such a line is read as slurmstepd's.
# Syslog does, but its stamp is cut off together with the daemon's name.
_SLURM_LOG = re.compile(
    r"(?:(?P<stamp>\[\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}\])|\bslurm\w*\[\d+\]:) "
    r"(?:\[\d+\.\w+\] )?(?:error|fatal): "
)
_STEP_LABEL = re.compile(r"^\[\d+\.\w+\] ")


def without_guesses(text: str) -> str:
    """Return a line without what its writer only supposes: `this could be caused by ...` is no observation."""
    return _GUESS.sub(" ", text)
