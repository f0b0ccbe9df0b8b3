"""How a run's settings differ from what `zslurm bench` measured on its cluster, a line each."""

from __future__ import annotations

from datetime import UTC, datetime

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cluster.measurements import CPU, StoredValue
from zslurm.cluster.profile import is_measurement, measured_values
from zslurm.cluster.rccl.environment import variables_of
from zslurm.config.layers import DEFAULT, Layers
from zslurm.config.load import measured_alike, measured_bucket
from zslurm.config.software import differences
from zslurm.config.spec import RunSpec
from zslurm.submit.calibrated_rates import calibrated_rates, measured_profile
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
    values = {
        key: value for key, value in measured_values(measured_profile(cluster)).items() if value.device != CPU
    }
    if not values:
        return [
            f"nothing was measured on {cluster.name}: buckets, levels and the doctor's limits are general ones; "
            "`zslurm calibrate` measures the cluster in an hour"
        ]
    for key, value in values.items():
        mismatches = differences(
            cluster, value.device, rocm=value.versions.get("rocm"), torch=value.versions.get("torch"),
            rccl=value.versions.get("rccl"), whose="the measurement's",
        )  # fmt: skip
        if mismatches:
            return [
                f"{key} was measured on {cluster.name} on {value.date[:10]} with something else: "
                f"{'; '.join(mismatches)}; measure again with `zslurm calibrate RUN --again`"
            ]
    return []


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
    values = measured_values(measured_profile(spec.cluster))
    measured, nodes = spec.cluster.measured, spec.slurm.nodes
    rows = []
    if spec.world_size > 1:
        for name in ("bucket_mb", "collectives"):
            origin = layers.leaf_origin(("parallel", name))
            count = measured.nearest(getattr(measured, name), nodes, spec.ranks_per_node)
            stored = values.get(f"measured.{name}.{count}")
            if stored is not None and is_measurement(origin.file or ""):
                source = _measured(stored)
            elif origin == DEFAULT:
                source = "a guess, by the model of docs/plan.md"
            else:
                source = str(origin)
            value = getattr(spec.parallel, name)
            shown = "by size" if value is None else f"{value}"
            rows.append({"key": f"parallel.{name}", "value": shown, "source": source})
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
        origin, stored = layers.leaf_origin(("cluster", "storage_iops")), values.get("storage_iops")
        of_measurement = stored is not None and is_measurement(origin.file or "")
        source = _measured(stored) if stored is not None and of_measurement else str(origin)
        rows.append({"key": "cluster.storage_iops", "value": f"{iops:,.0f}", "source": source})
    return rows


def _measured(stored: StoredValue) -> str:
    """Return when a value was measured, on which nodes, and how long ago."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(stored.date)
    except (ValueError, TypeError):  # edited by hand, or without a time zone
        return f"measured {stored.date[:10]} on {stored.nodes}"
    return f"measured {stored.date[:10]} on {stored.nodes}, {show_duration(age.total_seconds())} ago"
