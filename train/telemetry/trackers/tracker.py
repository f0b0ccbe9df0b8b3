"""Define what a tracker is: one service that shows the numbers of a run."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zslurm.train.errors import ConfigError
from zslurm.train.sections.metrics_config import MetricsConfig


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker may know of a run.

    Attributes:
        run_dir: its directory; what a tracker keeps locally is a folder in it.
        name: of the run.
        project: under which it is shown.
        config: its resolved configuration, as JSON.
        attempt: number of this start, from 1.
        first_step: that this attempt makes; what was shown of it and later ones is void.
        online: the service is reached from here; else it is written for a later upload.
    """

    run_dir: Path
    name: str
    project: str
    config: Mapping[str, Any]
    attempt: int
    first_step: int
    online: bool

    @property
    def identity(self) -> str:
        """Return an id that is the same in every attempt of this run, and of no other run."""
        return hashlib.sha256(str(self.run_dir.absolute()).encode()).hexdigest()[:16]


class Tracker:
    """One service. Its methods are called in one thread, not in the training's; each may raise anything.

    Attributes:
        KEY: the setting below `metrics` that turns it on.
        PACKAGE: what has to be importable.
        EXTRA: of pyproject.toml that installs it.
    """

    KEY: ClassVar[str]
    PACKAGE: ClassVar[str]
    EXTRA: ClassVar[str]

    def __init__(self, run: TrackedRun) -> None:
        """Open the run at the service, or open it again."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show numbers of a step, by their tags."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write what is left."""
        raise NotImplementedError

    @classmethod
    def mode(cls, metrics: MetricsConfig) -> str:
        """Return off, offline or online."""
        value = getattr(metrics, cls.KEY)
        return value if value in ("off", "offline", "online") else "offline" if value else "off"

    @classmethod
    def check(cls, metrics: MetricsConfig) -> None:
        """Refuse the setting without the package. Every rank asks; only rank 0 writes.

        Raises:
            ConfigError: the package is not installed.
        """
        if cls.mode(metrics) != "off" and importlib.util.find_spec(cls.PACKAGE) is None:
            raise ConfigError(
                f"metrics.{cls.KEY}: the {cls.PACKAGE} package is not installed; pip install "
                f"'zslurm-train[{cls.EXTRA}]', or leave it off (metrics.jsonl has everything)"
            )


def scalars(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a line of metrics by their tags: `step/loss`, `step/time_split_s/forward`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from scalars(f"{tag}/{key}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield tag, value
