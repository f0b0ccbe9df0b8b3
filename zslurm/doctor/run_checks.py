"""All checks: those on this machine, and the same question to all nodes at once, as one short job."""

from __future__ import annotations

import getpass
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from zslurm.cluster.profile import LOCAL
from zslurm.cluster.site import Site, load_site
from zslurm.core.errors import NoProfile, SlurmRefused, SlurmUnavailable
from zslurm.doctor.ask import ask
from zslurm.doctor.check import Check, CheckOutcome, NodeData, Status, failed, merged
from zslurm.doctor.checks.page_cache import page_cache
from zslurm.doctor.checks.storage import TOKEN
from zslurm.doctor.node import run_checks
from zslurm.doctor.node_differences import inconsistent_nodes, unlike_here
from zslurm.doctor.nodes import Chosen, choose
from zslurm.doctor.report import LOGIN, DoctorReport
from zslurm.doctor.stored import stored_sizes
from zslurm.hardware.node_sources import NodeTask, Sources, Stored
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import job_nodes, own_job_id
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer

_LOG = logging.getLogger(__name__)

STATE, ANSWER = "state", "answer"
"""Names of results that no check gives: Slurm's view of a node, and whether the node answers at all."""


@dataclass(frozen=True)
class Wanted:
    """What a user asked for.

    Attributes:
        checks: to run.
        count: nodes of Slurm's choice.
        nodelist: exactly these.
        directory: where the runs are.
        paths: further directories.
        timeout_s: for the nodes, their wait in the queue included.
    """

    checks: Sequence[Check]
    count: int | None = None
    nodelist: str | None = None
    directory: Path = Path("runs")
    paths: tuple[Path, ...] = ()
    timeout_s: float = 300.0


def site_to_check(name: str | None) -> Site:
    """Return the named profile, the default one, or this machine's if it has neither profile nor Slurm.

    Raises:
        ConfigError: it is not valid.
        NotFound: there is none of this name.
        NoProfile: there is a Slurm, but no profile of it yet.
    """
    try:
        return load_site(name)
    except NoProfile:
        if name is not None or SlurmClient().available():
            raise
        return load_site(LOCAL)


def run_doctor(site: Site, wanted: Wanted) -> DoctorReport:
    """Check this machine, and the nodes if the profile has Slurm; what it waits for is logged.

    Raises:
        ConfigError, NotFound: the nodes that were asked for do not exist.
    """
    began = time.monotonic()
    report = DoctorReport(site.cluster.name, wanted.checks)
    if site.cluster.launcher == "local":
        _check_here(site, wanted, report)
    else:
        _check_cluster(site, wanted, report)
    report.took_s = time.monotonic() - began
    return report


def _check_here(site: Site, wanted: Wanted, report: DoctorReport) -> None:
    """Check this machine only, as login node and compute node at once."""
    with _probe(wanted.directory) as (probe, token):
        task = _task(site, wanted, probe, token)
        for name, outcome in run_checks(wanted.checks, Sources(task)).items():
            report.add(name, {LOGIN: outcome})


def _check_cluster(site: Site, wanted: Wanted, report: DoctorReport) -> None:
    client = SlurmClient()
    with _probe(wanted.directory) as (probe, token):
        task = _task(site, wanted, probe, token)
        try:
            inside = _own_job(wanted)
            chosen = inside or choose(
                client.nodes(), partition=site.slurm.partition, count=wanted.count, nodelist=wanted.nodelist
            )
            task = replace(task, peers=chosen.names, jobs=_active_jobs(client))
        except (SlurmUnavailable, SlurmRefused) as error:
            report.slurm_error = str(error)
            inside, chosen = None, Chosen()
        if not chosen.any and wanted.nodelist is None and report.slurm_error is None:
            _LOG.info("no node of the partition is idle; name some with --nodelist to wait for them")
        on_login = [check for check in wanted.checks if check.runs_on("login")]
        with ThreadPoolExecutor(1) as executor:
            login = executor.submit(run_checks, on_login, Sources(task))
            answers: dict[str, NodeAnswer] = {}
            if chosen.any and any(check.runs_on("node") for check in wanted.checks):
                try:
                    answers = ask(site, chosen, task, wanted.timeout_s, inside=inside is not None)
                except (SlurmUnavailable, SlurmRefused) as error:
                    report.slurm_error = str(error)
            outcomes_here = login.result()
        report.asked = tuple(answers)
        report.not_asked = chosen.not_asked
        report.add(STATE, chosen.states)
        for name, outcome in outcomes_here.items():
            report.add(name, {LOGIN: outcome})
        _add_results(answers, wanted.checks, outcomes_here, Sources(task), report)


