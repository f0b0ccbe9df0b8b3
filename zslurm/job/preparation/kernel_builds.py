"""Build the kernels of a run before its ranks start: once for each kind of node, so that no rank compiles.

    RUN/kernels-KIND.tar         what was built for a kind of node: GPU, versions, kernels, configuration
    /tmp/zslurm-kernels-UID/     the same on each node, which the user's ranks read; later jobs find it there

Each node is asked for its kind and unpacks the archive of it. If there is none yet, one node of the kind makes it.
What fails is recorded, and the ranks start: they compile then, and warn of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zslurm.config.spec import RunSpec
from zslurm.core.errors import ZslurmError
from zslurm.hardware.compiler_caches import node_directory
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.kernels.prepared import PREPARED_VARIABLE
from zslurm.run.events import KernelsPrepared
from zslurm.run.run_dir import RunDir
from zslurm.slurm.hostlist import by_reason
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer, run_on_nodes

_MODULE = "zslurm.job.preparation.node_kernels"
_UNPACK_TIMEOUT_S, _BUILD_TIMEOUT_S = 300.0, 1800.0


def builds_kernels(spec: RunSpec) -> bool:
    """Return whether a run's kernels are built before its ranks start: on the GPUs of a Slurm cluster.

    Not in containers of pyxis: each step has a /tmp of its own there (enroot's default mounts).
    """
    cluster = spec.cluster
    on_gpus = cluster.gpus_per_node > 0 and spec.parallel.device != "cpu"
    in_pyxis = cluster.container is not None and cluster.container.engine == "pyxis"
    return cluster.launcher == "slurm" and spec.trainer is None and on_gpus and not in_pyxis


def _directory(spec: RunSpec, environ: Mapping[str, str]) -> str:
    """Return the directory of this user's kernels on each node, which cluster.env may name."""
    return environ.get(PREPARED_VARIABLE) or node_directory(spec.cluster.stage_env)


def with_kernels(spec: RunSpec, python: Interpreter) -> Interpreter:
    """Return a Python whose processes read the kernels that were put on their node."""
    if not builds_kernels(spec):
        return python
    environ = {**python.environ, PREPARED_VARIABLE: _directory(spec, python.environ)}
    return Interpreter(python.command, environ, python.srun_options)


def put_kernels(
    spec: RunSpec, run: RunDir, job_id: str, nodes: Sequence[str], python: Interpreter
) -> KernelsPrepared:
    """Put the kernels of a run on these nodes of its job, and return the event that states how that went."""
    directory = _directory(spec, python.environ)
    problems: list[tuple[str, str]] = []

    def ask(action: str, asked: Sequence[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Return what the nodes answered, and collect the problems of those that did not."""
        try:
            answers = run_on_nodes(
                _MODULE,
                action,
                str(run.path),
                directory,
                nodes=asked,
                options=python.srun_options,
                job_id=job_id,
                timeout_s=timeout_s,
                environ=python.environ,
                python=python.command,
            )
        except ZslurmError as error:
            answers = {node: NodeAnswer(node, None, str(error)) for node in asked}
        problems.extend((item.error, node) for node, item in answers.items() if item.error is not None)
        values = {node: item.value for node, item in answers.items() if item.error is None}
        problems.extend((problem, node) for node, value in values.items() for problem in value["problems"])
        return values

    first = ask("unpack", nodes, _UNPACK_TIMEOUT_S)
    waiting = {node: value["kind"] for node, value in first.items() if value["kind"] and not value["ready"]}
    builders = dict[str, str]()
    for node, kind in waiting.items():
        builders.setdefault(kind, node)
    built = ask("build", list(builders.values()), _BUILD_TIMEOUT_S) if builders else {}
    if others := [node for node in waiting if node not in built]:
        ask("unpack", others, _UNPACK_TIMEOUT_S)
    _remove_outdated(run, {str(value["kind"]) for value in (first | built).values() if value["kind"]})
    kinds = sorted({str(value["kind"]).split("-")[0] for value in built.values() if value["ready"]})
    return KernelsPrepared(path=directory, built=kinds or None, problems=by_reason(problems) or None)


def _remove_outdated(run: RunDir, kinds: set[str]) -> None:
    """Remove archives of the architectures of these kinds that are of none of them: of other versions."""
    for architecture in {kind.partition("-")[0] for kind in kinds}:
        for archive in run.path.glob(f"kernels-{architecture}-*.tar"):
            if archive.name.removeprefix("kernels-").removesuffix(".tar") not in kinds:
                archive.unlink(missing_ok=True)
