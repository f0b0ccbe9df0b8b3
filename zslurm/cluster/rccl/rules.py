"""The rules in rules.yaml and the names in variables.yaml, typed, and when a rule applies.

Both files are data that ships in the package; a mistake in them is found by the tests, not by a user.
"""

from __future__ import annotations

import operator
import re
from functools import cache
from importlib import resources
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zslurm.config import yaml12
from zslurm.config.spec import ClusterSection
from zslurm.config.text import one_line
from zslurm.hardware.compiler_caches import node_directory
from zslurm.kernels.prepared import PREPARED_VARIABLE
from zslurm.train.sections.section import Section

Network = Literal["pollara", "broadcom", "cx7", "infiniband", "slingshot"]
Vendor = Literal["amd", "nvidia"]
Transport = Literal["plugin", "builtin", "generic"]
Version = tuple[int, ...]

# The unit in which InfiniBand counts its timeouts (NCCL user guide, NCCL_IB_TIMEOUT).
TICK_S = 4.096e-6
LONGEST_TIMEOUT = 31
ROCE = ("pollara", "broadcom", "cx7")
BUILT_IN_ROCM = "7.2.1"
"""The first ROCm whose RCCL has Pollara's transport built in."""
PLUGIN = "librccl-anp.so"
"""AMD's network plugin for Pollara NICs, which older RCCL needs."""
_FIELDS = frozenset((
    *("nics", "interface", "gid_index", "ib_timeout", "ib_retries", "heartbeat_s", "node_cache"),
    *("traffic_class", "control_traffic_class"),
))  # fmt: skip
_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
_RANGE = re.compile(r"(<=|>=|<|>|==)\s*(\d+(?:\.\d+)*)")
# Families and types of GPUs as Slurm, sysfs and people write them: mi300x, nvidia_h100_80gb_hbm3, amd_mi250.
_AMD = re.compile(r"(^|[^a-z0-9])(mi\d|amd|instinct|gfx9)", re.IGNORECASE)
_NVIDIA = re.compile(r"(^|[^a-z0-9])(nvidia|tesla|rtx|(gb|gh|[abhlptv])\d)", re.IGNORECASE)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return one_line(text)


def _fields_in(template: str) -> list[str]:
    return [field for _, field, _, _ in Formatter().parse(template) if field is not None]


def _template(text: str) -> str:
    if unknown := set(_fields_in(one_line(text))) - _FIELDS:
        raise ValueError(f"names {', '.join(sorted(unknown))}; known: {', '.join(sorted(_FIELDS))}")
    return text


def _range(text: str) -> str:
    if not all(_RANGE.fullmatch(clause.strip()) for clause in text.split(",")):
        raise ValueError(f"is no range of versions, such as `>=2.22, <2.28`: {text!r}")
    return text


Line = Annotated[str, AfterValidator(_not_empty)]


class When(Section):
    """What must hold for a rule to apply; what is not given holds always."""

    gpus: bool | None = None
    vendor: Vendor | None = None
    network: tuple[Network, ...] = ()
    rails_only: bool | None = None
    rccl: Annotated[str, AfterValidator(_range)] | None = None
    transport: Transport | None = None
    peermem: bool | None = None
    copy_engines: bool | None = None

    def holds(self, cluster: ClusterSection) -> bool:
        """Return whether all of it holds on a cluster; what the profile does not state never does."""
        return (
            self._holds_so_far(cluster)
            and (self.rccl is None or in_range(rccl_version(cluster), self.rccl))
            and self.transport in (None, ainic_transport(cluster))
            and self.peermem in (None, cluster.peermem)
        )

    def unknown(self, cluster: ClusterSection) -> str | None:
        """Return the key of the profile that decides whether the rule applies, if only missing keys do."""
        if self.gpus not in (None, cluster.gpus_per_node > 0):
            return None
        if self.vendor is not None and cluster.gpus_per_node and vendor_of(cluster) is None:
            return "cluster.gpu_family"
        if self.vendor not in (None, vendor_of(cluster)):
            return None
        if (self.network or self.rails_only) and cluster.network is None and not cluster.rails_only:
            return "cluster.network" if cluster.gpus_per_node else None
        if not self._holds_so_far(cluster):
            return None
        if self.rccl is not None and rccl_version(cluster) is None:
            return "cluster.rccl_version or cluster.rocm_version"
        if self.transport is not None and ainic_transport(cluster) is None:
            return "cluster.rocm_version or cluster.ainic_transport"
        if self.peermem is not None and cluster.peermem is None:
            return "cluster.peermem"
        return None

    def _holds_so_far(self, cluster: ClusterSection) -> bool:
        """Return whether the conditions hold that every profile decides."""
        return (
            self.gpus in (None, cluster.gpus_per_node > 0)
            and self.vendor in (None, vendor_of(cluster))
            and (not self.network or cluster.network in self.network)
            and self.rails_only in (None, cluster.rails_only)
            and self.copy_engines in (None, cluster.copy_engines)
        )


