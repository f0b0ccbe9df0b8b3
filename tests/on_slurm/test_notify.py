"""`zslurm aegis notify --slurm`: the sample is sent from a compute node, as the supervisor would send it."""

from __future__ import annotations

import json

import pytest

from tests.on_slurm.slurm_cluster import SlurmCluster
from tests.on_slurm.user import at_work

pytestmark = pytest.mark.slurm


def test_the_hook_is_tried_on_a_compute_node(slurm_cluster: SlurmCluster) -> None:
    with at_work(slurm_cluster, "notify-test") as user:
        directory = user.directory
        command = f"cat > {directory}/got; echo $SLURMD_NODENAME > {directory}/where"
        run_file = user.write_run("told", aegis={"notify": {"command": command}})
        assert user.zslurm("aegis", "notify", run_file, "--slurm") == "aegis.notify.command took the event"
        assert json.loads((directory / "got").read_text())["run"] == "told"
        assert (directory / "where").read_text().strip() in slurm_cluster.node_names
        failing = user.write_run("fails", aegis={"notify": {"command": "echo no route >&2; exit 7"}})
        code, said = user.fails("aegis", "notify", failing, "--slurm")
        assert (code, "zslurm: aegis.notify.command: exit code 7: no route\n" in said) == (5, True)
