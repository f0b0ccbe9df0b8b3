"""`zslurm cluster`: what a person types, and what a script reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.cluster.places import own
from tests.config.run_files import write
from zslurm.cluster import profile
from zslurm.core.errors import Exit


@pytest.fixture(autouse=True)
def nothing_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SITE_PROFILES", tmp_path / "site")
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))


def test_ls_lists_each_name_once_with_its_place(shell: Shell, tmp_path: Path) -> None:
    write(tmp_path / "site" / "centre.yaml", "cluster: {extends: h100-ib}\nslurm: {partition: gpu, nodes: 4}\n")
    own("local", "cluster: {launcher: local, gpus_per_node: 1}\n")
    own("broken", "cluster: {gpus_per_node: x}\n")
    rows = [line.split("\t") for line in shell.zslurm("cluster", "ls").stdout.splitlines()]
    assert rows[0] == ["name", "where", "default", "launcher", "partition", "nodes", "GPUs", "network", "problem"]
    table = {row[0]: row[1:] for row in rows[1:]}
    assert len(table) == len(rows) - 1
    assert table["centre"] == ["site", "", "slurm", "gpu", "4", "8 x h100", "infiniband", ""]
    assert table["local"] == ["user", "", "local", "-", "-", "1 x GPU", "-", ""]
    assert table["mi300x-pollara"] == ["shipped", "", "slurm", "-", "-", "8 x mi300x", "pollara", ""]
    assert table["broken"][-1].startswith("not valid: ")


def test_ls_as_json(shell: Shell) -> None:
    own("lab")
    listed = json.loads(shell.zslurm("cluster", "ls", "--json").stdout)
    (lab,) = [row for row in listed if row["name"] == "lab"]
    assert (lab["default"], lab["place"], lab["launcher"], lab["fault"]) == (True, "user", "slurm", None)
    assert lab["file"].endswith("clusters/lab.yaml")


def test_show_prints_values_with_their_origins(shell: Shell) -> None:
    path = own("lab", "cluster:\n  extends: mi300x-pollara\n  interface: eno1\nslurm: {partition: gpu}\n")
    lines = shell.zslurm("cluster", "show").stdout.splitlines()
    assert f"cluster.interface\teno1\tcluster profile {path}:3" in lines
    assert f"slurm.partition\tgpu\tcluster profile {path}:4" in lines
    assert "cluster.network\tpollara\tcluster profile mi300x-pollara:10" in lines
    shown = json.loads(shell.zslurm("cluster", "show", "mi300x-pollara", "--json").stdout)
    assert shown["cluster.rails_only"] == {"value": True, "origin": "cluster profile mi300x-pollara:11"}


def test_use_chooses_the_default(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    own("one")
    own("two")
    assert shell.fails("cluster", "show")[0] == Exit.USAGE
    assert shell.zslurm("cluster", "use", "two").stderr == "two is now the default cluster\n"
    assert profile.default_name() == "two"
    monkeypatch.setenv("ZSLURM_CLUSTER", "one")
    assert "note: ZSLURM_CLUSTER=one is set and wins over it" in shell.zslurm("cluster", "use", "two").stderr
    code, line = shell.fails("cluster", "use", "tow")
    assert (code, line) == (
        Exit.NOT_FOUND,
        "zslurm: tow: no cluster profile has this name; did you mean `two`?; `zslurm init` makes one",
    )


def test_check_says_what_is_right_and_what_to_look_at(shell: Shell) -> None:
    own("desk", "cluster: {launcher: local, env: {NCCL_AGLO: Ring}}\n")
    done = shell.zslurm("cluster", "check")
    assert (done.code, done.stdout) == (0, "ok: it is valid\n")
    assert done.stderr.startswith("note: cluster.env: NCCL_AGLO=Ring: nothing is known to read this name; did you")


def test_check_ends_with_5_and_a_line_for_each_fault(shell: Shell) -> None:
    own("desk", "cluster: {launcher: local, interface: lo, storage_interface: 1.2.3.4}\n")
    done = shell.zslurm("cluster", "check", "desk")
    assert done.code == Exit.CHECK_FAILED
    assert done.stderr.splitlines() == [
        "zslurm: desk: cluster.interface: lo leads to no other node",
        "zslurm: desk: cluster.storage_interface: 1.2.3.4: not the name of a network interface, such as eth0",
    ]
    done = shell.zslurm("cluster", "check", "desk", "--json")
    assert done.code == Exit.CHECK_FAILED
    assert len(json.loads(done.stdout)["faults"]) == 2


def test_edit_takes_the_users_editor(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own("lab", "cluster: {gpus_per_node: 8}\n")
    monkeypatch.setenv("VISUAL", "/usr/bin/env -S PATH=/usr/bin:/bin sed -i s/8/4/")
    assert shell.zslurm("cluster", "edit").stderr == f"wrote {path}\n"
    assert path.read_text() == "cluster: {gpus_per_node: 4}\n"
    assert shell.zslurm("cluster", "edit", "lab").stderr == "unchanged\n"
    monkeypatch.setenv("VISUAL", "/usr/bin/env -S PATH=/usr/bin:/bin sed -i s/4/many/")
    done = shell.zslurm("cluster", "edit", "lab")
    assert done.code == Exit.USAGE
    assert len(done.stderr.splitlines()) == 2
    assert path.read_text() == "cluster: {gpus_per_node: 4}\n"


def test_init_keeps_the_profile_that_it_replaces(shell: Shell) -> None:
    path = own("local", "# precious\n")
    done = shell.zslurm("init", "--yes")
    kept = path.with_name("local.yaml~")
    assert done.code == 0
    assert f"the profile that was there is kept as {kept}" in done.stderr
    assert kept.read_text() == "# precious\n"
    assert "kept" not in shell.zslurm("init", "--yes").stderr
    assert kept.read_text() == "# precious\n"


def test_a_probe_needs_slurm(shell: Shell) -> None:
    code, line = shell.fails("init", "--probe", "--yes")
    assert code == Exit.SLURM_UNAVAILABLE
    assert "there is no Slurm on this machine to run a probe with" in line
