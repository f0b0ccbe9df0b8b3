"""Queries and commands of Slurm: the one way from zslurm to squeue, scontrol, scancel, sinfo and sacct."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from zslurm.core.errors import NotFound, SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.slurm import accounting, inventory, jobs
from zslurm.slurm.accounting import StepUsage
from zslurm.slurm.hostlist import compress
from zslurm.slurm.jobs import FIELD_END, JobRecord
from zslurm.slurm.run_command import HIDDEN, UNKNOWN_JOB, SlurmCommands, message_of
from zslurm.slurm.states import JobState, parse_state
from zslurm.slurm.topology import SlurmTopology, parse_topology
from zslurm.slurm.version import NEEDED, Version, is_spur, missing_options, parse_version, test_only_is_safe

# Messages of sacct where the site keeps no accounts.
_NO_ACCOUNTING = ("accounting storage is disabled", "not running a supported accounting_storage plugin")
# Of sbatch --test-only.
_START = re.compile(
    r"Job \d+ to start at (?P<time>\S+) .*?\bon (?:nodes? )?(?P<nodes>\S+)(?: in partition (?P<part>\S+))?"
)

PreemptMode = Literal["requeue", "cancel"]
_REQUEUED_WITHIN = timedelta(minutes=2)
"""Time after its end in which a preempted job may return to the queue."""


@dataclass(frozen=True)
class StartEstimate:
    """Nodes and time; the time is in UTC, and a promise only as far as running jobs end by their limits."""

    time: datetime
    nodes: str
    partition: str | None


class SubmissionEnded(SlurmRefused):
    """The job of a submission that got no answer has ended."""


def parse_estimate(text: str) -> StartEstimate | None:
    """Read the estimate in sbatch's message, which was written with TZ=UTC; None if there is none."""
    match = _START.search(text)
    start = jobs.parse_time(match["time"]) if match else None
    return StartEstimate(start, match["nodes"], match["part"]) if match and start else None


