"""The variables of RCCL or NCCL that a cluster's jobs get."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zslurm.cluster.profile import default_name
from zslurm.cluster.rccl import environment as rccl
from zslurm.cluster.rccl.environment import Setting
from zslurm.cluster.site import resolve_profile
from zslurm.config.layers import Override
from zslurm.config.spec import ClusterSection
from zslurm.core.redact import redact_value


class Environment(dict[str, str]):
    """Variables by name; `os.environ | zslurm.env()` is an environment for a process.

    Attributes:
        settings: each variable with `reason`, `source` and `origin`.
        left_out: names of variables that look like secrets.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        """Take settings apart into those that may be shown, and secrets."""
        self.settings = [setting for setting in settings if not is_secret(setting)]
        self.left_out = [setting.name for setting in settings if is_secret(setting)]
        super().__init__({setting.name: setting.value for setting in self.settings})

    def _repr_html_(self) -> str:
        """Show variables, values and reasons as a table in a notebook."""
        rows = "".join(
            f"<tr><td>{escape(setting.name)}</td><td>{escape(setting.value)}</td><td>{escape(setting.reason)}</td></tr>"
            for setting in self.settings
        )
        return f"<table><tr><th>variable</th><th>value</th><th>why</th></tr>{rows}</table>"


def env(cluster: str | None = None, overrides: Sequence[str] = ()) -> Environment:
    """Return the variables of RCCL or NCCL on a cluster, as `zslurm cluster env` prints them.

    Args:
        cluster: name of a profile; default: as for `zslurm submit`.
        overrides: `KEY=VALUE` assignments over the profile.

    Raises:
        NotFound: there is no such profile.
        ConfigError: the profile or an override is wrong, or there is no profile.
    """
    return Environment(settings_of(cluster or default_name(), [Override.parse(text) for text in overrides])[1])


def settings_of(cluster: str, overrides: Sequence[Override] = ()) -> tuple[ClusterSection, list[Setting]]:
    """Return a cluster and its variables, secrets included.

    Raises:
        NotFound, ConfigError: as `env`.
    """
    resolved = resolve_profile(cluster, overrides)
    return resolved.spec.cluster, rccl.environment(resolved.spec.cluster, resolved.origin_of_variable)


def is_secret(setting: Setting) -> bool:
    """Return whether a variable looks like a secret."""
    return bool(redact_value(setting.name, setting.value) != setting.value)
