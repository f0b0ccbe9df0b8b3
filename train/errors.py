"""Errors of the trainer, as a caller can act on them."""

from __future__ import annotations

from zslurm.error import Error


class TrainError(Error):
    """Training cannot continue; the message names what, where, and what to do."""

    exit_code = 1


class ConfigError(TrainError):
    """The configuration cannot be trained as it is."""

    exit_code = 2


class DataError(TrainError):
    """A data bundle is missing, damaged, or does not fit the model."""

    exit_code = 2


class BuildFailed(DataError):
    """Data could not be built though nothing is wrong with what was asked: no room, a process was killed."""

    exit_code = 1


class MovedOff(TrainError):
    """Another process, on another node, continues as this rank, as planned: this one is done."""

    exit_code = 0


class CannotRecover(TrainError):
    """The ranks cannot continue in memory; the message states why."""


class Diverged(TrainError):
    """The loss or the gradient is not finite any more.

    Attributes:
        fingerprint: of the steps, losses and gradient norms that were skipped, to the last bit, and of where they
            began. The same one again means that the same computation was made again.
    """

    def __init__(self, message: str, fingerprint: str | None = None) -> None:
        super().__init__(message)
        self.fingerprint = fingerprint


class HubError(TrainError):
    """Weights do not fit what was asked: a folder, a format, a destination; one line for each reason."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class HubIOError(TrainError):
    """The operating system refused to read or write a folder of weights."""


class NumbersWrong(TrainError):
    """Numbers of one rank are not what they must be; the message names the rank as `on rank N`.

    Attributes:
        verified: the last step whose numbers were found right.
    """

    def __init__(self, message: str, verified: int) -> None:
        super().__init__(message)
        self.verified = verified


class WrongProduct(NumbersWrong):
    """A GPU computed something else than others from the same numbers."""


class ChangedMemory(NumbersWrong):
    """Numbers changed in memory where nothing wrote them."""


class WrongTransfer(NumbersWrong):
    """What arrived is not what was sent."""
