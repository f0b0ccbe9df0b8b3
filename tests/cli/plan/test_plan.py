"""`zslurm plan memory`: the plan of any number of ranks, without data, torch or a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.commands import Shell
from tests.cli.test_help import modules_of
from tests.cli.test_output import json_of
from zslurm.core.errors import Exit
from zslurm.train.config import load_train_config
from zslurm.train.plan.memory import plan_memory


def plans_of(shell: Shell, *arguments: str) -> list[dict[str, Any]]:
    body = json_of(shell.zslurm("plan", "memory", "run.yaml", "--json", *arguments))
    assert isinstance(body, dict)
    assert body["device"] == "cpu"
    plans: list[dict[str, Any]] = body["plans"]
    return plans


def test_it_is_the_plan_of_the_run_that_would_be_submitted(shell: Shell) -> None:
    run_file = shell.write_run(slurm={"ranks_per_node": 3})
    (found,) = plans_of(shell)
    resolved = shell.directory / "config.json"
    resolved.write_text(shell.zslurm("config", "show", run_file, "--json").stdout)
    plan = plan_memory(load_train_config(resolved), 3, on_cpu=True)
    assert found["ranks"] == 3
    assert found["peak_bytes"] == plan.peak
    assert found["resident_bytes"] == plan.resident
    assert found["packing"]["idle_ranks"] == plan.balance.idle_ranks
    assert found["peak_bytes"] == sum(found["resident_bytes"].values()) + max(found["moment_bytes"].values())


def test_each_number_of_ranks_is_a_column(shell: Shell) -> None:
    shell.write_run()
    plans = plans_of(shell, "--dp", "4", "--dp", "1", "--dp", "4")
    assert [plan["ranks"] for plan in plans] == [4, 1]
    done = shell.zslurm("plan", "memory", "run.yaml", "--dp", "4", "--dp", "1")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert done.code == 0
    assert rows[0] == ["ranks", "4", "1"]
    assert {len(row) for row in rows} == {3}
    table = {row[0]: row[1:] for row in rows}
    assert set(plans[0]["resident_bytes"]) <= set(table)
    assert {f"+ {name}" for name in plans[0]["moment_bytes"]} <= set(table)
    assert table["exchange of matrices"][1] == "0 B"
    assert table["= peak"] != table["with recompute"]
    assert done.stderr == "note: on CPUs; the rank that owns most; of the lines with +, one at a time\n"


def test_settings_change_the_plan(shell: Shell) -> None:
    shell.write_run()
    (plain,) = plans_of(shell)
    (recomputed,) = plans_of(shell, "--set", "parallel.recompute=true")
    assert recomputed["microbatch_bytes"]["layers"] < plain["microbatch_bytes"]["layers"]
    (flat,) = plans_of(shell, "--set", "optim.matrices=adamw")
    assert (flat["matrices"], flat["packing"]["cost"]) == (0, 0)
    table = shell.zslurm("plan", "memory", "run.yaml", "--set", "optim.matrices=adamw").stdout
    assert "whole matrices" not in table


def test_ranks_that_own_no_matrix_are_named(shell: Shell) -> None:
    shell.write_run()
    (plan,) = plans_of(shell, "--dp", "1000")
    idle = 1000 - plan["matrices"]
    assert plan["packing"]["idle_ranks"] == idle > 0
    done = shell.zslurm("plan", "memory", "run.yaml", "--dp", "1000")
    assert (
        f"note: on 1000 ranks {idle} ({idle / 1000:.0%}) own no matrix: there are {plan['matrices']}"
        in done.stderr
    )


def test_gpus_are_planned_for_where_the_cluster_has_them(shell: Shell) -> None:
    shell.write_run()
    for setting in ("parallel.device=cuda", "cluster.gpus_per_node=8"):
        done = shell.zslurm("plan", "memory", "run.yaml", "--json", "--set", setting)
        assert json.loads(done.stdout)["device"] == "gpu"
    documents = ("--set", "parallel.device=cuda", "--set", "data.isolate_documents=true")
    assert "isolate_documents" in shell.zslurm("plan", "memory", "run.yaml", *documents).stderr


def test_the_least_recomputation_for_a_gpu_is_shown(shell: Shell) -> None:
    shell.write_run()
    on_gpus = ("plan", "memory", "run.yaml", "--set", "parallel.device=cuda")
    auto = (*on_gpus, "--set", "parallel.recompute=auto")
    unlimited = shell.zslurm(*auto)
    assert "give it with --gpu-memory; shown is none" in unlimited.stderr
    (plan,) = json.loads(shell.zslurm(*on_gpus, "--gpu-memory", "80", "--json").stdout)["plans"]
    assert (plan["recomputed_layers"], plan["least_recomputed_layers"]) == (0, 0)
    (all_of_it,) = json.loads(
        shell.zslurm(*on_gpus, "--set", "parallel.recompute=true", "--gpu-memory", "80", "--json").stdout
    )["plans"]
    assert all_of_it["recomputed_layers"] > all_of_it["least_recomputed_layers"] == 0
    done = shell.zslurm(*auto, "--gpu-memory", "80")
    rows = dict(line.split("\t")[:2] for line in done.stdout.splitlines())
    assert rows["layers that are recomputed"] == rows["fewest that fit"] == "0"
    assert "--gpu-memory" not in done.stderr
    too_large = (*on_gpus, "--set", "model.vocab_size=8000000", "--gpu-memory", "1")
    assert "fewest that fit\tnone fits" in shell.zslurm(*too_large).stdout
    (plan,) = json.loads(shell.zslurm(*too_large, "--json").stdout)["plans"]
    assert plan["least_recomputed_layers"] is None
    code, line = shell.fails(*on_gpus, "--gpu-memory", "0")
    assert code == Exit.USAGE
    assert "--gpu-memory" in line


def test_more_layers_than_there_are_cannot_be_recomputed(shell: Shell) -> None:
    shell.write_run()
    _, line = shell.fails("plan", "memory", "run.yaml", "--set", "parallel.recompute=1000")
    assert "parallel.recompute (1000) exceeds the model's" in line


def test_it_needs_no_data_and_writes_nothing(shell: Shell) -> None:
    shell.write_run()
    (shell.directory / "tokens.h5").unlink()
    before = shell.everything()
    assert shell.zslurm("plan", "memory", "run.yaml").code == 0
    assert shell.everything() == before


def test_it_loads_no_torch(shell: Shell) -> None:
    shell.write_run()
    assert not modules_of("plan", "memory", "run.yaml", cwd=shell.directory) & {"torch", "submitit", "jinja2"}


@pytest.mark.parametrize("ranks", ["0", "-1", "many"])
def test_a_number_of_ranks_that_is_none(shell: Shell, ranks: str) -> None:
    shell.write_run()
    code, line = shell.fails("plan", "memory", "run.yaml", "--dp", ranks)
    assert code == Exit.USAGE
    assert "--dp" in line


def test_a_wrong_run_file(shell: Shell) -> None:
    assert shell.fails("plan", "memory", "none.yaml") == (Exit.NOT_FOUND, "zslurm: none.yaml: no such file")
    shell.write_run(model={"layers": 0})
    assert shell.fails("plan", "memory", "run.yaml")[0] == Exit.USAGE


def test_a_number_of_ranks_beyond_reason_does_not_fill_the_memory(shell: Shell) -> None:
    shell.write_run()
    message = "zslurm: the number of ranks must be between 1 and 1048576, got 10000000000"
    assert shell.fails("plan", "memory", "run.yaml", "--dp", "10000000000") == (Exit.USAGE, message)
    nodes = "slurm.nodes=10000000000"
    assert shell.fails("plan", "memory", "run.yaml", "--set", nodes) == (Exit.USAGE, message)
