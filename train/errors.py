"""Errors of the trainer, as a caller can act on them."""


class TrainError(Exception):
    """Training cannot go on; the message says what, where, and what to do."""

    exit_code = 1


class ConfigError(TrainError):
    """The configuration cannot be trained as it stands."""

    exit_code = 2


class DataError(TrainError):
    """A data bundle is missing, damaged, or does not fit the model."""

    exit_code = 2


class Diverged(TrainError):
    """The loss or the gradient is not finite any more."""