def _own_job(wanted: Wanted) -> Chosen | None:
    """Return the nodes of the job that this runs in, unless others were asked for."""
    nodes = job_nodes(os.environ) if own_job_id() is not None else []
    if not nodes or wanted.count or wanted.nodelist:
        return None
    return Chosen(names=tuple(nodes))


def _active_jobs(client: SlurmClient) -> tuple[str, ...] | None:
    try:
        jobs = client.queue(user=getpass.getuser())
    except (SlurmUnavailable, SlurmRefused):
        return None
    return tuple(job_id for job_id, job in jobs.items() if job.state.is_active)


def _task(site: Site, wanted: Wanted, probe: str, token: str) -> NodeTask:
    compared = page_cache in wanted.checks
    return NodeTask(
        cluster=site.cluster,
        checks=tuple(check.name for check in wanted.checks),
        directory=str(wanted.directory.absolute()),
        probe=probe,
        token=token,
        paths=tuple(str(path.absolute()) for path in wanted.paths),
        ranks_per_node=site.slurm.ranks_per_node,
        jobs=() if site.cluster.launcher == "local" else None,
        stored=stored_sizes(wanted.directory, wanted.paths) if compared else Stored(),
    )


@contextmanager
def _probe(directory: Path) -> Iterator[tuple[str, str]]:
    """Make a folder in the runs directory for the nodes, with what this machine wrote there; remove it after.

    Both are empty if this machine cannot write there.
    """
    existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.is_dir())
    token = os.urandom(16).hex()
    try:
        folder = Path(tempfile.mkdtemp(prefix=".zslurm-doctor-", dir=existing))
        (folder / TOKEN).write_text(token)
    except OSError:
        yield "", ""
        return
    try:
        yield str(folder), token
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _add_results(
    answers: Mapping[str, NodeAnswer],
    checks: Sequence[Check],
    here: Mapping[str, CheckOutcome | None],
    sources: Sources,
    report: DoctorReport,
) -> None:
    """Add the outcomes of the nodes, what comparing them shows, and which nodes did not answer."""
    remedy = "look at the node (scontrol show node); it is in the list to exclude"
    for name, answer in answers.items():
        if answer.error is not None:
            report.add(ANSWER, {name: failed(f"the node does not answer: {answer.error}", remedy)})
    answered = {name: answer for name, answer in answers.items() if answer.error is None}
    for check in checks:
        outcomes = {
            name: CheckOutcome.from_json(answer.value["outcomes"][check.name])
            for name, answer in answered.items()
            if check.name in answer.value["outcomes"]
        }
        data = {
            name: NodeData(
                data=outcome.data,
                received=answered[name].received,
                **{when: answered[name].value[when] for when in ("sent", "began", "ended")},
            )
            for name, outcome in outcomes.items()
            if outcome.status is not Status.FAIL
        }
        compared = check.compare(data, sources) if check.compare is not None else {}
        outcome_here = here.get(check.name)
        inconsistent = inconsistent_nodes(check, outcomes)
        unlike = unlike_here(check, outcome_here, outcomes) if outcome_here is not None else {}
        for name, outcome in outcomes.items():
            further = [compared[name]] if name in compared else []
            further += inconsistent.get(name, []) + unlike.get(name, [])
            report.add(check.name, {name: merged([outcome, *further])})
