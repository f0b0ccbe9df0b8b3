"""`zslurm bench compare`, `plot` and `apply`: output, exit codes, and what is wrong with what was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.synthetic import collective, result, write
from tests.cli.commands import Shell
from zslurm.cli.bench.measurements import run_named
from zslurm.cli.bench.run import Measure
from zslurm.cluster.profile import measured_path, profile_path, set_default
from zslurm.cluster.site import load_site
from zslurm.core.errors import Exit

COPIES = [{"what": "memory", "size": 2**30, "rate": 4300.0, "ranks_rate": [4300.0], "spread": 0.01, "samples": 20}]
PROFILE = "# ours\ncluster:\n  gpus_per_node: 8   # MI300X\n  doctor:\n    shm_gib: 16\n"


@pytest.fixture
def profile(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shell.directory / "config"))
    path = profile_path("ours")
    path.parent.mkdir(parents=True)
    path.write_text(PROFILE)
    return path


@pytest.fixture
def collectives(shell: Shell) -> Path:
    return write(shell.directory / "a.json", result("collectives", collective(2, 1e-4, 3e11)))


def test_compare_prints_a_row_for_each_point(shell: Shell, collectives: Path) -> None:
    other = result("collectives", collective(2, 1e-4, 2e11))
    write(shell.directory / "b.json", other)
    done = shell.zslurm.ok("bench", "compare", "a.json", "b.json")
    columns, *rows = (line.split("\t") for line in done.stdout.splitlines())
    assert columns == ["bytes", "first, GB/s", "second", "ratio", "noise", "outcome"]
    assert len(rows) == 25 and rows[-1][0] == "16.0 GiB" and rows[-1][-1] == "worse"
    assert "25 rows:" in done.stderr
    changed = shell.zslurm("bench", "compare", "a.json", "b.json", "--changed", "--strict")
    assert changed.code == Exit.CHECK_FAILED and len(changed.stdout.splitlines()) < 25
    facts = json.loads(shell.zslurm.ok("bench", "compare", "a.json", "b.json", "--json").stdout)
    assert facts["changes"][0]["key"]["bytes"] == 1024 and facts["only_first"] == 0


def test_results_of_different_machines_are_compared_with_a_warning(shell: Shell, collectives: Path) -> None:
    write(shell.directory / "b.json", result("collectives", collective(2, 1e-4, 3e11), machine={"gpu": "H200"}))
    done = shell.zslurm.ok("bench", "compare", "a.json", "b.json")
    assert "note: different machines: AMD Instinct MI300X and H200" in done.stderr


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        (None, Exit.NOT_FOUND, "no such file"),
        ("{", Exit.USAGE, "not a result of `zslurm bench`"),
        ('{"schema_version": 99}', Exit.USAGE, "of a newer zslurm"),
        ("[]", Exit.USAGE, "not a result of `zslurm bench`"),
    ],
)
@pytest.mark.parametrize("command", ["compare a.json", "apply", "plot"])
def test_a_missing_damaged_or_newer_result_gets_one_line(
    shell: Shell, collectives: Path, text: str | None, code: Exit, why: str, command: str
) -> None:
    if text is not None:
        (shell.directory / "b.json").write_text(text)
    done = shell.zslurm("bench", *command.split(), "b.json", *(["plots"] if command == "plot" else []))
    assert (done.code, done.stdout) == (code, "")
    assert why in done.stderr and done.stderr.count("\n") == 1


def test_damaged_rows_get_one_line(shell: Shell, profile: Path) -> None:
    write(shell.directory / "b.json", result("speed", [{"what": "memory"}]))
    done = shell.zslurm("bench", "apply", "b.json")
    assert done.code == Exit.USAGE and done.stderr.count("\n") == 1 and "rows are damaged" in done.stderr


def test_apply_writes_next_to_the_profile_which_stays_as_it_is(
    shell: Shell, profile: Path, collectives: Path
) -> None:
    write(shell.directory / "speed.json", result("speed", COPIES))
    store = measured_path("ours")
    shown = shell.zslurm.ok("bench", "apply", "a.json", "speed.json", "--dry-run")
    assert not store.exists()
    header, *rows = (line.split("\t") for line in shown.stdout.splitlines())
    assert header[:4] == ["key below cluster", "value", "spread", "date"]
    assert ["doctor.hbm_gb_s", "3,870", "not known", "2026-11-23"] in [row[:4] for row in rows]
    done = shell.zslurm.ok("bench", "apply", "a.json", "speed.json")
    assert "2 nodes: a bucket of" in done.stderr and f"wrote {store}" in done.stderr
    assert profile.read_text() == PROFILE
    cluster = load_site("ours").cluster
    assert (cluster.doctor.hbm_gb_s, cluster.doctor.shm_gib) == (3870, 16)
    assert cluster.measured.bucket_mb == {2: pytest.approx(544, rel=0.06)}
    assert cluster.measured.date == "2026-11-23T16:00:00Z"
    shown = shell.zslurm.ok("cluster", "show", "ours", "--measured")
    assert "doctor.hbm_gb_s\t3,870\tnot known\t2026-11-23\tn[0-3]" in shown.stdout
    facts = json.loads(shell.zslurm.ok("cluster", "show", "ours", "--measured", "--json").stdout)
    assert facts[0]["file"] == str(store) and facts[0]["values"]["doctor.hbm_gb_s"]["value"] == 3870
    whole = shell.zslurm.ok("cluster", "show", "ours").stdout
    assert f"doctor.hbm_gb_s\t3870.0\tcluster profile's measurements of 2026-11-23, {store}" in whole


def test_what_the_profile_states_wins_over_a_measurement(shell: Shell, profile: Path) -> None:
    profile.write_text(PROFILE + "    hbm_gb_s: 1234\n")
    write(shell.directory / "speed.json", result("speed", COPIES))
    shell.zslurm.ok("bench", "apply", "speed.json")
    assert load_site("ours").cluster.doctor.hbm_gb_s == 1234


def test_results_add_to_what_was_measured_of_the_same_ranks(
    shell: Shell, profile: Path, collectives: Path
) -> None:
    shell.zslurm.ok("bench", "apply", "a.json")
    write(shell.directory / "b.json", result("collectives", collective(4, 2e-4, 3e11)))
    variable = [
        row
        for value, rate in (("Ring", 2e11), ("Tree", 3e11), ("Tree", 3e11), ("Ring", 2e11))
        for row in collective(8, 2e-4, rate, environment=f"NCCL_ALGO={value}")
    ]
    write(shell.directory / "c.json", result("collectives", variable))
    shell.zslurm.ok("bench", "apply", "b.json", "c.json")
    measured = load_site("ours").cluster.measured
    assert set(measured.bucket_mb) == {2, 4} and measured.variables["NCCL_ALGO"].best == "Tree"
    other = result("collectives", collective(2, 1e-4, 3e11), machine={"gpu": "AMD Instinct MI325X"})
    write(shell.directory / "d.json", other)
    shell.zslurm.ok("bench", "apply", "d.json")
    measured = load_site("ours").cluster.measured
    assert (set(measured.bucket_mb), measured.variables) == ({2}, {}), "of other cards nothing stays"


def test_a_folder_that_cannot_be_written_gets_one_line_and_another_file_can_be_named(
    shell: Shell, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(shell.directory / "speed.json", result("speed", COPIES))
    store = measured_path("ours")
    store.mkdir()  # root may write everywhere, but not over a directory
    done = shell.zslurm("bench", "apply", "speed.json", "--out", str(store))
    assert (done.code, done.stdout) == (Exit.USAGE, "")
    assert f"{store}: cannot be read: Is a directory" in done.stderr
    store.rmdir()

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("zslurm.cluster.measurements.write_atomically", refuse)
        done = shell.zslurm("bench", "apply", "speed.json")
    assert done.code == Exit.FAILED and not store.exists()
    assert done.stderr.endswith(f"{store}: cannot be written: Permission denied; name another file with --out\n")
    shell.zslurm.ok("bench", "apply", "speed.json", "--out", "mine.json")
    assert json.loads((shell.directory / "mine.json").read_text())["profile"] == "ours" and not store.exists()


def test_a_profile_that_ships_gets_measurements_of_the_users(shell: Shell, profile: Path) -> None:
    write(shell.directory / "speed.json", result("speed", COPIES))
    shell.zslurm.ok("bench", "apply", "speed.json", "--cluster", "mi300x-pollara")
    assert load_site("mi300x-pollara").cluster.doctor.hbm_gb_s == 3870
    assert load_site("mi300x-broadcom").cluster.doctor.hbm_gb_s != 3870


def test_without_measurements_there_is_one_line(shell: Shell, profile: Path) -> None:
    done = shell.zslurm.ok("cluster", "show", "ours", "--measured")
    assert done.stdout == "" and done.stderr.startswith("nothing was measured with the profile ours")
    assert shell.zslurm("cluster", "show", "theirs", "--measured").code == Exit.NOT_FOUND


@pytest.mark.parametrize("benchmark", ["kernels", "tuning"])
def test_a_dry_run_names_the_table_that_would_be_written(shell: Shell, profile: Path, benchmark: str) -> None:
    row = {
        "operation": "muon.update", "architecture": "gfx942", "axis": "side", "fastest": "hip",
        "sizes": {"dtype": "float32", "side": 64}, "gain": 1.2, "kept": True, "solutions": [], "validators": {},
        "product": "o", "pass": "forward", "dtype": "bf16", "m": 1, "n": 1, "k": 1,
        "default_tflops": 1.0, "tflops": 1.2,
    }  # fmt: skip
    write(shell.directory / "b.json", result(benchmark, [row]))
    done = shell.zslurm.ok("bench", "apply", "b.json", "--dry-run")
    table = "kernel-tables.json" if benchmark == "kernels" else "gemm-table.json"
    path = measured_path("ours").with_suffix("") / table
    assert f"would write {path}" in done.stderr and not path.exists()
    shell.zslurm.ok("bench", "apply", "b.json")
    assert path.exists()


def test_what_cannot_be_kept_is_refused_before_it_is_measured(
    shell: Shell, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr("zslurm.cli.bench.run.launch", measure)
    measured_path("ours").with_suffix("").touch()
    done = shell.zslurm("bench", "speed", "--cluster", "ours", "--apply")
    assert done.code == Exit.USAGE and "ours.measured: cannot be written: File exists" in done.stderr


def test_the_products_of_a_recipe_are_those_of_the_cluster_that_is_measured(
    shell: Shell, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile.write_text("cluster: {gpus_per_node: 8, gpu_type: mi300x}\n")
    set_default("ours")
    assert run_named("zaya1-tiny", Measure(nodes=1)).cluster.name == "ours"
    assert run_named("zaya1-tiny", Measure()).cluster.name == "local"


def test_what_has_nothing_for_a_profile_is_refused(shell: Shell, profile: Path) -> None:
    write(shell.directory / "b.json", result("mlp", []))
    done = shell.zslurm("bench", "apply", "b.json")
    assert done.code == Exit.CHECK_FAILED and "nothing in the results is for a cluster" in done.stderr


def test_results_of_several_clusters_need_the_profiles_name(
    shell: Shell, profile: Path, collectives: Path
) -> None:
    write(shell.directory / "b.json", result("speed", COPIES, machine={"cluster": "theirs"}))
    done = shell.zslurm("bench", "apply", "a.json", "b.json")
    assert done.code == Exit.USAGE and "results of several clusters (ours, theirs)" in done.stderr


def test_plots_are_named_and_without_matplotlib_there_is_one_line(
    shell: Shell, collectives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    done = shell.zslurm.ok("bench", "plot", "a.json", "plots")
    assert (shell.directory / "plots" / "collectives-reduce_scatter.svg").exists()
    assert done.stderr.count("plot: ") == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = shell.zslurm("bench", "plot", "a.json", "plots")
    assert done.code == Exit.FAILED and done.stderr.count("\n") == 1 and "zslurm-train[plots]" in done.stderr


def test_env_shows_what_was_measured_here(shell: Shell, profile: Path) -> None:
    profile.write_text(f"{PROFILE}  env: {{NCCL_ALGO: Ring}}\n")
    rows = [
        row
        for value, rate in (("Ring", 2e11), ("Tree", 2.4e11), ("Tree", 2.4e11), ("Ring", 2e11))
        for row in collective(8, 0, rate, environment=f"NCCL_ALGO={value}")
    ]
    write(shell.directory / "c.json", result("collectives", rows))
    shell.zslurm.ok("bench", "apply", "c.json")
    text = " ".join(
        shell.zslurm.ok("cluster", "env", "--cluster", "ours", "--explain").stdout.replace("#", " ").split()
    )
    assert "measured here 2026-11-23: the bandwidth of Tree is 1.20 times that of Ring" in text
    assert "this value is the slower one: set cluster.env.NCCL_ALGO" in text
    facts = json.loads(shell.zslurm.ok("cluster", "env", "--cluster", "ours", "--json").stdout)
    assert {each["name"]: each["measured"] for each in facts}["NCCL_ALGO"]["best"] == "Tree"
