"""A cluster profile by itself, typed: for commands that ask about the cluster and not about a run."""

from __future__ import annotations

from pydantic import ValidationError

from zslurm.cluster.profile import default_name, load_profile
from zslurm.config.layers import Layers
from zslurm.config.problems import describe
from zslurm.config.spec import ClusterSection, SlurmSection
from zslurm.core.errors import ConfigError
from zslurm.train.section import Section


class Site(Section):
    """What a profile says about its cluster and about submitting there."""

    cluster: ClusterSection = ClusterSection()
    slurm: SlurmSection = SlurmSection()

    def submit_options(self) -> list[str]:
        """Return the options of sbatch and srun on this cluster."""
        slurm = self.slurm
        given = {
            "partition": slurm.partition,
            "account": slurm.account,
            "qos": slurm.qos,
            "constraint": slurm.constraint,
        }
        return [f"--{name}={value}" for name, value in given.items() if value]


def load_site(name: str | None = None) -> Site:
    """The profile `name`, else the default one.

    Raises:
        ConfigError: its sections `cluster` or `slurm` are wrong; one line for each problem.
        NotFound: there is no such profile.
        NoProfile: no profile was named, and there is none.
    """
    layers = Layers()
    document, file = load_profile(name or default_name())
    layers.add(document, "cluster profile", file)
    # A profile may hold other sections of a run as well: these are the run's to check.
    layers.data = {key: value for key, value in layers.data.items() if key in Site.model_fields}
    try:
        return Site.model_validate(layers.data)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, layers, Site))) from error
