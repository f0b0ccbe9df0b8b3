"""The profile that the doctor uses."""

from __future__ import annotations

from zslurm.cluster.profile import LOCAL
from zslurm.cluster.site import Site, load_site
from zslurm.core.errors import NoProfile
from zslurm.slurm.client import SlurmClient


def site(name: str | None) -> Site:
    """A profile: the named one, the usual one, or this machine where there is neither a profile nor a Slurm.

    Raises:
        ConfigError: it is not valid.
        NotFound: there is none of this name.
        NoProfile: there is a Slurm, but no profile of it yet.
    """
    try:
        return load_site(name)
    except NoProfile:
        if name is not None or SlurmClient().available():
            raise
        return load_site(LOCAL)
