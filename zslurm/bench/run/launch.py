"""Run a benchmark: start the nodes, follow what they report, and keep what was measured, whatever happens.

Here the nodes are one process of this machine, on a cluster the tasks of one srun; everything after that is the
same. A node that sends no heartbeat for `LOST_AFTER_S` is lost: the benchmark ends there, with what was measured.
So do Ctrl-C, a rank that fails, and the end of the job.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from zslurm.bench.result import BenchResult, ResultWriter, Skipped
from zslurm.bench.results.findings import add_findings
from zslurm.bench.run.following import Following
from zslurm.bench.run.messages import (
    BEAT_S,
    Address,
    Failed,
    FromRank,
    Here,
    MeasurementEnded,
    MeasurementStart,
    MessageOfNode,
    NoTimeLeft,
    Planned,
    PointDone,
    PointMeasured,
    Task,
)
from zslurm.bench.run.nodes import named_nodes, srun_options
from zslurm.bench.run.request import BenchProgress, BenchRequest
from zslurm.bench.run.work_directory import PREFIX, WorkDirectory
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rccl.environment import variables_of
from zslurm.cluster.site import Site
from zslurm.core.errors import ConfigError, SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.job.preparation.code_copy import copy_package
from zslurm.job.preparation.container import interpreter_inside
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import own_job_id
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.on_nodes.node_tasks import NodeTasks, start_here, start_on_nodes
from zslurm.slurm.on_nodes.run_on_nodes import queued_job
from zslurm.slurm.on_nodes.srun_output import failed_nodes
from zslurm.slurm.run_command import controller_was_away

_LOG = logging.getLogger(__name__)

JOB_PREFIX = "zslurm-bench-"
_NODE = "zslurm.bench.run.node"
_CPU_RANKS = 2
_QUEUE_REPORTED_EVERY_S = 30.0


class _Ended(Exception):
    """The benchmark is over before its time; the message is the reason."""


@dataclass
class _Node:
    """A node as it is known from its messages."""

    name: str
    index: int
    gpus: int
    heard: float = field(default_factory=time.monotonic)


class _Run:
    """One benchmark under way."""

    def __init__(self, request: BenchRequest, site: Site, writer: ResultWriter, progress: BenchProgress) -> None:
        self.request, self.site, self.writer, self.progress = request, site, writer, progress
        self.result: BenchResult | None = None
        self.nodes: dict[str, _Node] = {}
        self.began = time.monotonic()
        self.lost: list[str] = []
        self.work: WorkDirectory | None = None
        self.number = 0  # of the start of the ranks
        self.order: list[tuple[int, int]] = []  # of the rows: start, and number of the point in the plan

    def run(self) -> BenchResult:
        """Measure under every environment; what was measured is kept.

        Raises:
            ZslurmError: nothing was measured; the reason.
            KeyboardInterrupt: Ctrl-C, before anything was measured.
        """
        try:
            tasks = self._start()
        except ZslurmError:
            self.writer.discard()
            raise
        ended: BaseException | None = None
        try:
            self.following = Following(tasks)
            self.tasks = tasks
            self._wait_for_nodes()
            for number, environ in enumerate(self.request.environments):
                self._measure(number, environ)
            if self.result is not None:
                self.result.complete = True
        except (_Ended, KeyboardInterrupt) as error:
            ended = error
        except ZslurmError as error:
            if self.result is None or not self.result.rows:
                self.writer.discard()
                raise
            ended = error
        finally:
            self._end(tasks)
        if self.result is None or not self.result.rows:
            self.writer.discard()
            if isinstance(ended, KeyboardInterrupt):
                raise ended
            if ended is not None:
                raise ZslurmError(f"nothing was measured: {ended}")
        assert self.result is not None
        self.result.seconds = round(time.monotonic() - self.began, 1)
        if ended is not None:
            reason = "stopped by Ctrl-C" if isinstance(ended, KeyboardInterrupt) else str(ended)
            self.result.notes.append(f"not complete: {reason}")
            self.result.lost_nodes = self.lost
        in_order = sorted(zip(self.order, self.result.rows, strict=True), key=lambda indexed_row: indexed_row[0])
        self.result.rows = [row for _, row in in_order]
        add_findings(self.result)
        self.writer.finish(self.result)
        return self.result

    def _start(self) -> NodeTasks:
        request, site = self.request, self.site
        environ = {**os.environ, **variables_of(site.cluster)}
        if site.cluster.interface:
            environ["ZSLURM_INTERFACE"] = site.cluster.interface
        python = self._python(environ)
        if not request.on_cluster:
            return start_here(_NODE, python.environ, python.command)
        inside = own_job_id()
        return start_on_nodes(
            _NODE,
            nodes=named_nodes(request, site) if inside is None else expand(request.nodelist or ""),
            count=request.nodes,
            options=[*srun_options(request, site, inside=inside is not None), *python.srun_options],
            job_id=inside,
            setup=site.cluster.setup,
            environ=python.environ,
            prefix=JOB_PREFIX,
            python=python.command,
        )

    def _python(self, environ: Mapping[str, str]) -> Interpreter:
        """Return the Python that measures: inside the container of the cluster's runs, if it has one."""
        container = self.site.cluster.container
        if container is None:
            return Interpreter.own(environ)
        self.work = WorkDirectory(self.writer.path.resolve().parent / f"{PREFIX}{secrets.token_hex(4)}")
        if container.packages == "host":
            copy_package(self.work.path)
        named = [Path(value) for value in self.request.options.values() if isinstance(value, str) and "/" in value]
        directories = [path if path.is_dir() else path.parent for path in named]
        return interpreter_inside(container, environ, self.work.path, [self.work.path, *directories])

    def _end(self, tasks: NodeTasks) -> None:
        """End the nodes' tasks: they end with their stdin, and are not waited for long."""
        with suppress(OSError):
            tasks.process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + (0.0 if self.lost else 5.0)
        while tasks.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        tasks.end()
        if self.work is not None:
            self.work.remove()

    def _send(self, message: MeasurementStart | Address) -> None:
        assert self.tasks.process.stdin is not None
        try:
            self.tasks.process.stdin.write(message.model_dump_json() + "\n")
        except OSError:
            raise _Ended(self._why_over()) from None

    def _next(self) -> tuple[_Node, MessageOfNode] | None:
        """Return the next message of a node that is up; notices those that are lost.

        Raises:
            _Ended: nodes are lost, or all tasks have ended.
        """
        message = self.following.next()
        if message is None:
            if self.following.over:
                raise _Ended(self._why_over())
        elif node := self.nodes.get(message[0]):
            node.heard = time.monotonic()
            return node, message[1]
        self._look_for_lost()
        return None

    def _look_for_lost(self) -> None:
        now = time.monotonic()
        declared = failed_nodes(self.following.error_text)
        self.lost = [
            node.name
            for node in self.nodes.values()
            if node.name in declared or now - node.heard > self.request.lost_after_s
        ]
        if self.lost:
            what = "does not answer" if len(self.lost) == 1 else "do not answer"
            raise _Ended(f"{counted(len(self.lost), 'node')} lost: {compress(self.lost)} {what} any more")

    def _why_over(self) -> str:
        text = [line.strip() for line in self.following.error_text.splitlines() if line.strip()]
        errors = [line for line in text if "error:" in line] or text[-1:]
        return f"the job ended: {errors[0]}" if errors else "the job ended"

    def _wait_for_nodes(self) -> None:
        """Wait until all nodes are up; while the job waits in the queue, report why."""
        report_at, first = time.monotonic() + 2.0, 0.0
        expected_nodes: list[str] = []
        while not expected_nodes or len(self.nodes) < len(expected_nodes):
            message = self.following.next()
            if self.following.over:
                self._refuse()
            if message is not None and isinstance(greeting := message[1], Here):
                name = message[0]
                expected_nodes, first = greeting.nodes, first or time.monotonic()
                self.nodes[name] = _Node(name, greeting.index, greeting.gpus)
            if first and time.monotonic() - first > self.request.lost_after_s + 40:
                self.lost = [name for name in expected_nodes if name not in self.nodes]
                raise _Ended(f"{counted(len(self.lost), 'node')} did not start: {compress(self.lost)}")
            if not first and time.monotonic() > report_at and self.request.on_cluster:
                report_at = time.monotonic() + _QUEUE_REPORTED_EVERY_S
                self._report_queue()
        for node in self.nodes.values():
            node.heard = time.monotonic()

    def _refuse(self) -> None:
        text = self._why_over()
        if controller_was_away(text):
            raise SlurmUnavailable(f"srun: the Slurm controller does not answer: {text}")
        raise SlurmRefused(f"the nodes could not be started: {text}")

    def _report_queue(self) -> None:
        job_id = queued_job(list(self.following.errors))
        if job_id is None:
            return
        try:
            job = SlurmClient().queue([job_id]).get(job_id)
        except (SlurmUnavailable, SlurmRefused):
            job = None
        reason = job.reason if job and job.reason else "no reason yet"
        _LOG.info("job %s waits in the queue (%s); Ctrl-C cancels it", job_id, reason)

    def _measure(self, number: int, environ: Mapping[str, str]) -> None:
        """Start the ranks and follow them to their end."""
        request, self.number = self.request, number
        nodes = sorted(self.nodes.values(), key=lambda node: node.index)
        gpus = min(node.gpus for node in nodes)
        minutes, runs = request.minutes, len(request.environments)
        task = Task(
            benchmark=request.benchmark,
            options=request.options,
            cluster=self.site.cluster.name,
            nodes=[node.name for node in nodes],
            ranks_per_node=request.ranks or gpus or _CPU_RANKS,
            number=number,
            environ=dict(environ),
            seconds=None if minutes is None else 60 * minutes / runs,
        )
        self._send(MeasurementStart(task=task))
        points, done, spent, expected, planned = 0, 0, 0.0, 0.0, 0.0
        failure: str | None = None
        failed_at = math.inf
        while True:
            # Ranks fail because of a rank, or because of a node that is lost: then its heartbeat shows it first.
            if all(node.heard > failed_at + 2 * BEAT_S for node in nodes):
                raise _Ended(failure or "a rank ended")
            if (node_message := self._next()) is None:
                continue
            node, reported = node_message
            if not isinstance(reported, FromRank | MeasurementEnded) or reported.start != number:
                continue
            message = reported.message if isinstance(reported, FromRank) else reported
            if isinstance(message, Address):
                self._send(message)
            elif isinstance(message, Planned):
                points, planned = message.points, message.seconds
                self._begin(message)
                if number == 0:
                    self.progress.planned(points * runs, planned * runs)
            elif isinstance(message, PointMeasured | NoTimeLeft):
                done, expected = done + 1, expected + message.expected
                spent += message.seconds if isinstance(message, PointMeasured) else 0.0
                self._keep(message, environ)
                # The estimate is corrected by how long the points so far took, more of them the more there are.
                factor = (spent + 5.0) / (expected + 5.0)
                remaining = (runs - number) * planned - expected
                self.progress.advanced(number * points + done, runs * points, max(0.0, remaining) * factor)
            elif isinstance(message, PointDone):
                return
            elif isinstance(message, Failed) and message.refused:
                raise ConfigError(message.why)
            elif isinstance(message, Failed) or message.code:
                failed_at = min(failed_at, time.monotonic())
                failure = failure or f"rank {reported.rank} on {node.name} failed: {_why(message)}"

    def _begin(self, planned: Planned) -> None:
        if self.result is not None:  # of another environment: the same machine
            return
        versions = planned.versions
        if self.request.on_cluster:
            with suppress(SlurmUnavailable, SlurmRefused):
                versions["slurm"] = str(SlurmClient().version())
        self.result = BenchResult(
            benchmark=self.request.benchmark,
            command=list(self.request.command),
            machine=planned.machine,
            versions=versions,
            environment=planned.environment,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            options=self.request.options,
            skipped=planned.skipped,
        )
        gpus = max(node.gpus for node in self.nodes.values())
        if self.result.machine.device == "cpu" and self.request.benchmark != "storage":
            why = f"torch sees none of the {counted(gpus, 'GPU')} of a node" if gpus else "no GPU is there"
            self.result.notes.append(f"{why}: this was measured on CPUs")
        self.writer.begin(self.result)

    def _keep(self, message: PointMeasured | NoTimeLeft, environ: Mapping[str, str]) -> None:
        assert self.result is not None
        if isinstance(message, NoTimeLeft):
            self.result.skipped.append(Skipped(point=message.point, reason=message.reason))
            return
        for row in message.rows:
            if environ:
                row["environment"] = " ".join(f"{name}={value}" for name, value in environ.items())
            self.result.rows.append(row)
            self.order.append((self.number, message.index))
            self.writer.add(row)


def _why(message: Failed | MeasurementEnded) -> str:
    if isinstance(message, Failed):
        return message.why
    lines = [line for line in message.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it ended with {message.code}"


def launch(request: BenchRequest, site: Site, writer: ResultWriter, progress: BenchProgress) -> BenchResult:
    """Run a benchmark, and return its result, which is written; it is not complete if something went wrong.

    Raises:
        ConfigError, NotFound: the nodes that were asked for do not exist.
        SlurmUnavailable, SlurmRefused: no node could be started.
        ZslurmError: nothing was measured; the reason.
        KeyboardInterrupt: Ctrl-C, before anything was measured.
    """
    if request.on_cluster and site.cluster.launcher == "local":
        raise ConfigError("--nodes: the profile `local` is this machine; name a cluster's with --cluster")
    return _Run(request, site, writer, progress).run()
