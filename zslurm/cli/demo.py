"""`zslurm demo`: the main job, end to end, on real text and on this machine only.

It types the commands that a user would type, and shows them: build data, submit, interrupt with Ctrl-C, submit
again, look at the result. What it claims at the end it has read from the run's files.

It trains as many tokens as this machine can train in the time that a demo may take. Measured first are the rate of
forward and backward, on all ranks at once, and what starting Python and torch costs. Fewer tokens are trained in
smaller steps: the loss falls with the number of steps, and the demo shows the same on any machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zslurm.checkpoint_tools.quantities import counted, show_count, show_duration
from zslurm.cli.data_build import describe_summary, make_bundle
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, Exit, NotFound, ZslurmError
from zslurm.core.extras import require
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look
from zslurm.submit.resolve import resolve_run
from zslurm.train.data.build.inspect import unigram_entropy
from zslurm.train.data.build.sources import DEMO_CORPUS_GLOB, demo_corpus_sources
from zslurm.train.data.bundle import Corpus
from zslurm.train.jsonl import read_jsonl

TIME_S = 120.0
"""What the whole demo should take at most: two thirds of the three minutes that it may, for rates vary."""
MOST_TOKENS, FEWEST_TOKENS = 1_000_000, 100_000
LARGE_BATCH, SMALL_BATCH = 16, 8  # sequences in a step
LARGE_FROM = 500_000
"""Tokens that are enough for 122 steps of the large batch. The fewest make 48 steps of the small one."""
_ROUND = 50_000
_STEP_SHARE = 0.75
"""Of a step's time, what forward and backward take; the rest is the optimizer, the ranks' sums and the data."""
_STARTS = 4.0
"""What the demo spends on starting and ending two runs, in starts of one process with torch and a model."""


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        tokens_per_s: of all ranks together, of whole steps.
        start_s: seconds from starting Python to a model that is ready.
    """

    tokens_per_s: float
    start_s: float


def measure(config: Path, ranks: int) -> Machine:
    """Measure this machine with a run's configuration (a resolved config.json), by `train.plan.tokens_per_second`.

    Raises:
        ZslurmError: a measuring process failed.
    """
    started = time.monotonic()
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-P", "-m", "zslurm.train.plan.tokens_per_second", str(config)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(ranks)
    ]
    outputs = [process.communicate() for process in processes]
    took_s = time.monotonic() - started
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise ZslurmError(f"this machine's speed could not be measured: {_reason(process.returncode, errors)}")
    answers = [json.loads(output) for output, _ in outputs]
    rate = sum(answer["tokens_per_s"] for answer in answers)
    return Machine(rate * _STEP_SHARE, max(0.0, took_s - max(answer["seconds"] for answer in answers)))


def _reason(code: int, errors: str) -> str:
    """Return the last line of a traceback without the name of its exception, or the exit code if there is none."""
    lines = errors.strip().splitlines()
    return re.sub(r"^[\w.]+: ", "", lines[-1]) if lines else f"it ended with exit code {code}"


def affordable_tokens(machine: Machine, spent_s: float) -> int:
    """Return how many tokens to train on, so that the demo takes about `TIME_S`, of which `spent_s` are over."""
    left_s = TIME_S - spent_s - _STARTS * machine.start_s
    tokens = int(machine.tokens_per_s * left_s) // _ROUND * _ROUND
    return min(MOST_TOKENS, max(FEWEST_TOKENS, tokens))


def batch_for(tokens: int) -> int:
    """Return the sequences of a step for so many tokens."""
    return LARGE_BATCH if tokens >= LARGE_FROM else SMALL_BATCH


RANKS = 2
VOCAB_SIZE = 4096
LEARNED_BY = 0.3
"""Nats below the unigram entropy at which the model has learned more than frequencies."""
INTERRUPT_AT_SHARE = 0.4
RUN_FILE = """\
# A training run of zslurm. `zslurm config show demo/run.yaml --origin` prints every value and its origin.
extends: zaya1-tiny
run:
  name: demo
  runs_dir: runs
data:
  path: data
slurm:
  ranks_per_node: {ranks}
"""
_MARKER = ".zslurm-demo"


def demo(
    texts: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TEXTS]",
            help="A file or a directory of your texts. [default: Python's standard library]",
        ),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where to work; made again each time.", metavar="DIR")
    ] = Path("demo"),
    tokens: Annotated[
        int | None,
        typer.Option(
            min=FEWEST_TOKENS,
            help="How many tokens to train on. [default: what this machine can do in about two minutes]",
        ),
    ] = None,
) -> None:
    """Train a tiny ZAYA1 on real text, on this machine.

    The text is the Python standard library's sources, or yours; neither Slurm nor a GPU is needed. The demo first
    measures how fast this machine trains, and chooses how many tokens there is time for: at most a million.

    Example: zslurm demo ~/texts
    """
    require("torch")
    started = time.monotonic()
    if texts is not None and not texts.exists():
        raise NotFound(f"{texts}: there is no such file or directory")
    _prepare(directory)
    _build(texts, directory / "data")
    entropy = unigram_entropy(Corpus.open(directory / "data"))
    say(f"unigram entropy of the tokens: {entropy:.3f} nats, the loss of a model that knows only frequencies")

    run_file = directory / "run.yaml"
    run_file.write_text(RUN_FILE.format(ranks=RANKS))
    run = RunDir((directory / "runs" / "demo").absolute())
    size = _size(directory, run_file, tokens, started)
    if not _train(["submit", str(run_file), "--cluster", "local", "--wait", *size], run):
        raise typer.Exit(Exit.FAILED)
    raise typer.Exit(_summary(run, run_file, entropy, time.monotonic() - started))