class RcclRule(Section):
    """One variable: its value, when it holds, why, and the source of that."""

    variable: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    value: Annotated[str, AfterValidator(_template)]
    when: When = When()
    reason: Line
    source: Line

    def value_on(self, cluster: ClusterSection) -> str | None:
        """Return the value on a cluster; None if the profile does not know what it needs."""
        return None if self.missing(cluster) else self.value.format_map(_fields_of(cluster))

    def missing(self, cluster: ClusterSection) -> list[str]:
        """Return the keys of the profile that the value needs and that are not given, such as `interface`."""
        values = _fields_of(cluster)
        return [field for field in _fields_in(self.value) if values[field] is None]


class Candidate(Section):
    """A variable that is worth measuring, with two values; an empty value leaves it unset."""

    variable: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    values: tuple[str, str]
    when: When = When()
    reason: Line
    source: Line


class Limits(Section):
    """The figures behind the timeouts."""

    network_patience_s: Annotated[int, Field(gt=0)]
    ib_retries: Annotated[int, Field(ge=1, le=7)]
    heartbeat_s: Annotated[int, Field(gt=0)]
    control_traffic_class: Annotated[int, Field(gt=0)]

    @property
    def ib_timeout(self) -> int:
        """The smallest NCCL_IB_TIMEOUT with which the NICs try for at least `network_patience_s`."""
        return next(
            exponent
            for exponent in range(1, LONGEST_TIMEOUT + 1)
            if patience_s(exponent, self.ib_retries) >= self.network_patience_s
        )


class Rules(Section):
    """rules.yaml."""

    limits: Limits
    gid_index: dict[Network, int]
    rocm: dict[str, str]
    rules: tuple[RcclRule, ...]
    candidates: tuple[Candidate, ...]

    def candidates_on(self, cluster: ClusterSection) -> list[Candidate]:
        """Return the variables that are worth measuring on a cluster: those that the profile does not set."""
        return [
            candidate
            for candidate in self.candidates
            if candidate.when.holds(cluster) and candidate.variable not in cluster.env
        ]

    def rccl_of(self, rocm: str | None) -> str | None:
        """Return the RCCL that came with a release of ROCm such as `7.1.1-38`; None if unknown."""
        return self.rocm.get(".".join(str(number) for number in version(rocm or "")[:2]))


class Known(Section):
    """Names that some library reads."""

    source: Line
    prefix: str
    names: str


class Misspelt(Section):
    """A name that nothing reads, and the one that was meant."""

    name: str
    meant: str
    source: Line


class Documented(Section):
    """Settings that a vendor publishes for a network and that the lint therefore accepts there."""

    vendor: Vendor
    network: tuple[Network, ...]
    settings: tuple[str, ...]
    why: Line
    source: Line


class Removed(Section):
    """Names that nothing reads from a version on."""

    names: str
    vendor: Vendor | None = None
    since: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
    why: Line
    source: Line


class Variables(Section):
    """variables.yaml."""

    known: tuple[Known, ...]
    misspelt: tuple[Misspelt, ...]
    removed: tuple[Removed, ...]
    documented: tuple[Documented, ...]

    def is_documented(self, name: str, value: str | None, cluster: ClusterSection) -> bool:
        """Return whether the vendor of the GPUs publishes this very setting for the cluster's network."""
        return any(
            entry.vendor == vendor_of(cluster)
            and cluster.network in entry.network
            and f"{name}={value}" in entry.settings
            for entry in self.documented
        )

    @property
    def names(self) -> frozenset[str]:
        """Every real name."""
        return frozenset(group.prefix + name for group in self.known for name in group.names.split())

    @property
    def gone(self) -> dict[str, Removed]:
        """The removed names, each with what is known of its end."""
        return {name: group for group in self.removed for name in group.names.split()}