class SlurmClient(SlurmCommands):
    """Everything zslurm asks of Slurm. Times in answers are UTC.

    Every method raises SlurmUnavailable if a command is missing or the controller does not answer after the
    retries, SlurmRefused if Slurm refuses, and NotFound if it does not know a job that is to be changed or
    asked for by `excluded_nodes` and `output_file`; each with Slurm's message in one line.
    """

    _queue_fields: Sequence[str] = jobs.QUEUE_FIELDS
    _version: Version | None = None

    def available(self) -> bool:
        """Return whether Slurm's commands are on this machine. The controller is not asked."""
        return all(self.find(program) for program in ("sbatch", "squeue", "scontrol"))

    def can_control(self) -> bool:
        """Return whether jobs can be asked about and changed from here: compute nodes often have no sbatch."""
        return all(self.find(program) for program in ("squeue", "scontrol"))

    def version(self) -> Version:
        """Return the version of Slurm's commands here. Asks no controller.

        Raises:
            SlurmRefused: squeue names no version that can be read.
        """
        if self._version is None:
            text = self.run("squeue", "--version").stdout
            self._version = parse_version(text)
            if self._version is None:
                raise SlurmRefused(f"squeue --version: no version in `{' '.join(text.split())[:80]}`")
        return self._version

    def why_not_slurm(self) -> str:
        """Return what the commands of another scheduler lack that has Slurm's names for them; empty if nothing.

        Its commands are asked, for later versions have more options.
        """
        try:
            name = " ".join(self.run("squeue", "--version").stdout.split())
        except ZslurmError:  # nothing is known of a wrapper without a version
            return ""
        if not is_spur(name):
            return ""
        lacks = []
        for command in NEEDED:
            answer = self.run(command, "--help")
            if missing := missing_options(command, answer.stdout + answer.stderr):
                lacks.append(f"{command} has no {', '.join(missing)}")
        return f"{name[:80]} is not Slurm, and its {'; its '.join(lacks)}" if lacks else ""

    def estimate_start(self, script: str) -> StartEstimate | None:
        """Return when and where a batch script would start; None if Slurm does not show it. Nothing is submitted.

        Versions of Slurm that the question can crash are not asked.

        Raises:
            SlurmRefused: it would never start; Slurm's reason.
        """
        if not self.can_test():
            return None
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".sh") as file:
            file.write(script)
            file.flush()
            done = self.run("sbatch", "--test-only", file.name)
        return parse_estimate(done.stderr + done.stdout)

    def can_test(self) -> bool:
        """Return whether `sbatch --test-only` is here and safe with this version of Slurm."""
        if self.find("sbatch") is None:
            return False
        try:
            return test_only_is_safe(self.version())
        except ZslurmError:  # no version that can be read, as of a wrapper
            return True

    # --- jobs: asking ---------------------------------------------------------------------------------------

    def queue(self, job_ids: Sequence[str] | None = None, user: str | None = None) -> dict[str, JobRecord]:
        """Return the jobs that the controller remembers, by id, with one squeue call; finished ones for minutes.

        A field that this version of squeue does not know costs one more call, once: it is asked without.

        With `job_ids` only these, of which unknown ones are left out; with `user` only this user's, or those of
        several, with commas between them. A job that Slurm preempts in order to requeue it counts as requeued.

        Raises:
            SlurmUnavailable: squeue succeeds, but says nothing about the jobs, not even that they are unknown.
        """
        if job_ids is not None and not job_ids:
            return {}
        chosen = [] if job_ids is None else [f"--jobs={','.join(job_ids)}"]
        chosen += [] if user is None else [f"--user={user}"]
        records = self._queue(chosen)
        if records is None:
            return {}
        if not records and job_ids is not None and user is None:
            records = self._last_of(job_ids)
        return {job_id: self._if_preempted(record) for job_id, record in records.items()}

    def _last_of(self, job_ids: Sequence[str]) -> dict[str, JobRecord]:
        """Ask about only the last of these jobs: only then does the controller say that a job is unknown.

        If that job is unknown, the controller answers, and its second answer about the others is believed.

        Raises:
            SlurmUnavailable: it does not. An empty answer is no end of a job.
        """
        for attempt in range(self._retries.attempts):
            if attempt:
                time.sleep(self._retries.pause_after(attempt - 1))
            records = self._queue([f"--jobs={job_ids[-1]}"])
            if records is None and len(job_ids) == 1:
                return {}
            if records is None or records:
                return self._queue([f"--jobs={','.join(job_ids)}"]) or records or {}
        raise SlurmUnavailable(f"squeue says nothing about job {job_ids[-1]}, not even that it is unknown")

    def _queue(self, chosen: Sequence[str]) -> dict[str, JobRecord] | None:
        """Call squeue; None if the controller says that the one job is unknown."""
        try:
            answer = self._ask_queue(chosen)
            if unknown := jobs.unknown_fields(answer.stderr):
                self._queue_fields = [name for name in self._queue_fields if name.lower() not in unknown]
                answer = self._ask_queue(chosen)
        except NotFound:  # squeue fails where a single job is asked for, and unknown
            return None
        return jobs.parse_queue(answer.stdout, self._queue_fields)

    def _if_preempted(self, record: JobRecord) -> JobRecord:
        """Return a job as requeued if it was just preempted and Slurm will put it back into the queue."""
        ended = record.end_time
        if record.state is not JobState.PREEMPTED or (ended and datetime.now(UTC) - ended > _REQUEUED_WITHIN):
            return record
        if self.preempt_mode(record) == "cancel" or self._field(record.job_id, "Requeue") == "0":
            return record
        return replace(record, state=JobState.REQUEUED)

    def _ask_queue(self, chosen: Sequence[str]) -> subprocess.CompletedProcess[str]:
        arguments = ["--noheader", "--states=all", f"--Format={jobs.queue_format(self._queue_fields)}"]
        return self.run("squeue", *arguments, *chosen)

    def job(self, job_id: str) -> JobRecord | None:
        """Return one job; what the controller has forgotten comes from accounting if there is any.

        None if unknown.
        """
        if record := self.queue([job_id]).get(job_id):
            return record
        runs = self.history([job_id]).get(job_id)
        return runs[-1] if runs else None

    def job_of_script(self, script: str) -> str | None:
        """Return the id of this user's job whose batch script has this path; None if the controller shows none.

        Raises:
            SubmissionEnded: the job has ended, so that nothing can be adopted.
        """
        fields = ("JobArrayID", "State", "Command")
        arguments = ["--noheader", "--states=all", f"--user={os.getuid()}"]
        answer = self.run("squeue", *arguments, f"--Format={jobs.queue_format(fields)}").stdout
        states_by_job = {
            re.split(r"\D", job["JobArrayID"])[0]: parse_state(job["State"])
            for job in jobs.split_records(answer, fields, "squeue")
            if job["Command"] == script
        }
        # A job that completes so early has ended: nothing requeues it.
        active = [
            key for key, state in states_by_job.items() if not state.is_over and state is not JobState.COMPLETING
        ]
        if states_by_job and not active:
            raise SubmissionEnded(f"its job {next(iter(states_by_job))} ended; submit again")
        return active[0] if active else None

    def history(self, job_ids: Sequence[str]) -> dict[str, list[JobRecord]]:
        """Return every run of the jobs, oldest first: a requeued job has several. Empty without accounting."""
        answer = self._ask_accounting(job_ids, jobs.HISTORY_FORMAT, "--allocations")
        return {} if answer is None else jobs.parse_history(answer)

    def usage(self, job_ids: Sequence[str]) -> list[StepUsage]:
        """Return what the steps of the jobs used, those of earlier runs of a requeued job too.

        It is empty without accounting; a step that is running has no figures yet.
        """
        answer = self._ask_accounting(job_ids, accounting.FORMAT, "--noconvert")
        return [] if answer is None else accounting.parse_usage(answer)

    def _ask_accounting(self, job_ids: Sequence[str], fields: str, *options: str) -> str | None:
        """Return sacct's answer about jobs; None if no job is asked for, or the site has no accounting."""
        if not job_ids or self.find("sacct") is None:
            return None
        arguments = ["--duplicates", "--noheader", "--parsable2", f"--delimiter={FIELD_END}", *options]
        try:
            return self.run("sacct", *arguments, f"--jobs={','.join(job_ids)}", f"--format={fields}").stdout
        except SlurmRefused as error:
            if any(words in str(error) for words in _NO_ACCOUNTING):
                return None
            raise

    def excluded_nodes(self, job_id: str) -> str:
        """Return the nodes that a job must not use, as a hostlist; empty if there are none.

        Raises:
            NotFound: the controller does not know the job.
        """
        arguments = ["--noheader", "--states=all", f"--jobs={job_id}", "--format=%x"]
        answer = self.run("squeue", *arguments).stdout.strip()
        return "" if answer in ("(null)", "n/a") else answer

    def output_file(self, job_id: str) -> str:
        """Return the file that a job's output goes to; empty if it has none.

        Raises:
            NotFound: the controller does not know the job.
        """
        shown = self.run("scontrol", "show", "job", job_id).stdout
        paths = [line.strip().removeprefix("StdOut=") for line in shown.splitlines() if "StdOut=" in line]
        return paths[0] if paths else ""

    def preempted_at(self, job_id: str) -> datetime | None:
        """Since when Slurm preempts a job; None if it does not, or does not know the job or the field."""
        return jobs.parse_time(self._field(job_id, "PreemptTime"))

    def _qos_preempt_modes(self, job_id: str) -> set[str]:
        """Return the PreemptModes of a job's QoS; empty if it has none, or accounting does not show it.

        Since Slurm 24.11 a job may have several (`high,low`), and which of them counts is not shown.
        """
        qos = self._field(job_id, "QOS")
        if qos in ("", "(null)", "N/A") or self.find("sacctmgr") is None:
            return set()
        arguments = ["--noheader", "--parsable2", "show", "qos", f"name={qos}", "format=PreemptMode"]
        return {line.strip() for line in self.run("sacctmgr", *arguments).stdout.splitlines()}

    def preempt_mode(self, record: JobRecord) -> PreemptMode:
        """Return the PreemptMode of a job: of its QoS or its partition, by PreemptType, or the cluster's.

        If that cannot be found out, `requeue`: Slurm refuses it if it does not want it.
        """
        try:
            config = self.scontrol_config()
            mode, kind = config.get("PreemptMode", ""), config.get("PreemptType", "")
            own_modes: set[str] = set()
            if kind.endswith("partition_prio"):
                own_modes = {p.preempt_mode for p in self.partitions() if p.name == record.partition}
            elif kind.endswith("qos"):
                own_modes = self._qos_preempt_modes(record.job_id)
        except ZslurmError:
            return "requeue"
        modes = {mode if own_mode.lower() in ("", "cluster") else own_mode for own_mode in own_modes or {mode}}
        return "cancel" if all("CANCEL" in own_mode.upper() for own_mode in modes) else "requeue"

    def _field(self, job_id: str, name: str) -> str:
        """Return one field of squeue for one job; empty if it knows neither."""
        arguments = ["--noheader", "--states=all", f"--jobs={job_id}", f"--Format={name}:0"]
        try:
            return self.run("squeue", *arguments).stdout.strip()
        except NotFound:
            return ""

    def steps(self, job_id: str) -> dict[str, str]:
        """Return the live Slurm steps of a job: step id (`12.0`, `12.batch`) -> step name."""
        if self.find("scontrol") is None:
            return self._steps_in_queue(job_id)
        # squeue --steps lists none of them if the job has a step manager (enable_stepmgr, since 24.05).
        try:
            answer = self.run("scontrol", "--oneliner", "show", "step", job_id).stdout
        except NotFound:
            return {}
        except SlurmRefused as error:
            if jobs.NO_STEPS.search(str(error)):
                return {}
            raise
        return jobs.parse_steps(answer)

    def _steps_in_queue(self, job_id: str) -> dict[str, str]:
        """As `steps`, on compute nodes that have squeue and no scontrol."""
        fields = ("StepID", "StepName")
        arguments = ["--steps", "--noheader", f"--jobs={job_id}", f"--Format={jobs.queue_format(fields)}"]
        try:
            answer = self.run("squeue", *arguments).stdout
        except NotFound:
            return {}
        steps = jobs.split_records(answer, fields, "squeue")
        return {step["StepID"]: step["StepName"] for step in steps}

    # --- jobs: changing -------------------------------------------------------------------------------------

    def submit(self, script: Path) -> str:
        """Submit a batch script; returns the job id."""
        answer = self.run("sbatch", "--parsable", str(script), repeatable=False).stdout
        return answer.strip().partition(";")[0]

    def cancel(self, job_id: str) -> None:
        """End a job. One that has ended already is fine."""
        self._scancel(job_id)

    def kill_step(self, job_id: str, name: str) -> None:
        """Send SIGKILL to every task of the job's steps of this name; none of that name is fine."""
        for step_id, step_name in self.steps(job_id).items():
            if step_name == name:
                with contextlib.suppress(NotFound):  # it ended meanwhile
                    self._scancel("--signal=KILL", step_id)

    def requeue(self, job_id: str) -> None:
        """Put a batch job back into the queue; it keeps its id and starts from its beginning.

        Raises:
            SlurmUnavailable: it may have been done. A second try would be refused, or bring a cancelled job back.
        """
        self.run("scontrol", "requeue", job_id, repeatable=False)

    def release(self, job_id: str) -> None:
        """Let a held job start.

        Raises:
            SlurmUnavailable: scontrol ends with 0, but the controller took nothing: a dead node of the job ends.
        """
        done = self.run("scontrol", "release", job_id)
        if "Unexpected message received" in done.stderr + done.stdout:
            raise SlurmUnavailable(f"{message_of(done)}; job {job_id} was not released: try again in a minute")

    def start_in(self, job_id: str, seconds: int) -> None:
        """Let a requeued job, once it is PENDING, start after this time in place of Slurm's two minutes.

        Not at once: a node refuses a job that starts again within the second in which its run before ended ("Job
        credential revoked"), and the job FAILS. Add the seconds by which the clocks of the cluster may differ.
        """
        self.update(job_id, StartTime=f"now+{seconds}")

    def update(self, job_id: str, **settings: str) -> None:
        """Change a job's settings by scontrol's names: `update("12", ExcNodeList="node3", Comment="...")`.

        Times are read as UTC.
        """
        changes = [f"{name}={value}" for name, value in settings.items()]
        self.run("scontrol", "update", f"JobId={job_id}", *changes)

    def broadcast(self, job_id: str, source: str, target: str) -> None:
        """Copy a file to the same place on the disk of every node of a job; nodes pass it on to each other."""
        self.run("sbcast", "--force", f"--jobid={job_id}", source, target)

    # --- the cluster ----------------------------------------------------------------------------------------

    def scontrol_config(self) -> dict[str, str]:
        """Slurm's own configuration: setting -> text."""
        return inventory.parse_config(self.run("scontrol", "show", "config").stdout)

    def partitions(self) -> list[inventory.SlurmPartition]:
        """Return the partitions that this user may see."""
        return inventory.parse_partitions(self.run("scontrol", "--oneliner", "show", "partition").stdout)

    def nodes(self) -> list[inventory.Node]:
        """Return the nodes that this user may see."""
        arguments = ["--Node", "--noheader", f"--Format={inventory.NODE_FORMAT}"]
        return inventory.parse_nodes(self.run("sinfo", *arguments).stdout)

    def nodes_if_shown(self) -> list[inventory.Node] | None:
        """Return the nodes that this user may see.

        None if the site shows no nodes to its users (PrivateData=nodes).
        """
        try:
            return self.nodes()
        except SlurmRefused as error:
            if HIDDEN in str(error):
                return None
            raise

    def slurmd_addresses(self, nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Host and port of the slurmd of each of these nodes, as far as Slurm knows them."""
        arguments = ["--Node", "--noheader", f"--nodes={compress(nodes)}", f"--Format={inventory.ADDRESS_FORMAT}"]
        return inventory.parse_addresses(self.run("sinfo", *arguments).stdout)

    def topology(self, name: str | None = None) -> SlurmTopology:
        """Return the topology of this name (partitions have names since 25.05), or the cluster's default one."""
        named = [] if name is None else [name]
        return parse_topology(self.run("scontrol", "show", "topology", *named).stdout)

    def topology_of(self, partition: str | None) -> SlurmTopology:
        """Return the topology of a partition: the one that it names, or else the cluster's default one."""
        named = (
            {partition_info.name: partition_info.topology for partition_info in self.partitions()}
            if partition
            else {}
        )
        return self.topology(named.get(partition or ""))

    def _scancel(self, *arguments: str) -> None:
        # Without --verbose, scancel prints nothing about an unknown job, and ends with 0 in either case.
        result = self.run("scancel", "--verbose", *arguments)
        if UNKNOWN_JOB in result.stderr:
            raise NotFound(message_of(result))
