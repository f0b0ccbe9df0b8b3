"""Base of the sections of a configuration, and the numbers in them."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, defaults checked like given values."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, defer_build=True)


def _number_only(value: object) -> object:
    """Refuse what pydantic would quietly turn into a number: `true` and quoted digits."""
    if isinstance(value, bool | str):
        raise ValueError(f"expected a number, got {json.dumps(value)}")
    return value


LARGEST = 2**53  # larger integers are not exact in floating point, nor in other people's JSON
_NUMBER = BeforeValidator(_number_only)

Count = Annotated[int, Field(gt=0, le=LARGEST), _NUMBER]
ContextLength = Annotated[int, Field(ge=2, le=LARGEST), _NUMBER]
Whole = Annotated[int, Field(ge=0, le=LARGEST), _NUMBER]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _NUMBER]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), _NUMBER]
Fraction = Annotated[float, Field(ge=0, lt=1), _NUMBER]
Share = Annotated[float, Field(gt=0, le=1), _NUMBER]


def first_problem(error: Exception) -> str:
    """Return the first problem of a file's content in one line, with the key that has it if it is known."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        key = ".".join(str(word) for word in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    return str(error).splitlines()[0]