@cache
def rules() -> Rules:
    """Return the shipped rules."""
    return Rules.model_validate(_data("rules.yaml"))


@cache
def variables() -> Variables:
    """Return the shipped names."""
    return Variables.model_validate(_data("variables.yaml"))


def _data(name: str) -> Any:
    text = resources.files("zslurm.cluster.rccl").joinpath(name).read_text(encoding="utf-8")
    return yaml12.parse(text, name).data


def _fields_of(cluster: ClusterSection) -> dict[str, Any]:
    """Return what a rule's value may name; None if the profile does not know it."""
    limits = rules().limits
    usual = rules().gid_index.get(cluster.rdma_network) if cluster.rdma_network else None
    return {
        "nics": ",".join(cluster.nics) or None,
        "interface": cluster.interface,
        "gid_index": usual if cluster.gid_index is None else cluster.gid_index,
        "ib_timeout": limits.ib_timeout,
        "ib_retries": limits.ib_retries,
        "heartbeat_s": limits.heartbeat_s,
        "node_cache": cluster.env.get(PREPARED_VARIABLE) or node_directory(cluster.stage_env),
        "traffic_class": cluster.traffic_class,
        "control_traffic_class": None if cluster.traffic_class is None else limits.control_traffic_class,
    }


def patience_s(timeout: int, retries: int) -> float:
    """Seconds for which a NIC waits for an answer: 4.096 us * 2^timeout for each of the retries.

    The InfiniBand specification lets an adapter take up to four times as long.
    """
    return TICK_S * float(2**timeout) * retries


def vendor_of(cluster: ClusterSection) -> Vendor | None:
    """Who makes the GPUs; None if neither gpu_family nor gpu_type names it."""
    if not cluster.gpus_per_node:
        return None
    name = cluster.gpu_family or cluster.gpu_type or ""
    return "amd" if _AMD.search(name) else "nvidia" if _NVIDIA.search(name) else None


def rccl_version(cluster: ClusterSection) -> str | None:
    """Return the profile's RCCL or NCCL: as given, else the one of its ROCm; None if neither is known."""
    return cluster.rccl_version or rules().rccl_of(cluster.rocm_version)


def ainic_transport(cluster: ClusterSection) -> Transport | None:
    """Return RCCL's transport for Pollara NICs: as given, else by the versions; None elsewhere and if unknown.

    RCCL has it built in from ROCm 7.2.1 on; 7.2.0 has an RCCL of the same number (2.27.7) without it.
    """
    if cluster.network != "pollara" or vendor_of(cluster) != "amd":
        return None
    if cluster.ainic_transport is not None:
        return cluster.ainic_transport
    if version(cluster.rocm_version or ""):
        return "builtin" if in_range(cluster.rocm_version, f">={BUILT_IN_ROCM}") else "plugin"
    if in_range(cluster.rccl_version, ">2.27.7"):
        return "builtin"
    return "plugin" if in_range(cluster.rccl_version, "<2.27.7") else None


def version(text: str) -> Version:
    """`2.22.3` as numbers; what follows them (`-rocm6.3`) is left out. Empty without any."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def in_range(text: str | None, wanted: str) -> bool:
    """Return whether a version is in a range such as `>=2.22, <2.28`; an unknown one never does."""
    have = version(text or "")
    return bool(have) and all(_satisfies(have, clause.strip()) for clause in wanted.split(","))


def _satisfies(have: Version, condition: str) -> bool:
    match = _RANGE.fullmatch(condition)
    assert match is not None, "checked when the rules were read"
    want = version(match[2])
    length = max(len(have), len(want))
    padded_have, padded_want = (
        version_part + (0,) * (length - len(version_part)) for version_part in (have, want)
    )
    return bool(_COMPARISONS[match[1]](padded_have, padded_want))