def _prepare(directory: Path) -> None:
    """Make an empty working directory; only one that an earlier demo made is emptied."""
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARKER).exists():
        raise ConfigError(f"{directory}: exists and was not made by the demo; name another directory with --dir")
    run = RunDir(directory / "runs" / "demo")
    if run.submitted and look(run).active:
        raise ConfigError(f"{directory}: an earlier demo still runs there; `zslurm cancel {run.path}` stops it")
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(parents=True)
        (directory / _MARKER).touch()
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made: {error.strerror}; name another with --dir") from error


def _build(texts: Path | None, out: Path) -> None:
    """Build the bundle of these texts, or of the standard library's sources, shown as a user would type it."""
    whose = "the Python standard library's sources" if texts is None else str(texts)
    say(f"1. Real text: {whose}, tokenized with a BPE that is trained on {'them' if texts is None else 'it'}.")
    sources, glob = (demo_corpus_sources(), DEMO_CORPUS_GLOB) if texts is None else (texts, "*")
    files = ["--glob", glob] if glob != "*" else []
    command = ["data", "build", str(sources), *files, "--vocab-size", str(VOCAB_SIZE), "--out", str(out)]
    say(f"\n$ zslurm {shlex.join(command)}")
    say(describe_summary(make_bundle([sources], out, vocab_size=VOCAB_SIZE, glob=glob)))


def _zslurm(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of zslurm on this terminal, shown as a user would type it."""
    say(f"\n$ zslurm {shlex.join(arguments)}")
    return subprocess.Popen([sys.executable, "-P", "-m", "zslurm", *arguments])


def _interrupt_when_under_way(process: subprocess.Popen[bytes], run: RunDir, share: float) -> None:
    """Press Ctrl-C once `share` of the steps is done."""
    while process.poll() is None:
        state = look(run)
        if state.step and state.total_steps and state.step >= share * state.total_steps:
            say("\n(the demo presses Ctrl-C)")
            process.send_signal(signal.SIGINT)
            process.wait()
            return
        time.sleep(0.3)


def _size(directory: Path, run_file: Path, tokens: int | None, started: float) -> list[str]:
    """Return the options of `submit` for so many tokens, or for as many as there is time for if None."""
    if tokens is None:
        config = directory / "measured.json"
        config.write_text(resolve_run(run_file, cluster="local").spec.model_dump_json())
        machine = measure(config, RANKS)
        tokens = affordable_tokens(machine, time.monotonic() - started)
        say(
            f"\nmeasured: this machine trains about {show_count(machine.tokens_per_s)} tokens/s; "
            f"the demo takes {show_count(tokens)}"
        )
    size = {"tokens": tokens, "global_batch": batch_for(tokens)}
    recipe = {"tokens": MOST_TOKENS, "global_batch": LARGE_BATCH}
    changed = [f"phases[0].{key}={value}" for key, value in size.items() if value != recipe[key]]
    return [word for setting in changed for word in ("--set", setting)]


def _train(arguments: list[str], run: RunDir) -> bool:
    """Submit the run, interrupt it and submit it again; returns whether it completed."""
    say(f"\n2. Train a tiny ZAYA1 on {counted(RANKS, 'rank')}; interrupt it on the way.")
    first = _zslurm(*arguments)
    _interrupt_when_under_way(first, run, INTERRUPT_AT_SHARE)
    if first.returncode == Exit.DONE:
        say("\n(the run completed before it could be interrupted; more --tokens take longer)")
        return True
    if first.returncode != Exit.INTERRUPTED:
        say(f"demo: the run should have been interrupted, but ended with exit code {first.returncode}")
        return False
    say("\n3. Submit the same run again: it continues from the checkpoint.")
    second = _zslurm(*arguments)
    if second.wait() != Exit.DONE:
        say(f"demo: the run did not complete; see `zslurm logs {run.path}`")
        return False
    return True


def _summary(run: RunDir, run_file: Path, entropy: float, seconds: float) -> int:
    steps = [row for row in read_jsonl(run.metrics) if row["kind"] == "step"]
    first = steps[0]["loss"]
    last = statistics.mean(row["loss"] for row in steps[-10:])
    rate = statistics.median(row["tokens_per_s"] for row in steps)
    saved = sorted(path.name for path in run.checkpoints.iterdir())
    attempts = len({row["attempt"] for row in steps})
    learned = last < entropy - LEARNED_BY
    below = f"{entropy - last:.2f} nats below" if learned else "NOT well below"
    print(
        f"\ndemo: {counted(steps[-1]['step'], 'step')} in {counted(attempts, 'attempt')}, "
        f"{show_duration(seconds)} in all"
    )
    print(
        f"  loss         {first:.3f} -> {last:.3f} (mean of the last 10 steps), "
        f"{below} the unigram entropy of {entropy:.3f}"
    )
    print(f"  speed        {show_count(rate)} tokens/s (median step)")
    print(f"  checkpoints  {', '.join(saved)} in {run.checkpoints}")
    print("try next")
    print(f"  zslurm status {run.path}")
    print(f"  zslurm config show {run_file} --cluster local --origin")
    print(f"  zslurm submit {run_file} --cluster local --set run.name=longer --set phases.0.tokens=4e6 --wait")
    return Exit.DONE if learned else Exit.FAILED
