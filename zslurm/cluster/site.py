"""A cluster profile by itself, typed: for commands that ask about the cluster and not about a run.

`Site` has only the sections about the cluster, `ResolvedProfile` the whole of a run on it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from zslurm.cluster.profile import LAYER, Profile, default_name, find_profile, layers_of, profile_layers
from zslurm.config.layers import DEFAULT, Layers, Origin, Override
from zslurm.config.load import validate
from zslurm.config.problems import describe
from zslurm.config.spec import ClusterSection, RunSpec, SlurmSection
from zslurm.config.yaml12 import KeyPath
from zslurm.core.errors import ConfigError
from zslurm.slurm.sbatch_options import carried_by
from zslurm.train.sections.section import Section

# A run needs phases, a profile has none: this one, longer than any, takes their place while the rest is checked.
_PHASES = [{"tokens": 10**15, "context": 1024, "global_batch": 1024, "micro_batch": 1, "lr": 1e-3}]


class Site(Section):
    """The sections of a profile about its cluster and about submitting there."""

    cluster: ClusterSection = ClusterSection()
    slurm: SlurmSection = SlurmSection()

    def submit_options(self) -> list[str]:
        """Return the options of sbatch and srun on this cluster."""
        values = {option.name: getattr(self.slurm, option.key) for option in carried_by("probe")}
        return [f"--{name}={value}" for name, value in values.items() if value]


def load_site(name: str | None = None) -> Site:
    """Return the profile `name`, else the default one.

    Raises:
        ConfigError: its sections `cluster` or `slurm` are wrong; one line for each problem.
        NotFound: there is no such profile.
        NoProfile: no profile was named, and there is none.
    """
    layers = Layers()
    for document, file in profile_layers(name or default_name()):
        layers.add(document, LAYER, file)
    # A profile may hold other sections of a run as well: these are the run's to check.
    layers.data = {key: value for key, value in layers.data.items() if key in Site.model_fields}
    try:
        return Site.model_validate(layers.data)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, layers, Site))) from error


@dataclass(frozen=True)
class ResolvedProfile:
    """A profile and everything below it, as a run would get it.

    Attributes:
        spec: the whole of a run on it; only what a profile states is of use here.
    """

    profile: Profile
    spec: RunSpec
    layers: Layers

    def rows(self) -> list[tuple[KeyPath, Any, Origin]]:
        """Return every key of the section `cluster`, and what is given in other sections, each with its origin."""
        rows: list[tuple[KeyPath, Any, Origin]] = []
        for section, values in self.spec.model_dump(mode="json").items():
            if isinstance(values, dict):
                for key, value in values.items():
                    rows += _rows(value, (section, key), self.layers)
        return [row for row in rows if row[0][0] == "cluster" or row[2] != DEFAULT]

    def origin_of_variable(self, name: str) -> str:
        """Return the origin of a variable of cluster.env."""
        return str(self.layers.leaf_origin(("cluster", "env", name)))


def _rows(value: Any, path: KeyPath, layers: Layers) -> list[tuple[KeyPath, Any, Origin]]:
    """Return lists on one row each; mappings key by key."""
    if isinstance(value, dict) and value:
        return [row for key, item in value.items() for row in _rows(item, (*path, key), layers)]
    return [(path, value, layers.leaf_origin(path))]


def resolve_profile(name: str, overrides: Sequence[Override] = ()) -> ResolvedProfile:
    """Return the profile `name` under overrides.

    Raises:
        NotFound: there is no such profile.
        ConfigError: it, something it extends, or an override is wrong; one line for each problem.
    """
    profile = find_profile(name)
    return resolve_text(profile, profile.read(), overrides)


def resolve_text(profile: Profile, text: str, overrides: Sequence[Override] = ()) -> ResolvedProfile:
    """As `resolve_profile`, for a text that is to become the profile's.

    Raises:
        ConfigError: see `resolve_profile`.
    """
    layers = Layers()
    for document, file in layers_of(profile, text):
        layers.add(document, LAYER, file)
    for override in overrides:
        layers.override(override)
    if "phases" not in layers.data:
        layers.data["phases"] = copy.deepcopy(_PHASES)
        layers.origins[("phases",)] = DEFAULT
    return ResolvedProfile(profile, validate(layers).spec, layers)
