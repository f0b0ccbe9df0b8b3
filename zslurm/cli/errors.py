"""Errors of the trainer and of the checkpoint format, as the command line reports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zslurm.checkpoint_tools import CheckpointError, Mismatch, NotACheckpoint
from zslurm.core.errors import ConfigError, NotFound, ZslurmError
from zslurm.train.errors import BuildFailed, DataError, HubError, TrainError


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise them with the exit codes of the command line."""
    try:
        yield
    except NotACheckpoint as error:
        raise NotFound(str(error)) from error
    except BuildFailed as error:
        raise ZslurmError(str(error)) from error
    except (HubError, DataError, Mismatch) as error:
        raise ConfigError(str(error)) from error
    except (CheckpointError, TrainError) as error:
        raise ZslurmError(str(error)) from error
