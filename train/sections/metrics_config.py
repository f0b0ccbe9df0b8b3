"""The sections `metrics` and `evaluation`: what a run records of itself, and what it is measured by on its way."""

from __future__ import annotations

import re
import shlex
from typing import Literal

from pydantic import Field, model_validator

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.sections.section import Count, Positive, Section, Whole

LONGEST_PROFILE = 32
"""Steps that may be profiled at once: a trace holds every operation of every one of them."""

TrackerMode = Literal["off", "offline", "online"]


class MetricsConfig(Section):
    """What is measured and reported while training."""

    log_every: Count = Field(
        10,
        description="steps between two lines of the log, and between two records of every layer's load; "
        "metrics.jsonl has all else for every step",
    )
    tensorboard: bool = Field(False, description="also write RUN_DIR/tensorboard (needs the tensorboard package)")
    wandb: TrackerMode = Field(
        "off", description="Weights & Biases: `offline` writes RUN_DIR/wandb, for `wandb sync`; `online`, `off`"
    )
    mlflow: TrackerMode = Field(
        "off", description="MLflow: `offline` writes RUN_DIR/mlflow.db; `online` at MLFLOW_TRACKING_URI, `off`"
    )
    trackio: TrackerMode = Field(
        "off", description="trackio: `offline` writes RUN_DIR/trackio; `online` in TRACKIO_SPACE_ID, `off`"
    )
    prometheus: str | None = Field(
        None,
        description="file, or directory of a node exporter's textfile collector on rank 0's node, that gets the "
        "newest numbers in Prometheus' text format",
    )
    project: str = Field(
        "zslurm", min_length=1, description="project or experiment under which trackers show the run"
    )
    profile: str | None = Field(
        None, description="FIRST:LAST steps to profile, e.g. 20:25; rank 0's trace goes to RUN_DIR/profile"
    )
    peak_tflops: Positive | None = Field(
        None,
        description="peak of one device in its format, for MFU; default: from a table of devices, or measured",
    )

    @model_validator(mode="after")
    def _profile_is_a_window(self) -> MetricsConfig:
        if self.profile is None:
            return self
        if not re.fullmatch(r"\d{1,15}:\d{1,15}", self.profile, re.ASCII):
            raise ValueError(f"profile ({self.profile}) must be FIRST:LAST, two numbers of steps")
        first, last = map(int, self.profile.split(":"))
        if first < 1 or last < first:
            raise ValueError(f"profile ({self.profile}) must be FIRST:LAST with 1 <= FIRST <= LAST")
        if (steps := last + 1 - first) > LONGEST_PROFILE:
            steps_in_words = counted(steps, "step")
            raise ValueError(f"profile ({self.profile}) covers {steps_in_words}, more than {LONGEST_PROFILE}")
        return self

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """First and last step to profile, counted from 1."""
        if self.profile is None:
            return None
        first, last = self.profile.split(":")
        return int(first), int(last)


class EvaluationConfig(Section):
    """Validation loss, and commands that evaluate the model."""

    data: str | None = Field(None, description="a token bundle of validation data, or a directory of them")
    every_steps: Whole = Field(
        0, description="optimizer steps between two evaluations on data; 0: only one, at the end"
    )
    sequences: Count = Field(64, description="sequences of validation data that are looked at, the same each time")
    micro_batch: Count | None = Field(None, description="sequences in one forward pass; default: the phase's")
    tasks: tuple[str, ...] = Field(
        (),
        description="tasks of lm-evaluation-harness, by name or as YAML files, on which the model is scored while "
        "it trains (needs the extra `eval`)",
    )
    tasks_every_steps: Whole = Field(
        0, description="optimizer steps between two scorings on tasks; 0: only one, at the end"
    )
    tasks_limit: Count | None = Field(None, description="documents of each task at most; default: all")
    routing: bool = Field(
        True,
        description="count during each evaluation on data which experts tokens of each kind go to, for the "
        "report; compiled layers (parallel.compile) then run as they are",
    )
    command: str | None = Field(
        None,
        description="command to run on an export of the weights in transformers' format; {model}, {step} and "
        "{run} are replaced",
    )
    command_every_steps: Whole = Field(
        0, description="optimizer steps between two such exports, each from a checkpoint of that step; 0: none"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> EvaluationConfig:
        if self.every_steps and self.data is None:
            raise ValueError("every_steps needs data: a token bundle of validation data")
        if self.tasks_every_steps and not self.tasks:
            raise ValueError("tasks_every_steps needs tasks: names of tasks, or task files")
        if bool(self.command_every_steps) != (self.command is not None):
            raise ValueError("command and command_every_steps need each other")
        if self.command is not None:
            try:
                words = shlex.split(self.command)
            except ValueError as error:
                raise ValueError(f"command ({self.command}): {error}") from error
            if not words:
                raise ValueError("command is empty")
        return self
