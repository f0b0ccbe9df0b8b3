"""How a run's settings differ from what `zslurm bench` measured on its cluster, a line each."""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rccl.environment import variables_of
from zslurm.config.load import measured_alike, measured_bucket
from zslurm.config.spec import RunSpec

_FACTOR = 2.0
"""Buckets within this factor of the measured one are as good: the knee moves that far from run to run."""

_FASTER = 1.03


def off_measured(spec: RunSpec) -> list[str]:
    """Return the settings of a run that are off the measured ones; none if nothing was measured for it."""
    measured = spec.cluster.measured
    if not measured_alike(spec) or spec.world_size == 1:
        return []
    lines, when = [], f"measured {measured.date[:10]}" if measured.date else "measured"
    nodes, bucket_given = counted(spec.slurm.nodes, "node"), spec.parallel.bucket_mb
    bucket = measured_bucket(spec)
    if bucket and bucket_given and not 1 / _FACTOR < bucket_given / bucket < _FACTOR:
        effect = "less than the full bandwidth" if bucket_given < bucket else "less to hide under backward"
        lines.append(
            f"parallel.bucket_mb: {bucket_given:g}, but {bucket:g} MiB is the smallest bucket with full bandwidth "
            f"on {nodes} ({when}): {effect}; leave it out to use that"
        )
    faster = measured.collectives_for(spec.slurm.nodes, spec.ranks_per_node)
    if faster and spec.slurm.nodes > 1 and spec.parallel.collectives not in ("auto", faster):
        lines.append(
            f"parallel.collectives: {spec.parallel.collectives}, but {faster} is faster on {nodes} ({when}); "
            "leave it out to use that"
        )
    in_force = variables_of(spec.cluster)
    for name, variable in measured.variables.items():
        value = in_force.get(name)
        ratio = variable.others.get(value or "")
        if ratio is not None and ratio >= _FASTER:
            lines.append(
                f"{name}={value}, but {variable.best} has {ratio:.2f} times its bandwidth here (measured "
                f"{variable.date[:10]}); set cluster.env.{name}"
            )
    return lines
