"""All that a run evaluates between two steps, on the weights that it trains: validation loss, and tasks.

Both are due by their own numbers of steps. Which checkpoint is the best is decided by one of them
(checkpoint.best_by); it goes into each checkpoint's cursor, and comes back from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zslurm.train.config import TrainConfig
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.evaluation.evaluate import Best, Evaluator, better
from zslurm.train.evaluation.scores import TaskResult, as_metrics
from zslurm.train.model.zaya import Zaya
from zslurm.train.parallel.world import World
from zslurm.train.schedule import due
from zslurm.train.sections.phases import PhaseConfig

if TYPE_CHECKING:
    from zslurm.train.evaluation.harness import HarnessTask
    from zslurm.train.inference.text import TextCoder


class EvaluationRecord(NamedTuple):
    """What was evaluated: a line of metrics.jsonl, and one of the log, if there is one."""

    kind: str
    fields: dict[str, Any]
    line: str = ""


class TaskEvaluator:
    """Scores a run's model on evaluation.tasks, on all ranks; the first one has the tasks."""

    def __init__(self, config: TrainConfig, tokenizer_sha256: str, world: World) -> None:
        """Read the tokenizer of the run's data, and on the first rank the tasks.

        Raises:
            ConfigError, DataError: a task is wrong, or cannot be loaded here.
            HubError: the tokenizer is not next to the data.
        """
        from zslurm.train.evaluation.run_tasks import load_run_tasks
        from zslurm.train.hub.run_facts import tokenizer_of_data
        from zslurm.train.inference.text import TextCoder

        self._best_by = config.checkpoint.best_by
        self._load = partial(load_run_tasks, config.evaluation, self._best_by)
        self._tasks: list[HarnessTask] = self._load() if world.is_first else []
        files = tokenizer_of_data(config.data, tokenizer_sha256)
        self._coder: TextCoder = TextCoder.open(files, config.model.vocab_size)
        self._config = config.evaluation
        self.last: Best | None = None

    def is_due(self, step: int, *, last: bool, stop: bool) -> bool:
        """Return whether to score after `step`; as `Evaluator.is_due`."""
        return last or (due(self._config.tasks_every_steps, step) and not stop)

    def evaluate(
        self, step: int, model: Zaya, phase: PhaseConfig, world: World, alive: Callable[[], None]
    ) -> EvaluationRecord:
        """Score the model; all ranks together.

        Raises:
            DataError: a question cannot be asked, such as one that does not fit the context of the phase.
        """
        from zslurm.train.evaluation.on_group import score_on_group
        from zslurm.train.evaluation.scoring import Ask, ModelScorer

        def score(ask: Ask) -> tuple[list[TaskResult], int]:
            """Score all tasks, on the first rank."""
            from zslurm.train.evaluation.harness import score
            from zslurm.train.evaluation.text_model import TextModel

            self._tasks = self._tasks or self._load()  # another rank may be the first since a recovery in memory
            texts = TextModel(self._coder, phase.context, ask)
            scored = [score(task, texts, limit=self._config.tasks_limit)[0] for task in self._tasks]
            return [result for results in scored for result in results], texts.tokens

        started = time.monotonic()
        scorer = ModelScorer(model, self._coder, rope_base=phase.rope_base, context=phase.context, alive=alive)
        with model.without_graphs():  # inputs of many lengths: each would be a graph
            results, tokens = score_on_group(world, scorer, score)
        for result in results:
            for name, value in result.metrics.items():
                if f"{result.task}/{name}" == self._best_by:
                    signed = -value if result.higher_is_better[name] else value
                    self.last = Best(step, signed, phase.context, self._best_by)
        fields = as_metrics(results) | {"tokens": tokens, "seconds": time.monotonic() - started}
        scores = ", ".join(f"{name} {value:.4f}" for name, value in fields["scores"].items())
        return EvaluationRecord("tasks", fields, f"step {step} {scores} ({fields['seconds']:.2f} s)")


class Evaluations:
    """What a run evaluates, and which of its checkpoints is the best.

    Attributes:
        best: the best checkpoint so far.
    """

    def __init__(self, run_dir: Path, loss: Evaluator, tasks: TaskEvaluator | None, best_by: str) -> None:
        """Evaluate these; use `open`."""
        self._run_dir, self._loss, self._tasks, self._best_by = run_dir, loss, tasks, best_by
        self.best: Best | None = None

    @classmethod
    def open(cls, run_dir: Path, config: TrainConfig, tokenizer_sha256: str, world: World) -> Evaluations:
        """Open evaluation.data and evaluation.tasks of a run, whose data was made with that tokenizer.

        Raises:
            ConfigError, DataError, HubError: one of them is wrong.
        """
        tasks = TaskEvaluator(config, tokenizer_sha256, world) if config.evaluation.tasks else None
        return cls(run_dir, Evaluator.open(config, tokenizer_sha256), tasks, config.checkpoint.best_by)

    def is_due(self, step: int, *, last: bool, stop: bool) -> bool:
        """Return whether to evaluate anything after `step`."""
        other_evaluations = self._loss if self._tasks is None else self._tasks
        return self._loss.is_due(step, last=last, stop=stop) or other_evaluations.is_due(
            step, last=last, stop=stop
        )

    def evaluate(
        self,
        step: int,
        model: Zaya,
        phase: PhaseConfig,
        world: World,
        alive: Callable[[], None],
        context: ContextParallel | None = None,
        *,
        last: bool = True,
    ) -> Iterator[EvaluationRecord]:
        """Evaluate what is due after `step`; all ranks together. See `Evaluator.evaluate` for the arguments.

        Raises:
            DataError: see `Evaluator.evaluate` and `TaskEvaluator.evaluate`.
        """
        if self._loss.is_due(step, last=last, stop=False):
            result = self._loss.evaluate(step, model, phase, world, alive, context)
            line = f"step {step} validation loss {result.loss:.4f} ({result.seconds:.2f} s)"
            yield EvaluationRecord("evaluation", result.fields(), line)
            if (routing := self._loss.routing) is not None:
                yield EvaluationRecord("routing", routing.summary())
                if world.is_first:
                    routing.write(self._run_dir, step, phase.name)
        if self._tasks is not None and self._tasks.is_due(step, last=last, stop=False):
            yield self._tasks.evaluate(step, model, phase, world, alive)

    def will_save(self, step: int) -> Best | None:
        """Return the best checkpoint, including the one of `step`, which is about to be made."""
        source = self._loss if self._best_by == "loss" else self._tasks
        if source is not None and source.last is not None and source.last.step == step:
            self.best = better(source.last, self.best)
        return self.best
