"""How a run's settings differ from what `zslurm bench` measured on its cluster, a line each."""

from __future__ import annotations

from datetime import UTC, datetime

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cluster.measurements import StoredValue
from zslurm.cluster.profile import measurements_of
from zslurm.cluster.rccl.environment import variables_of
from zslurm.config.layers import DEFAULT, Layers
from zslurm.config.load import measured_alike, measured_bucket
from zslurm.config.software import differences
from zslurm.config.spec import RunSpec
from zslurm.submit.calibrated_rates import calibrated_rates
from zslurm.train.plan.rates import ASSUMED_MEMORY_GB_S, ASSUMED_TFLOPS

_FACTOR = 2.0
"""Buckets within this factor of the measured one are as good: the knee moves that far from run to run."""


def about_measurements(spec: RunSpec) -> list[str]:
    """Return in a line that the cluster of a run on GPUs was not measured, or with something else; none if it was.

    Raises:
        ConfigError: the measurements cannot be used.
    """
    cluster = spec.cluster
    if cluster.launcher != "slurm" or not cluster.gpus_per_node or spec.parallel.device == "cpu":
        return []
    stored = measurements_of(cluster.name)
    values = [] if stored is None else [value for value in stored[1].values.values() if value.device != "cpu"]
    if not values:
        return [
            f"nothing was measured on {cluster.name}: buckets, levels and the doctor's limits are general ones; "
            "`zslurm calibrate` measures the cluster in an hour"
        ]
    newest = max(values, key=lambda value: value.date)
    mismatches = differences(
        cluster, newest.device, rocm=newest.versions.get("rocm"), torch=newest.versions.get("torch"),
        whose="the measurements'",
    )  # fmt: skip
    return [
        f"{cluster.name} was measured on {newest.date[:10]} with something else: {'; '.join(mismatches)}; "
        "`zslurm calibrate --again` measures it anew"
        for _ in mismatches[:1]
    ]


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
        if (ratio := variable.gain_over(value or "")) is not None:
            lines.append(
                f"{name}={value or ''}, but {variable.best or 'no value'} has {ratio:.2f} times its bandwidth "
                f"here (measured {variable.date[:10]}); set cluster.env.{name}"
            )
    return lines


def sources_of_values(spec: RunSpec, layers: Layers) -> list[dict[str, str]]:
    """Return what a run takes from measurements if there are any: key, value, and whether it was measured.

    A source is a measurement with its age, a file that gives the value, a published figure, or a guess.

    Raises:
        ConfigError: the measurements cannot be used.
    """
    stored = measurements_of(spec.cluster.name)
    values = {} if stored is None else stored[1].values
    rows = []
    if spec.world_size > 1:
        for name, prefix in (("bucket_mb", "measured.bucket_mb."), ("collectives", "measured.collectives.")):
            origin = layers.leaf_origin(("parallel", name))
            measured = [value for key, value in values.items() if key.startswith(prefix)]
            value = getattr(spec.parallel, name)
            if measured and (origin.file or "").endswith(str(stored[0] if stored else "")):
                source = _measured(max(measured, key=lambda one: one.date))
            elif origin == DEFAULT:
                source = "a guess, by the model of docs/plan.md"
            else:
                source = str(origin)
            rows.append(
                {"key": f"parallel.{name}", "value": "by size" if value is None else f"{value}", "source": source}
            )
    on_cpu = spec.parallel.device == "cpu" or not spec.cluster.gpus_per_node
    if (rates := calibrated_rates(spec, on_cpu=on_cpu)) is not None:
        rows.append({"key": "rates of products", "value": f"{len(rates[0].gemm)} measured", "source": rates[1]})
    elif not on_cpu:
        rows.append({"key": "rates of products", "value": f"{ASSUMED_TFLOPS:g} TFLOPS", "source": "a guess"})
        rows.append({
            "key": "rate of memory", "value": f"{ASSUMED_MEMORY_GB_S:,.0f} GB/s",
            "source": "a published figure (arXiv 2511.17127)",
        })  # fmt: skip
    if (iops := spec.cluster.storage_iops) is not None:
        stored_iops = values.get("storage_iops")
        source = (
            _measured(stored_iops)
            if stored_iops is not None
            else str(layers.leaf_origin(("cluster", "storage_iops")))
        )
        rows.append({"key": "cluster.storage_iops", "value": f"{iops:,.0f}", "source": source})
    return rows


def _measured(stored: StoredValue) -> str:
    """Return when a value was measured, on which nodes, and how long ago."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(stored.date)
    except (ValueError, TypeError):  # edited by hand, or without a time zone
        return f"measured {stored.date[:10]} on {stored.nodes}"
    return f"measured {stored.date[:10]} on {stored.nodes}, {show_duration(age.total_seconds())} ago"
