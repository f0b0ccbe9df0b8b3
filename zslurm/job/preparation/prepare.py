"""What happens on the nodes before the ranks start.

Their Python is put in place, a container is tried out, and the kernels that they launch are built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zslurm.config.spec import RunSpec
from zslurm.core.errors import CheckFailed, SlurmRefused, ZslurmError
from zslurm.job.preparation.container import container_interpreter
from zslurm.job.preparation.container_check import NEEDED_BY_PROGRAMS
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.preparation.kernel_builds import builds_kernels, put_kernels, with_kernels
from zslurm.job.preparation.staged_environment import stage, staged_environment, unstage
from zslurm.run.events import ContainerChecked, EnvironmentStaged
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.slurm.hostlist import by_reason, compress, expand
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer, run_here, run_on_nodes

_CHECK = "zslurm.job.preparation.container_check"
# An image may have to be fetched and unpacked on each node first.
_CONTAINER_TIMEOUT_S = 1800.0


def prepare(
    spec: RunSpec,
    run: RunDir,
    job_id: str,
    nodes: Sequence[str],
    environ: Mapping[str, str],
    record: Callable[[Event], None],
) -> Interpreter:
    """Make the ranks' Python ready on these nodes of the job that this process runs in; `record` records it.

    Raises:
        CheckFailed: the container does not work on some node.
        ZslurmError: the environment cannot be copied to the nodes.
    """
    python = _make_python_ready(spec, run, job_id, nodes, environ, record)
    if builds_kernels(spec):
        record(put_kernels(spec, run, job_id, nodes, python))
    return with_kernels(spec, python)


def _make_python_ready(
    spec: RunSpec,
    run: RunDir,
    job_id: str,
    nodes: Sequence[str],
    environ: Mapping[str, str],
    record: Callable[[Event], None],
) -> Interpreter:
    on_slurm = spec.cluster.launcher == "slurm"
    if spec.cluster.container is not None:
        python = container_interpreter(spec, run, environ)
        needed = () if spec.trainer is None else NEEDED_BY_PROGRAMS  # () is what zslurm's trainer needs
        answers = (
            _ask_nodes(python, run, job_id, nodes, environ, needed) if on_slurm else _ask_here(python, needed)
        )
        record(ContainerChecked(nodes=compress(list(answers)), rdma_abi=_findings(spec, answers)))
        return python
    if spec.cluster.stage_env is not None and on_slurm:
        staged = stage(spec.cluster.stage_env, run, job_id, nodes, environ)
        record(EnvironmentStaged(path=staged))
        return Interpreter((f"{staged}/bin/python",), environ)
    return Interpreter.own(environ)


def prepared(spec: RunSpec, run: RunDir, job_id: str, environ: Mapping[str, str]) -> Interpreter:
    """Return the Python that `prepare` has made ready on the nodes of this job before."""
    return with_kernels(spec, _ready_python(spec, run, job_id, environ))


def _ready_python(spec: RunSpec, run: RunDir, job_id: str, environ: Mapping[str, str]) -> Interpreter:
    if spec.cluster.container is not None:
        return container_interpreter(spec, run, environ)
    if spec.cluster.stage_env is not None and spec.cluster.launcher == "slurm":
        return Interpreter((f"{staged_environment(spec.cluster.stage_env, job_id)}/bin/python",), environ)
    return Interpreter.own(environ)


def clear_up(spec: RunSpec, job_id: str, nodes: Sequence[str], environ: Mapping[str, str]) -> None:
    """Remove from these nodes the environment of `prepare`; a gone node keeps it until its /tmp is cleaned."""
    if spec.cluster.stage_env is not None and spec.cluster.launcher == "slurm":
        with contextlib.suppress(ZslurmError):
            unstage(spec.cluster.stage_env, job_id, nodes, environ)


def _ask_here(python: Interpreter, needed: Sequence[str]) -> dict[str, NodeAnswer]:
    answer = run_here(
        _CHECK, *needed, timeout_s=_CONTAINER_TIMEOUT_S, environ=python.environ, python=python.command
    )
    return {answer.node: answer}


def _ask_nodes(
    python: Interpreter,
    run: RunDir,
    job_id: str,
    nodes: Sequence[str],
    environ: Mapping[str, str],
    needed: Sequence[str],
) -> dict[str, NodeAnswer]:
    """Ask these nodes. What the engine prints if it fails comes back through a file for each node."""
    nodes = expand(compress(nodes))  # as srun numbers them
    logs = [run.logs / f"container-{job_id}-{index}.log" for index in range(len(nodes))]
    for log in logs:
        log.unlink(missing_ok=True)
    try:
        answers = run_on_nodes(
            _CHECK,
            *needed,
            nodes=nodes,
            options=[*python.srun_options, f"--error={run.logs}/container-{job_id}-%n.log"],
            job_id=job_id,
            timeout_s=_CONTAINER_TIMEOUT_S,
            environ=python.environ,
            python=python.command,
        )
    except SlurmRefused as error:  # not one node answered
        answers = {node: NodeAnswer(node, None, str(error)) for node in nodes}
    for node, log in zip(nodes, logs, strict=True):
        if (why := answers[node].error) is not None:
            answers[node] = NodeAnswer(node, None, _engine_error(log) or why)
    return answers


def _engine_error(log: Path) -> str:
    """Return why a container did not start: what the engine calls fatal, else the last line that it wrote."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    lines = [line for line in lines if line]
    fatal = [line for line in lines if line.upper().startswith("FATAL")]
    return "; ".join(dict.fromkeys(fatal)) or "".join(lines[-1:])


def _findings(spec: RunSpec, answers: Mapping[str, NodeAnswer]) -> dict[str, str]:
    """Return the nodes of each state of the container's RDMA library.

    Raises:
        CheckFailed: on some node the container does not start, lacks a module, or cannot drive the RDMA devices
            that the run needs.
    """
    container = spec.cluster.container
    assert container is not None
    faults: list[tuple[str, str]] = []
    abi: list[tuple[str, str]] = []
    for node, answer in answers.items():
        if answer.error is not None:
            faults.append((f"does not start: {answer.error}", node))
            continue
        if missing := answer.value["missing"]:
            faults.append((f"its {container.python} has no {', '.join(missing)}", node))
        state, detail = answer.value["abi"]["state"], answer.value["abi"]["detail"]
        abi.append((f"{state}: {detail}", node))
        if state == "mismatch" and spec.slurm.nodes > 1:
            faults.append((f"it cannot drive the host's RDMA devices: {detail}", node))
    if faults:
        listed = "; ".join(f"{reason} (on {nodes})" for reason, nodes in by_reason(faults).items())
        raise CheckFailed(f"container {container.image}: {listed}")
    return by_reason(abi)
