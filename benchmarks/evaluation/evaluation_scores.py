"""`zslurm eval` beside lm-evaluation-harness through transformers: the same task files, weights and threads.

A small model is trained on sums, imports and the standard library, until it is well above chance (kept in the
folder for temporary files), and exported in fp32. Both score the same four tasks from local files; lm_eval (pip
install lm_eval accelerate) has to be installed. Scores are given side by side with their difference in points.
Times are of the model's work with what belongs to it (tokenizing, batches, comparing), not of loading; tokens are
those that the harness gives to the model: of each choice its question and itself. It is processor time on one
thread, which others on the machine hardly change.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import write_result
from benchmarks.evaluation.scored_model import CONTEXT, trained, written_out
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.evaluation.scoring import ModelScorer, PreparedTask
from zslurm.train.evaluation.tasks.task import load_task
from zslurm.train.hub import export, open_weights
from zslurm.train.inference.text import TextCoder

TASKS = {"arithmetic": 80, "python-names": 64, "arithmetic-written": 32, "stdlib-text": 8}
"""With how many of their documents."""
TOKENS = int(os.environ.get("SCORED_TOKENS", "800000"))
TURNS = int(os.environ.get("SCORED_TURNS", "3"))
BATCHES = (16, 64)
_REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def run() -> None:
    """Measure and write results/evaluation_scores.json."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    os.environ["DISABLE_MULTIPROC"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open_weights(trained(TOKENS)) as weights:
            export(weights, folder / "exported", dtype="fp32", tokenizer=weights.tokenizer())
            files, settings = weights.tokenizer(), weights.settings
            model = load_model(weights, dtype=torch.float32)
        assert files is not None and settings.rope_base is not None
        coder = TextCoder.open(files, settings.model.vocab_size, settings.tokens.end, settings.tokens.begin)
        ours = ModelScorer(model, coder, rope_base=settings.rope_base, context=CONTEXT)
        alone = TaskManager(include_defaults=False)  # finding its own tasks takes it minutes
        evaluate = partial(
            simple_evaluate, task_manager=alone, bootstrap_iters=0, log_samples=True, verbosity="ERROR"
        )
        rows = []
        for task, limit in TASKS.items():
            file = written_out(task, folder, limit)
            rows.append(_row(task, file, ours, folder / "exported", evaluate, HFLM))
            print(json.dumps(rows[-1]), flush=True)
    worst = max(abs(each["points"]) for row in rows for each in row["scores"].values())
    write_result(
        "evaluation_scores",
        {
            "versions": {each: importlib.metadata.version(each) for each in ("torch", "transformers", "lm_eval")},
            "threads": torch.get_num_threads(),
            "trained_tokens": TOKENS,
            "largest_difference_in_points": worst,
            "tasks": rows,
        },
    )


def _row(
    task: str, file: Path, ours: ModelScorer, exported: Path, evaluate: Callable[..., Any], lm: Callable[..., Any]
) -> dict[str, Any]:
    prepared = PreparedTask(load_task(str(file)))
    seconds: dict[str, list[float]] = {"zslurm": []}
    result, tokens = None, 0
    theirs: dict[str, Any] = {}
    for _ in range(TURNS):
        started = time.process_time()
        result, _share = ours.score(prepared)
        seconds["zslurm"].append(time.process_time() - started)
        # Its cache of logits takes the wrong ones where one input is cut into context and continuation in several
        # ways (0.4.13), as windows of texts that repeat themselves are.
        rolling = prepared.task.config.output_type == "loglikelihood_rolling"
        for batch in BATCHES:
            model = lm(
                pretrained=str(exported),
                dtype="float32",
                batch_size=batch,
                device="cpu",
                max_length=CONTEXT,
                logits_cache=not rolling,
            )
            spent = _timed(model)
            keys = yaml.safe_load(file.read_text())
            found = evaluate(model=model, tasks=[keys])
            seconds[f"lm_eval, batch {batch}"] = [*seconds.get(f"lm_eval, batch {batch}", []), sum(spent)]
            theirs, tokens = found["results"][task], tokens or _tokens(found["samples"][task], model)
    assert result is not None
    best = {name: sorted(those)[len(those) // 2] for name, those in seconds.items()}
    scores = {}
    for name, value in result.metrics.items():
        other = theirs[name if "," in name else f"{name},none"]
        scores[name] = {"zslurm": value, "lm_eval": other, "points": round(100 * (value - other), 4)}
        if "perplexity" in name or name == "bits_per_byte":
            scores[name]["points"] = round(100 * (value / other - 1), 4)  # percent of the harness's
    return {
        "task": task,
        "documents": result.documents,
        "scores": scores,
        "tokens": tokens,
        "tokens_per_s": {name: round(tokens / value) for name, value in best.items()},
        "times_faster": {
            name: round(value / best["zslurm"], 2) for name, value in best.items() if name != "zslurm"
        },
    }


def _timed(model: Any) -> list[float]:
    """Return a list that grows by the seconds of each kind of request."""
    spent: list[float] = []
    for name in _REQUESTS:
        method = getattr(model, name)

        def timed(*given: Any, method: Callable[..., Any] = method, **settings: Any) -> Any:
            started = time.process_time()
            try:
                return method(*given, **settings)
            finally:
                spent.append(time.process_time() - started)

        setattr(model, name, timed)
    return spent


def _tokens(samples: list[dict[str, Any]], model: Any) -> int:
    """Return the tokens of all requests, and of what was generated."""
    texts = []
    for sample in samples:
        for arguments in (
            sample["arguments"].values() if isinstance(sample["arguments"], dict) else sample["arguments"]
        ):
            given = arguments.values() if isinstance(arguments, dict) else arguments
            texts.append("".join(each for each in given if isinstance(each, str)))
        texts += [each for each in sample["resps"][0] if isinstance(each, str)]
    return sum(len(model.tok_encode(text)) for text in texts)
