"""`zslurm submit --dry-run`: everything about a run before it is one, with or without a Slurm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Shell
from tests.cluster.rails.fabrics import published_form
from tests.slurm.test_estimate import NEVER, TWO
from tests.submit.scripted_slurm import BAD_TIME, CANCELLED, NO_CONTROLLER, ScriptedSlurm
from tests.train.runs import make_corpus
from zslurm.core.errors import Exit

BY_SYSFS = "cores of the GPU's NUMA node (sysfs of the node)"
TOKEN = "hf_" + "AbCd" * 8 + "xY"
CLUSTER: dict[str, Any] = {
    "name": "local",
    "launcher": "slurm",
    "gpus_per_node": 4,
    "nics": ["a0", "a1"],
    "gpu_nics": [0, 0, 1, 1],
    "interface": "eth0",
    "env": {"HF_TOKEN": TOKEN, "LEVEL": "3"},
}


def dry_run(shell: Shell, *arguments: str) -> dict[str, Any]:
    done = shell.zslurm("submit", "run.yaml", "--dry-run", "--json", *arguments)
    assert done.code == 0, done.stderr
    return dict(json.loads(done.stdout))


def text_of(shell: Shell, *arguments: str) -> str:
    done = shell.zslurm("submit", "run.yaml", "--dry-run", *arguments)
    assert done.code == 0, done.stderr
    return done.stdout


def test_every_variable_has_its_origin_and_no_secret_is_shown(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER)
    body = dry_run(shell, "--set", "cluster.env.LEVEL=4")
    environment, origins = body["environment"], body["environment_origins"]
    assert (environment["PYTHONSAFEPATH"], origins["PYTHONSAFEPATH"]) == ("1", "zslurm")
    assert (environment["LEVEL"], origins["LEVEL"]) == ("4", "--set cluster.env.LEVEL")
    assert environment["HF_TOKEN"] == "[redacted]"
    assert origins["HF_TOKEN"].startswith("run file run.yaml:")
    assert body["values"]["cluster.env.HF_TOKEN"]["value"] == "[redacted]"
    text = text_of(shell)
    assert TOKEN not in json.dumps(body) + text
    assert "#   LEVEL=3    [run file run.yaml:" in text


def test_each_local_rank_has_its_gpu_and_its_nic(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER)
    assert dry_run(shell)["placement"] == [
        {"local_rank": 0, "gpu": 0, "nic": "a0", "cores": BY_SYSFS},
        {"local_rank": 1, "gpu": 1, "nic": "a0", "cores": BY_SYSFS},
        {"local_rank": 2, "gpu": 2, "nic": "a1", "cores": BY_SYSFS},
        {"local_rank": 3, "gpu": 3, "nic": "a1", "cores": BY_SYSFS},
    ]
    assert f"#   local rank 2  GPU 2  a1  {BY_SYSFS}\n" in text_of(shell)


@pytest.mark.parametrize(
    ("sections", "cores"),
    [
        ({"cluster": {"gpu_numa": [0, 0, 1, 1]}}, ["cores of NUMA node 0"] * 2 + ["cores of NUMA node 1"] * 2),
        (
            {"cluster": {"gpu_numa": [0, 0, 0, 0], "gpu_family": "mi250x"}},
            ["cores of the GPU's L3 cache in NUMA node 0"] * 4,
        ),
        ({"slurm": {"cpu_bind": "cores"}}, ["cores by srun --cpu-bind=cores"] * 4),
        ({"slurm": {"cpu_bind": "none"}}, ["all cores of the step"] * 4),
        ({"parallel": {"device": "cpu"}}, ["all cores of the step"] * 4),
    ],
)
def test_each_local_rank_has_its_cores(shell: Shell, sections: dict[str, Any], cores: list[str]) -> None:
    shell.write_run(**{**sections, "cluster": CLUSTER | sections.get("cluster", {})})
    assert [place["cores"] for place in dry_run(shell)["placement"]] == cores


def test_rules_that_the_profile_leaves_out_are_noted(shell: Shell) -> None:
    pollara = {"network": "pollara", "rails_only": True, "gpu_family": "mi300x", "interface": None}
    shell.write_run(cluster=CLUSTER | pollara | {"nics": [], "gpu_nics": []})
    interface = "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME are not set: the profile does not give cluster.interface"
    notes, text = dry_run(shell)["notes"], text_of(shell)
    for line in (interface, "NCCL_IB_HCA is not set: the profile does not give cluster.nics"):
        note = f"left out of the environment: {line} (why: zslurm cluster env --explain)"
        assert note in notes
        assert f"# note: {note}\n" in text
    assert text.count("NCCL_IB_HCA") == 1, "no variable is noted twice"


@pytest.mark.parametrize(
    ("tokens", "work"),
    [
        (40 * 96, "40 steps, 3.84k tokens of 4k in the data\n"),
        (400 * 96, "400 steps, 38.4k tokens of 4k in the data, 9.64 epochs\n"),
    ],
)
def test_data_that_are_repeated_are_noted(shell: Shell, tokens: int, work: str) -> None:
    phase = {"tokens": tokens, "context": 16, "global_batch": 6, "micro_batch": 1, "lr": 1e-3}
    shell.write_run(phases=[phase])
    assert f"; {work}" in text_of(shell)


@pytest.mark.parametrize(
    ("ranks", "cost"),
    [(1, None), (2, "7.0 times"), (4, "192 GB/s for 4 against 448"), (7, "1.2 times"), (8, None)],
)
def test_a_group_of_some_of_the_gpus_is_warned_about_with_what_it_costs(
    shell: Shell, ranks: int, cost: str | None
) -> None:
    own = CLUSTER | {"gpus_per_node": 8, "gpu_nics": [0, 0, 0, 0, 1, 1, 1, 1], "gpu_family": "mi300x"}
    phase = {"tokens": 16 * 56 * 4, "context": 16, "global_batch": 56, "micro_batch": 1, "lr": 1e-3}
    shell.write_run(cluster=own, slurm={"ranks_per_node": ranks}, phases=[phase])
    found = [note for note in dry_run(shell)["notes"] if "xGMI" in note]
    assert len(found) == (cost is not None)
    assert all(str(cost) in note for note in found)
    other = own | {"gpu_family": "h100"}
    shell.write_run(cluster=other, slurm={"ranks_per_node": ranks}, phases=[phase])
    assert not any("xGMI" in note for note in dry_run(shell)["notes"])


FLAGSHIP = {"extends": "zaya1-8b", "data": {"path": "tokens.h5"}}
MI300X_BYTES = 192 * 2**30


def flagship(shell: Shell) -> None:
    """A run of the published model, with data that are long enough for one of its sequences."""
    (shell.directory / "tokens.h5").unlink()
    make_corpus(shell.directory / "tokens.h5", 40_000)
    (shell.directory / "run.yaml").write_text(json.dumps(FLAGSHIP))


@pytest.mark.parametrize(("nodes", "sequences"), [(128, [4, 4, 1]), (64, [8, 8, 2]), (16, [32, 32, 8])])
def test_the_flagship_has_groups_memory_and_bytes_for_each_phase(
    shell: Shell, nodes: int, sequences: list[int]
) -> None:
    flagship(shell)
    where = ("--cluster", "mi300x-pollara", "--nodes", str(nodes))
    body = dry_run(shell, *where)
    phases, sent = body["phases"], body["communication"]
    assert [phase["name"] for phase in phases] == ["pretrain-1", "pretrain-2", "mid-train"]
    assert [phase["context_groups"] for phase in phases] == [[], [], ["0-1", "2-3", "4-5", "6-7"]]
    assert [phase["data_parallel"] for phase in phases] == [8 * nodes, 8 * nodes, 4 * nodes]
    assert [phase["sequences_per_rank"] for phase in phases] == sequences
    for phase in phases:
        assert phase["activation_bytes"] < phase["peak_bytes"] < 0.9 * MI300X_BYTES
        assert phase["context_bytes"]["rail"] == phase["context_bytes"]["off_rail"] == 0
        assert (phase["context_bytes"]["inside"] > 0) == (phase["context_parallel"] > 1)
        assert 0 < phase["exposed_share"] < 0.1
    assert max(phase["peak_bytes"] for phase in phases) == body["memory"]["peak_bytes"]
    assert sent["collectives"] == "two_level"
    assert [sent[part]["off_rail"] for part in ("reduce_scatter", "exchange", "all_gather")] == [0, 0, 0]
    assert sent["flat"]["exchange"]["off_rail"] > 0.8 * sent["exchange"]["rail"]
    assert sent["most_exchange_messages"] == 2 * (nodes - 1 + 7)
    assert sent["latency_share"] <= 0.1
    text = text_of(shell, *where)
    for shown in ("2 ranks of a node: 0-1, 2-3, 4-5, 6-7", "keys, values, halos", "along the rail", "of the step"):
        assert shown in text


def test_the_flagship_without_context_groups_is_refused_with_what_helps(shell: Shell) -> None:
    flagship(shell)
    where = ("--cluster", "mi300x-pollara", "--nodes", "128", "--dry-run")
    code, line = shell.fails("submit", "run.yaml", *where, "--set", "phases[2].context_parallel=1")
    assert (code, line) == (
        Exit.USAGE,
        "zslurm: phases[2].global_batch (512) has fewer sequences than there are data-parallel ranks (1024); set "
        "phases[2].context_parallel to 2, or use at most 64 nodes",
    )
    code, line = shell.fails("submit", "run.yaml", *where, "--set", "phases[2].context_parallel=3")
    assert (code, line) == (
        Exit.USAGE,
        "zslurm: phases[2].context_parallel (3) does not divide the 8 ranks of a node; use 2",
    )


@pytest.mark.parametrize(("size", "shown"), [(1, None), (2, "64 GB/s"), (4, "192 GB/s"), (8, None)])
def test_a_context_group_of_some_of_the_gpus_is_noted_with_the_reason_for_eight(
    shell: Shell, size: int, shown: str | None
) -> None:
    own = CLUSTER | {"gpus_per_node": 8, "gpu_nics": [0, 0, 0, 0, 1, 1, 1, 1], "gpu_family": "mi300x"}
    phase = {"tokens": 32 * 64, "context": 32, "global_batch": 8, "micro_batch": 1, "lr": 1e-3}
    shell.write_run(cluster=own, phases=[phase | {"context_parallel": size}])
    found = [note for note in dry_run(shell)["notes"] if "xGMI" in note]
    assert len(found) == (shown is not None)
    assert all(f"xGMI gives {size} GPUs {shown}" in note and "8 is advised" in note for note in found)
    shell.write_run(cluster=own | {"gpu_family": "h100"}, phases=[phase | {"context_parallel": size}])
    assert not any("xGMI" in note for note in dry_run(shell)["notes"])


def test_documents_that_are_kept_apart_in_shared_sequences_are_noted_on_gpus(shell: Shell) -> None:
    phase = {"tokens": 32 * 64, "context": 32, "global_batch": 8, "micro_batch": 1, "lr": 1e-3}
    shell.write_run(cluster=CLUSTER, phases=[phase | {"context_parallel": 2}])

    def noted(*settings: str) -> bool:
        given = [word for setting in settings for word in ("--set", setting)]
        return any(note.startswith("data.isolate_documents: ") for note in dry_run(shell, *given)["notes"])

    assert noted("data.isolate_documents=true")
    assert not noted()
    assert not noted("data.isolate_documents=true", "phases[0].context_parallel=1")
    assert not noted("data.isolate_documents=true", "parallel.device=cpu")


def test_more_ranks_than_gpus_are_refused_unless_they_train_on_cpus(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER, slurm={"ranks_per_node": 6})
    refused = "zslurm: slurm.ranks_per_node (6) exceeds the 4 GPUs of a node; use 4, or parallel.device: cpu"
    assert shell.fails("submit", "run.yaml", "--dry-run") == (Exit.USAGE, refused)
    assert len(dry_run(shell, "--set", "parallel.device=cpu")["placement"]) == 6


def test_a_rank_alone_sends_nothing(shell: Shell) -> None:
    shell.write_run()
    body = dry_run(shell)
    assert body["phases"][0]["exposed_share"] is None, "CPUs have no times"
    assert body["communication"]["predicted_s"] == 0
    text = text_of(shell)
    assert "phases, on each rank" in text
    assert "bytes that a rank sends" not in text


def test_memory_is_that_of_plan_memory(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER)
    memory = dry_run(shell, "--nodes", "1")["memory"]
    (plan,) = json.loads(shell.zslurm("plan", "memory", "run.yaml", "--json").stdout)["plans"]
    assert memory["peak_bytes"] == plan["peak_bytes"] > 0
    assert memory["host_staging_bytes"] == plan["host_staging_bytes"]


def test_without_slurm_there_is_no_start_and_everything_else(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    (slurm.directory / "sbatch").unlink()
    shell.write_run(cluster=CLUSTER)
    assert dry_run(shell)["start"] is None
    assert "start:" not in text_of(shell)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"printf '{TWO}' >&2", "# start: about 2026-11-22 05:57:29 UTC on node[2-3]\n"),
        (f"printf '{NEVER}' >&2; exit 1", "# start: never; sbatch: allocation failure: Requested node conf"),
        (
            f"printf '{BAD_TIME.strip()}' >&2; exit 1",
            "# start: never; sbatch: error: Invalid --time specification\n",
        ),
        (
            f"printf '{NO_CONTROLLER.strip()}' >&2; exit 1",
            "# start: unknown; the Slurm controller does not answer: ",
        ),
    ],
)
def test_slurm_is_asked_when_it_would_start(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    for program in ("scontrol", "sinfo"):
        slurm.write_program(program, "exit 1")
    slurm.write_program("sbatch", f'[ "$1" = --test-only ] || exit 9\n{script}')
    shell.write_run(cluster=CLUSTER)
    assert words in text_of(shell)


def test_the_changes_since_the_last_submission_are_shown(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    shell.write_run(cluster=CLUSTER)
    assert dry_run(shell)["changes"] is None
    slurm.gives(CANCELLED)
    assert shell.zslurm("submit", "run.yaml").code == 0
    assert dry_run(shell)["changes"] == {"job_id": CANCELLED, "keys": [], "script": []}
    assert "#   nothing changes\n" in text_of(shell)
    changes = dry_run(shell, "--spares", "1", "--set", "cluster.env.HF_TOKEN=other-token")["changes"]
    assert changes["keys"] == [
        "slurm.spares: 0 -> 1",
        'cluster.env.HF_TOKEN: "[redacted]" -> "[redacted]"',
    ]
    assert {"-#SBATCH --nodes=1", "+#SBATCH --nodes=2"} <= set(changes["script"])
    assert not any("SBATCH --export" in line for line in changes["script"])


def test_nothing_is_written(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER)
    before = shell.everything()
    text_of(shell)
    assert shell.everything() == before


def test_all_but_the_script_are_comments(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER)
    head, _, script = text_of(shell).partition("#!/bin/bash\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert script


def test_options_of_sbatch_and_of_submit_reach_the_script(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER)
    options = (
        "--time 1:00:00 --partition p --account a --qos q --reservation r --exclude n1 --spares 1 --dependency 7"
    )
    script = dry_run(shell, *options.split(), "--", "--mail-type=END", "--comment", "two words", "--contiguous")[
        "script"
    ]
    wanted = ["--time=1:00:00", "--partition=p", "--account=a", "--qos=q", "--reservation=r", "--exclude=n1"]
    wanted += ["--nodes=2", "--no-kill", "--dependency=afterok:7", "--mail-type=END", "--comment='two words'"]
    for option in [*wanted, "--contiguous"]:
        assert f"#SBATCH {option}\n" in script


def test_what_is_shown_is_what_is_kept_and_submitted(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a run starts over: nodes excluded from the old run are not of the new one."""
    shell.write_run(cluster=CLUSTER | {"env": {}})
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    shown = dry_run(shell)["script"]
    assert shell.zslurm("submit", "run.yaml").code == 0
    kept = shell.directory / "runs" / "tiny" / "script.sh"
    assert kept.read_text() == slurm.submitted == shown

    event = {"time": time.time(), "event": "nodes_excluded", "nodes": "n4", "reason": "node_dead"}
    (kept.parent / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert "#SBATCH --exclude=n4\n" in dry_run(shell)["script"]
    shown = dry_run(shell, "--new")["script"]
    assert shell.zslurm("submit", "run.yaml", "--new").code == 0
    assert kept.read_text() == slurm.submitted == shown
    assert "--exclude" not in shown


FOUR_NODES = published_form(["node[0,2]", "node[1,3]"], uplinks=1).model_dump(mode="json", exclude_none=True)
ON_FABRIC = CLUSTER | {"rails_only": True, "gpus_per_node": 8, "nics": [f"a{i}" for i in range(8)], "gpu_nics": []}
WIDE = {"tokens": 16 * 48 * 4, "context": 16, "global_batch": 48, "micro_batch": 1, "lr": 1e-3}


def test_hops_of_the_chosen_nodes(shell: Shell) -> None:
    slurm = {"nodes": 3, "nodelist": "node[0-2]"}
    shell.write_run(cluster=ON_FABRIC | {"fabric": FOUR_NODES}, slurm=slurm, phases=[WIDE])
    fabric = dry_run(shell)["fabric"]
    assert fabric["chosen_by"] == "slurm.nodelist"
    assert fabric["placements"]["chosen"]["nodes"] == "node[0,2],node1"
    assert (
        "# fabric: node[0,2],node1 in the order of ranks (nodes by slurm.nodelist), in a step of the ring over 8 "
        "rails\n#   56 hops, oversubscription 2:1 (2 ports of a slice send up)\n"
    ) in text_of(shell)


def test_hops_of_the_nodes_that_slurm_would_give(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    for program in ("scontrol", "sinfo"):
        slurm.write_program(program, "exit 1")
    slurm.write_program("sbatch", f"printf '{TWO}' >&2")
    shell.write_run(cluster=ON_FABRIC | {"fabric": FOUR_NODES}, slurm={"nodes": 2}, phases=[WIDE])
    assert "# fabric: node[2-3] in the order of ranks (nodes by Slurm's estimate), in a step" in text_of(shell)


def test_hops_in_the_best_and_the_worst_case_where_no_nodes_are_chosen(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    (slurm.directory / "sbatch").unlink()
    given = {"nodes": 2, "exclude": "node0"}
    shell.write_run(cluster=ON_FABRIC | {"fabric": FOUR_NODES}, slurm=given, phases=[WIDE])
    assert (
        "# fabric: no nodes are chosen yet; 2 nodes of the 4 on slices of the profile, in a step of the ring over "
        "8 rails\n"
        "#   best case, node[1,3]: 16 hops, nothing leaves its slice\n"
        "#   worst case, node[1-2]: 48 hops, oversubscription 1:1 (1 port of a slice sends up)\n"
    ) in text_of(shell)
    assert list(dry_run(shell)["fabric"]["placements"]) == ["best", "worst"]
    few = "# fabric: hops are not known: the profile lists slices of 4 nodes, and the run needs 6\n"
    assert few in text_of(shell, "--nodes", "6")


def test_a_fabric_that_is_not_described(shell: Shell) -> None:
    shell.write_run(cluster=ON_FABRIC, slurm={"nodes": 2}, phases=[WIDE])
    assert "# fabric: hops are not known: the profile lists no leaf slices (cluster.fabric.slices)\n" in text_of(
        shell
    )
    shell.write_run(cluster=CLUSTER)
    assert dry_run(shell)["fabric"] is None
    assert "# fabric:" not in text_of(shell)


def test_what_the_gpus_cannot_hold_is_refused_before_the_queue(shell: Shell) -> None:
    shell.write_run(cluster=CLUSTER | {"gpu_type": "mi300x"})
    large = ("--set", "model.layers=40", "--set", "model.experts=64", "--set", "model.expert_hidden_size=100000")
    code, line = shell.fails("submit", "run.yaml", "--dry-run", *large)
    assert code == Exit.USAGE
    assert "the run does not fit" in line
    submitted = shell.zslurm("submit", "run.yaml", *large)
    assert (submitted.code, submitted.stderr) == (Exit.USAGE, f"{line}\n")
