"""The section `trainer` of a run: another program than zslurm's own trainer, and how it is watched.

Only the command is required. What a program does not show (progress, checkpoints), Aegis does without.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from zslurm.config.python_call import python_call
from zslurm.config.text import as_word, one_line
from zslurm.train.sections.section import Count, Positive, Section

PLACEHOLDERS = (
    "nodes",
    "node_rank",
    "ranks_per_node",
    "world_size",
    "rank",
    "local_rank",
    "master_addr",
    "master_port",
    "run_dir",
    "output_dir",
    "attempt",
)
"""What `{...}` in a word of the command may name; other braces stay as they are."""


def _is_pattern(value: str) -> str:
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from error
    if "step" not in pattern.groupindex:
        raise ValueError("needs a group (?P<step>...) that matches the number of the step")
    return value


def _as_typed(value: object) -> object:
    """Take numbers and switches as words: `--lr 1e-3` is written without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, int | float) else value


Word = Annotated[str, BeforeValidator(as_word), AfterValidator(one_line)]
Argument = Annotated[str, BeforeValidator(_as_typed), AfterValidator(one_line)]
StepPattern = Annotated[str, AfterValidator(_is_pattern)]
VariableName = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]


class ProgressSource(Section):
    """The sources of a program's progress, in addition to `zslurm.progress.step`."""

    pattern: StepPattern | None = Field(
        None,
        description="regular expression for the lines of the log that show a finished step: a group named "
        "step, and groups of further figures by name (loss, lr, grad_norm, tokens_per_s)",
    )
    grows: Word | None = Field(
        None,
        description="`log` or a file: its growth is a sign of life, if steps are not shown; after "
        "aegis.hang.step_s without it the run counts as hanging",
    )
    rank: Annotated[int, Field(ge=-1)] = Field(
        0, description="rank whose log is read for both, and whose steps `zslurm status` shows; -1: the last"
    )


class TrainerSection(Section):
    """A program that trains in the place of zslurm's own trainer."""

    command: Annotated[tuple[Argument, ...], Field(min_length=1)] = Field(
        description="the program and its arguments, one word each; "
        + ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        + " are replaced"
    )
    launcher: Literal["rank", "node"] = Field(
        "rank",
        description="rank: zslurm starts the command once for each rank; node: once on each node, and it starts "
        "its own processes (torchrun, accelerate)",
    )
    directory: Word = Field(".", description="its working directory; default: where you submit")
    env: dict[VariableName, Argument] = Field(
        default_factory=dict, description="environment variables for it, with the same replacements"
    )
    progress: ProgressSource = Field(ProgressSource(), description="where its progress is read")
    warm: bool = Field(
        False,
        description="keep a process for each rank that has imported the program's modules, so that after a "
        "fault the ranks start sooner; for Python programs that zslurm starts once for each rank. It takes the "
        "host memory of the modules a second time",
    )
    steps: Count | None = Field(None, description="steps of the whole run, for the time that is left")
    checkpoints: Word | None = Field(
        None,
        description="pattern of the paths of complete checkpoints, e.g. out/checkpoint-*/trainer_state.json; "
        "{run_dir} and {output_dir} are replaced; the last number in a path is its step. A new one counts as "
        "progress when failures are counted",
    )
    stop_signal: Literal["TERM", "INT", "USR1", "USR2", "HUP"] = Field(
        "TERM", description="signal that asks it to save and stop"
    )
    stop_s: Positive = Field(60.0, description="seconds that it gets to do so, before it is killed")

    @model_validator(mode="after")
    def _warm_is_python(self) -> TrainerSection:
        if self.warm and self.launcher == "node":
            raise ValueError("warm: needs launcher: rank; what the command starts itself would not be warm")
        if self.warm and python_call(self.command) is None:
            raise ValueError(
                "warm: needs a command of the form `python [options] script.py ...` or `python -m module ...`"
            )
        return self
