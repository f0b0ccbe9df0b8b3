"""`zslurm cluster env`: lines for a shell, reasons for a person, JSON for a program."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.cluster.places import own
from zslurm.cluster.rccl.lint import concerns_us
from zslurm.core.errors import Exit


@pytest.fixture(autouse=True)
def nothing_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine that runs the tests is checked."""
    for name in [name for name in os.environ if concerns_us(name)]:
        monkeypatch.delenv(name)


def test_a_shell_gets_the_variables(shell: Shell) -> None:
    hostile = 'interface: "it\'s $HOME `x`", env: {A: "\'; exit 3; \'"}'
    own("lab", f"cluster: {{extends: mi300x-pollara, {hostile}}}\n")
    lines = shell.zslurm("cluster", "env").stdout
    done = subprocess.run(
        [
            "bash",
            "-euc",
            'eval "$1"; printf "%s\\n" "$NCCL_PXN_DISABLE" "$NCCL_SOCKET_IFNAME" "$A"',
            "bash",
            lines,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["0", "=it's $HOME `x`", "'; exit 3; '"]
    assert "\nexport NCCL_PXN_DISABLE=0\n" in lines


def test_nothing_is_left_for_a_shell_to_expand(shell: Shell) -> None:
    """zsh takes a bare `=eth0` for the path of a program of that name."""
    done = shell.zslurm("cluster", "env", "--cluster", "h100-ib", "--set", "cluster.interface=eth0")
    assert "export NCCL_SOCKET_IFNAME='=eth0'" in done.stdout.splitlines()
    done = shell.zslurm("cluster", "env", "--cluster", "local", "--set", "cluster.env.A=''")
    assert done.stdout == "export A=''\n"


def test_explain_adds_reason_source_and_origin_as_comments(shell: Shell) -> None:
    path = own("lab", "cluster:\n  extends: h100-ib\n  env: {NCCL_IB_TIMEOUT: 22, X: y}\n")
    lines = shell.zslurm("cluster", "env", "--explain").stdout.splitlines()
    at = lines.index("export NCCL_IB_RETRY_CNT=7")
    assert lines[at - 3] == "# the most that a NIC takes; NCCL_IB_TIMEOUT is computed for it"
    assert lines[at - 2] == "#   source: NCCL user guide, NCCL_IB_RETRY_CNT"
    assert lines[at - 1] == "#   origin: rule (zslurm/cluster/rccl/rules.yaml)"
    at = lines.index("export NCCL_IB_TIMEOUT=22")
    assert "# instead of the rule's 21: a link that flaps" in "\n".join(lines[:at])
    comments = " ".join(line.removeprefix("#").strip() for line in lines[:at])  # long ones are broken
    assert comments.endswith(f"origin: cluster profile {path}:3")
    assert all(line.startswith(("#", "export ")) for line in lines)


def test_hostile_text_stays_in_its_comment(shell: Shell) -> None:
    own("lab", "cluster: {gpus_per_node: 1, env: {A: x}}\n")
    done = shell.zslurm("cluster", "env", "--explain", "--set", "cluster.env.B='$(touch trapped)'")
    subprocess.run(["bash", "-c", done.stdout], cwd=shell.directory, check=True)
    assert not (shell.directory / "trapped").exists()


def test_secrets_of_a_profile_are_not_shown(shell: Shell) -> None:
    own("lab", "cluster: {launcher: local, env: {HF_TOKEN: abcdef123, A: x}}\n")
    own("other", "cluster: {launcher: local}\n")
    done = shell.zslurm("cluster", "env", "--cluster", "lab")
    assert done.stdout == "export A=x\n"
    assert done.stderr == "note: HF_TOKEN is left out: it looks like a secret\n"
    others = [
        ("cluster", "env", "--cluster", "lab", "--json"),
        ("cluster", "env", "--cluster", "lab", "--diff", "other"),
    ]
    for command in (*others, ("cluster", "show", "lab"), ("cluster", "show", "lab", "--json")):
        assert "abcdef123" not in shell.zslurm(*command).stdout


def test_as_json(shell: Shell) -> None:
    settings = json.loads(shell.zslurm("cluster", "env", "--cluster", "h100-ib", "--json").stdout)
    (debug,) = [setting for setting in settings if setting["name"] == "NCCL_DEBUG"]
    assert set(debug) == {"name", "value", "reason", "source", "origin", "measured"}
    assert debug["value"] == "WARN"


def test_the_difference_of_two_profiles(shell: Shell) -> None:
    lines = shell.zslurm(
        "cluster", "env", "--cluster", "mi300x-pollara", "--diff", "mi300x-broadcom"
    ).stdout.splitlines()
    assert lines[0] == "variable\tmi300x-pollara\tmi300x-broadcom"
    assert "NCCL_IB_GID_INDEX\t1\t3" in lines
    assert "NCCL_PXN_DISABLE\t0\t-" in lines
    assert not [line for line in lines if line.startswith("NCCL_IB_TIMEOUT")]
    same = shell.zslurm("cluster", "env", "--cluster", "local", "--diff", "local", "--json")
    assert json.loads(same.stdout) == {}


def test_lint_checks_the_shell_and_ends_with_5_on_faults(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    done = shell.zslurm("cluster", "env", "--cluster", "mi300x-pollara", "--lint")
    assert (done.code, done.stdout, done.stderr) == (0, "", "")
    monkeypatch.setenv("NCCL_AGLO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    done = shell.zslurm("cluster", "env", "--cluster", "mi300x-pollara", "--lint")
    assert done.code == 0
    assert done.stderr.splitlines() == [
        "warning: NCCL_AGLO=Ring: nothing is known to read this name; did you mean NCCL_ALGO?",
        "note: NCCL_DEBUG=INFO: the job sets WARN; to keep yours, put it into cluster.env",
    ]
    monkeypatch.setenv("NCCL_PXN_DISABLE", "1")
    done = shell.zslurm("cluster", "env", "--cluster", "mi300x-pollara", "--lint")
    assert done.code == Exit.CHECK_FAILED
    assert done.stderr.splitlines()[-1].startswith("zslurm: NCCL_PXN_DISABLE=1: there is no path from one rail")
    found = json.loads(shell.zslurm("cluster", "env", "--cluster", "mi300x-pollara", "--lint", "--json").stdout)
    assert [finding["level"] for finding in found] == ["fault", "warning", "note"]


def test_an_unknown_profile_is_refused(shell: Shell) -> None:
    assert shell.fails("cluster", "env", "--cluster", "h100-bi")[0] == Exit.NOT_FOUND
    assert shell.fails("cluster", "env", "--cluster", "h100-ib", "--diff", "nonesuch")[0] == Exit.NOT_FOUND
    assert shell.fails("cluster", "env", "--cluster", "h100-ib", "--set", "cluster.nisc=1")[0] == Exit.USAGE


def test_a_submission_reports_what_ranks_would_suffer_from(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login shell's variables reach the job if it sets nothing itself."""
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "30")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run_file = shell.write_run(cluster={"launcher": "slurm", "gpus_per_node": 4, "gpu_type": "mi300x"})
    done = shell.zslurm("submit", "--dry-run", run_file)
    assert "# note: NCCL_IB_TIMEOUT=30: 4.096 us * 2^30 * 7 retries is 8h 33m on a peer" in done.stdout
    assert "# note: NCCL_DEBUG=INFO: the job sets WARN" in done.stdout


def test_a_dry_run_shows_each_variable_with_its_origin(shell: Shell) -> None:
    cluster = {"launcher": "slurm", "gpus_per_node": 4, "gpu_type": "mi300x", "env": {"MINE": "x"}}
    run_file = shell.write_run(cluster=cluster)
    lines = shell.zslurm("submit", "--dry-run", run_file).stdout.splitlines()
    assert any(line.startswith("#   HSA_NO_SCRATCH_RECLAIM=1    [rule: reclaiming scratch") for line in lines)
    assert any(line.startswith("#   MINE=x    [run file ") for line in lines)
    shown = json.loads(shell.zslurm("submit", "--dry-run", "--json", run_file).stdout)
    assert shown["environment"]["MINE"] == "x"
    assert shown["environment_origins"]["PYTHONSAFEPATH"] == "zslurm"
    assert shown["environment_origins"]["MINE"].startswith("run file ")


def test_explain_lists_the_rules_that_the_profile_leaves_out(shell: Shell) -> None:
    lines = shell.zslurm("cluster", "env", "--cluster", "mi300x-pollara", "--explain").stdout.splitlines()
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    for variable, key in (
        ("GLOO_SOCKET_IFNAME", "cluster.interface"),
        ("NCCL_SOCKET_IFNAME", "cluster.interface"),
        ("NCCL_IB_HCA", "cluster.nics"),
    ):
        assert f"left out: {variable} is not set: the profile does not give {key} (" in text
    assert "left out" not in shell.zslurm("cluster", "env", "--cluster", "mi300x-pollara").stdout


def test_lint_reads_the_files_that_rccl_reads(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".rccl.conf").write_text("NCCL_IB_DISABLE=1\n")
    done = shell.zslurm("cluster", "env", "--cluster", "mi300x-pollara", "--lint")
    assert done.code == Exit.CHECK_FAILED
    assert f"NCCL_IB_DISABLE=1: everything between nodes goes over TCP sockets (set in {tmp_path}" in done.stderr
