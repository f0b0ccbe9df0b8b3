"""What measures, shows and judges the training, and changes nothing in it: one object for the loop to call.

    with Instruments(...) as instruments:
        for each step:
            instruments.clock.enter(Part.FORWARD) ...      where the time goes
            instruments.step_done(step, here, result)      metrics, the log, the profiler, the garbage collector
    instruments.finish(...)                                when the other ranks have left

All ranks make one and call it alike; metrics, profile and evaluation.command are rank 0's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from zslurm.train.config import TrainConfig
from zslurm.train.data.sampler import rank_microbatches
from zslurm.train.evaluation.command import EvaluationCommand
from zslurm.train.parallel.world import World
from zslurm.train.schedule import Position
from zslurm.train.telemetry.gc_control import GarbageControl
from zslurm.train.telemetry.metrics import (
    MetricsWriter,
    describe_step,
    load_by_layer,
    memory_metrics,
    routing_metrics,
)
from zslurm.train.telemetry.profiler import ProfileWindow
from zslurm.train.telemetry.tensorboard import TensorBoard
from zslurm.train.telemetry.throughput import Speed
from zslurm.train.telemetry.timing import OWN_PARTS, StepClock


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Attributes:
        loss: mean cross-entropy of the step's targets, in nats.
        z_loss: mean z-loss of the step's targets, with its weight; 0 without one.
        grad_norm: global norm of the gradient, before clipping.
        counts_LC: choices of each router class in each layer.
        stop: some rank was asked to stop.
        taken: the weights were updated; false where the step was skipped.
    """

    loss: float
    z_loss: float
    grad_norm: float
    counts_LC: Tensor
    stop: bool
    taken: bool


class Instruments:
    """The instruments of one rank.

    Attributes:
        clock: where the time of a step goes.
        metrics: writes metrics.jsonl; None on all ranks but the first.
        command: evaluation.command; None without one, and on all ranks but the first.
        pace_ns: this rank's own work per microbatch, summed over the steps so far (train/progress.py).
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        world: World,
        *,
        attempt: int,
        done: int,
        total_steps: int,
        say: Callable[[str], None],
    ) -> None:
        """Open the files and measure the device; all ranks together.

        Args:
            run_dir: the run.
            config: its configuration.
            world: who takes part.
            attempt: number of this start.
            done: steps that a checkpoint brought along.
            total_steps: steps of the whole run.
            say: prints a line in the run's log.
        """
        self._config, self._world, self._total_steps, self._say = config, world, total_steps, say
        self._speed = Speed(config, world, say)
        self._garbage = GarbageControl(config.metrics.gc_every)
        self._profile = ProfileWindow(
            config.metrics.profile_steps if world.is_first else None,
            done=done,
            directory=run_dir / "profile",
            device=world.device,
            say=say,
        )
        self.metrics: MetricsWriter | None = None
        self.command: EvaluationCommand | None = None
        if world.is_first:
            board = None
            if config.metrics.tensorboard:
                board = TensorBoard(run_dir / "tensorboard", first_step=done + 1, attempt=attempt)
            self.metrics = MetricsWriter(run_dir / "metrics.jsonl", attempt, board)
            if config.evaluation.command is not None:
                self.command = EvaluationCommand(
                    run_dir,
                    config.run.name,
                    config.evaluation.command,
                    keep=config.evaluation.keep_exports,
                    write=self.metrics.write,
                    say=say,
                )
        self.clock = StepClock(world.device)
        self.pace_ns = 0

    def __enter__(self) -> Instruments:
        with contextlib.ExitStack() as opening:
            opening.enter_context(self._garbage)
            opening.enter_context(self._profile)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def step_done(self, step: int, here: Position, result: StepResult) -> None:
        """The step is done (`step` counts it): write it down and let the other instruments know."""
        split = self.clock.end_step()
        mine = len(rank_microbatches(here.microbatches, self._world.rank, self._world.size))
        self.pace_ns += round(1e9 * sum(split[part] for part in OWN_PARTS) / max(1, mine))
        if self.metrics is not None and result.taken:
            seconds = sum(split.values())
            routing = routing_metrics(result.counts_LC, self._config.model.skip_expert)
            in_detail = step % self._config.metrics.log_every == 0
            row = {
                "step": step,
                "tokens": here.tokens_before + here.step_tokens,
                "phase": here.phase.name,
                "loss": result.loss,
                **({"z_loss": result.z_loss} if self._config.optim.z_loss else {}),
                "lr": here.lr,
                "grad_norm": result.grad_norm,
                **self._speed.of(here, seconds, routing["skip_share"]),
                "step_time_s": seconds,
                "time_split_s": {str(part): part_seconds for part, part_seconds in split.items()},
                **memory_metrics(self._world.device),
                **routing,
                **(load_by_layer(result.counts_LC, self._config.model.skip_expert) if in_detail else {}),
            }
            self.metrics.write("step", **row)
            if in_detail or step == 1:
                self._say(describe_step(row, self._total_steps))
        if self.command is not None:
            self.command.poll()
        self._profile.after_step()
        self._garbage.after_step(step)

    def finish(self, *, give_up: Callable[[], bool]) -> None:
        """The run has ended and the other ranks may have left: wait for evaluation.command, close the files.

        Args:
            give_up: true when the command is to be killed instead of waited for; asked again and again.
        """
        if self.command is not None:
            self.command.wait(give_up)
        if self.metrics is not None:
            self.metrics.close()
