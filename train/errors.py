"""Errors of the trainer, as a caller can act on them."""


class TrainError(Exception):
    """Something the user can mend; the message says what, where, and what to do."""


class ConfigError(TrainError):
    """The configuration cannot be trained as it stands."""


class DataError(TrainError):
    """A data bundle is missing, damaged, or does not fit the model."""


class Diverged(TrainError):
    """The loss or the gradient is not finite any more."""


class HubError(TrainError):
    """Weights cannot be read from, or written to, another program's format; one line for each reason."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
