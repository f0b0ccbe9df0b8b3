"""Which products of a run `zslurm bench tuning` tunes, and which its cluster's table lacks."""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.gemm_tables import table_of
from zslurm.config.spec import RunSpec
from zslurm.submit.size import most_sequences
from zslurm.train.plan.tunable import LinearCall, tunable_calls


def calls_of(spec: RunSpec) -> list[LinearCall]:
    """Return the calls of a run on GPUs that torch's TunableOp can tune."""
    return tunable_calls(spec, [most_sequences(spec, phase) for phase in spec.phases])


def untuned(spec: RunSpec) -> list[str]:
    """Return a line on the products of a run that are not in the table that it will use; none if all are.

    Raises:
        ConfigError, NotFound: see `table_of`.
    """
    tuned_table = table_of(spec)
    if tuned_table is None:
        return []
    path, table = tuned_table
    tuned = {
        (product_or_pass.dtype, product_or_pass.m, product_or_pass.n, product_or_pass.k, product_or_pass.pass_name)
        for product_or_pass in table.products
    }
    products = [
        (call.dtype, call.rows, call.outputs, call.inputs, product_or_pass)
        for call in calls_of(spec)
        for product_or_pass in call.passes
    ]
    missing = sum(product_or_pass not in tuned for product_or_pass in products)
    if not missing:
        return []
    return [
        f"{path}: {missing} of {counted(len(products), 'product')} of this run are not in it; "
        "`zslurm calibrate` adds them"
    ]
