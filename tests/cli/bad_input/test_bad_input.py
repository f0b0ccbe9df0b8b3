"""Every bad input is one clear line on stderr with its documented exit code, and nothing is written.

tests/config has every kind of wrong value; here each reaches the user through the real commands.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import PHASE, Shell, check_refused, separate_zslurm
from tests.train.runs import make_corpus
from zslurm.core.errors import Exit

# Commands that read a run file, up to the point where it is refused.
READERS = [("submit",), ("submit", "--dry-run"), ("config", "show")]


# --- the run file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", READERS)
def test_a_missing_run_file(shell: Shell, command: tuple[str, ...]) -> None:
    assert shell.fails(*command, "none.yaml") == (Exit.NOT_FOUND, "zslurm: none.yaml: no such file")


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  name: x\n model: {}\n", "run.yaml:3: not valid YAML: expected <block end>, but found '<block "),
        (
            "extends: zaya1-tiny\nmodel:\n  hiden_size: 1\n",
            "run.yaml:3: model.hiden_size: unknown key; did you mean",
        ),
        (
            "extends: zaya1-tyni\n",
            "run.yaml:1: extends: no recipe and no file is called `zaya1-tyni`; did you mean",
        ),
    ],
)
def test_a_wrong_run_file(shell: Shell, command: tuple[str, ...], text: str, message: str) -> None:
    (shell.directory / "run.yaml").write_text(text)
    code, line = shell.fails(*command, "run.yaml", "--cluster", "local")
    assert code == Exit.USAGE
    assert line.startswith(f"zslurm: {message}")


@pytest.mark.parametrize("name", [".", "binary.yaml"])
def test_what_is_no_text_file(shell: Shell, name: str) -> None:
    (shell.directory / "binary.yaml").write_bytes(b"\xff\xfe")
    code, line = shell.fails("submit", name)
    assert code == Exit.USAGE
    assert line.startswith(f"zslurm: {name}: ")


@pytest.mark.parametrize("setting", ["nonsense", "slurm.nodes=0"])
def test_a_wrong_override(shell: Shell, setting: str) -> None:
    shell.write_run()
    code, line = shell.fails("submit", "run.yaml", "--set", setting)
    assert code == Exit.USAGE
    assert line.startswith("zslurm: --set ")


# --- data -------------------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("command", [("submit",), ("submit", "--dry-run")])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "no such file"),
        (_truncate, "truncated"),
    ],
)
def test_data_that_cannot_be_read(
    shell: Shell, command: tuple[str, ...], spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(shell.directory / "tokens.h5")
    code, line = shell.fails(*command, shell.write_run())
    assert code == Exit.USAGE
    assert line.startswith(f"zslurm: data.path: {shell.directory}/tokens.h5: ")
    assert message in line


@pytest.mark.parametrize("command", [("submit",), ("submit", "--dry-run")])
def test_data_that_does_not_fit_the_model(shell: Shell, command: tuple[str, ...]) -> None:
    code, line = shell.fails(*command, shell.write_run(model={"vocab_size": 63}))
    assert code == Exit.USAGE
    assert "vocabulary of 64 tokens, more than the model's 63" in line
    code, line = shell.fails(*command, shell.write_run(phases=[PHASE | {"context": 5000}]))
    assert code == Exit.USAGE
    assert "holds 4000 tokens, but one sequence of context 5000 needs 5001" in line


def test_no_data_at_all(shell: Shell) -> None:
    assert shell.fails("submit", shell.write_run(data={"path": None})) == (
        Exit.USAGE,
        "zslurm: data.path: required, but not given; make a token bundle with `zslurm data build`",
    )


def test_validation_data_of_another_tokenizer(shell: Shell) -> None:
    """Whoever finds out after hours in the queue has waited for nothing."""
    make_corpus(shell.directory / "other.h5", tokenizer="b" * 64)
    shell.write_run(evaluation={"data": "other.h5"})
    for command in (("submit", "--dry-run"), ("submit",)):
        code, message = shell.fails(*command, "run.yaml")
        assert code == Exit.USAGE
        assert message.startswith(
            f"zslurm: evaluation.data: {shell.directory}/other.h5: made with another tokenizer"
        )


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ("25:20", "--profile: metrics: profile (25:20) must be FIRST:LAST with 1 <= FIRST <= LAST"),
        ("8:20", "--profile: metrics.profile (8:20) ends after the last step, 10"),
        ("soon", "--profile: metrics: profile (soon) must be FIRST:LAST, two numbers of steps"),
    ],
)
def test_a_bad_window_of_steps_to_profile(shell: Shell, window: str, message: str) -> None:
    shell.write_run()
    assert shell.fails("submit", "run.yaml", "--profile", window) == (Exit.USAGE, f"zslurm: {message}")


def test_data_commands_refuse_what_is_no_data(shell: Shell) -> None:
    (shell.directory / "tokens.h5").write_text("PAR1")
    assert shell.fails("data", "show", "tokens.h5")[0] == Exit.USAGE
    assert shell.fails("data", "verify", "tokens.h5")[0] == Exit.CHECK_FAILED
    assert shell.fails("data", "show", "none.h5")[0] == Exit.NOT_FOUND
    assert shell.fails("data", "build", "none", "--out", "out", "--vocab-size", "600")[0] == Exit.NOT_FOUND


# --- places and machines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs_dir", ["tokens.h5/runs", "/proc/runs"])
def test_a_run_directory_that_is_not_writable(shell: Shell, runs_dir: str) -> None:
    code, line = shell.fails("submit", shell.write_run(run={"runs_dir": runs_dir}))
    assert code == Exit.USAGE
    assert "the run directory is not writable; set run.runs_dir to a directory of yours" in line


@pytest.fixture
def no_slurm(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH without Slurm."""
    programs = shell.directory.parent / "bin"
    programs.mkdir()
    for program in ("env", "git"):
        (programs / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(programs))


@pytest.mark.usefixtures("no_slurm")
def test_without_slurm_a_slurm_run_is_refused_and_a_dry_run_works(shell: Shell) -> None:
    run_file = shell.write_run(cluster={"launcher": "slurm"})
    code, line = shell.fails("submit", run_file)
    assert code == Exit.SLURM_UNAVAILABLE
    assert line.startswith("zslurm: sbatch: not found on this machine; submit from a login node, or use --cluster")
    before = shell.everything()
    done = shell.zslurm("submit", run_file, "--dry-run")
    assert (done.code, done.stderr) == (0, "")
    assert "#SBATCH --job-name=tiny" in done.stdout
    assert shell.everything() == before


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize("command", READERS)
def test_without_any_profile(shell: Shell, command: tuple[str, ...]) -> None:
    code, line = shell.fails(*command, shell.write_run(cluster={"name": None}))
    assert code == Exit.USAGE
    assert line == (
        "zslurm: no cluster profile yet: run `zslurm init` on a login node, "
        "or train on this machine with --cluster local"
    )


@pytest.mark.parametrize("command", READERS)
def test_an_unknown_profile(shell: Shell, command: tuple[str, ...]) -> None:
    code, line = shell.fails(*command, shell.write_run(), "--cluster", "locla")
    assert code == Exit.NOT_FOUND
    assert (
        line == "zslurm: locla: no cluster profile has this name; did you mean `local`?; `zslurm init` makes one"
    )


def test_an_unknown_template(shell: Shell) -> None:
    run_file = shell.write_run(cluster={"launcher": "slurm", "template": "nonesuch"})
    for command in (("submit", "--dry-run", run_file), ("config", "template", "show", "nonesuch")):
        code, line = shell.fails(*command)
        assert code == Exit.NOT_FOUND
        assert line == "zslurm: nonesuch: no template and no file has this name; templates: local, train"


@pytest.mark.parametrize("reference", ["987654", "no/such/run", ""])
@pytest.mark.parametrize("command", ["status", "logs", "cancel", "requeue"])
def test_an_unknown_job_or_run(shell: Shell, command: str, reference: str) -> None:
    code, line = shell.fails(command, reference)
    assert code == Exit.NOT_FOUND
    assert line.startswith(f"zslurm: {reference}: no run ")


def test_a_run_that_never_started_has_no_log(shell: Shell) -> None:
    run = shell.directory / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    assert shell.fails("logs", "r") == (Exit.NOT_FOUND, "zslurm: r: no log yet; see why with `zslurm status r`")
    code, line = shell.fails("aegis", "run", "elsewhere")
    assert (code, line) == (
        Exit.NOT_FOUND,
        "zslurm: elsewhere: not a run directory (it has no config.json)",
    )


# --- the command line itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sumbit", "run.yaml"), "No such command 'sumbit'. Did you mean 'submit'?"),
        (("submit",), "Invalid value: give a RUN_FILE, or a program behind `--`"),
        (("submit", "run.yaml", "--nodes", "0"), "Invalid value for '-N' / '--nodes'"),
        (("submit", "run.yaml", "--nodes", "-3"), "Invalid value for '-N' / '--nodes'"),
        (("submit", "run.yaml", "--nodes", "two"), "Invalid value for '-N' / '--nodes'"),
        (("submit", "run.yaml", "--dryrun"), "No such option: --dryrun"),
        (("submit", "run.yaml", "other.yaml"), "other.yaml: not a long option of sbatch"),
        (("config", "show", "run.yaml", "other.yaml"), "Got unexpected extra argument"),
        (("logs", "x", "--rank", "-1"), "--rank -1: expected ranks such as 0,8-15"),
        (("logs", "x", "--rank", "9" * 5000), f"--rank {'9' * 57}...: expected ranks such as 0,8-15"),
        (("config", "shwo"), "No such command 'shwo'. Did you mean 'show'?"),
        (("data", "build", "texts", "--out", "x", "--vocab-size", "5"), "Invalid value for '--vocab-size'"),
    ],
)
def test_a_wrong_command_line(shell: Shell, arguments: tuple[str, ...], message: str) -> None:
    shell.write_run()
    code, line = shell.fails(*arguments)
    assert code == Exit.USAGE
    assert line.startswith(f"zslurm: {message}")


def test_what_the_file_system_refuses_is_one_line_too(shell: Shell) -> None:
    code, line = shell.fails("config", "template", "show", "x" * 300)
    assert code == Exit.FAILED
    assert line.endswith(": File name too long")


def test_a_reference_that_is_too_long_for_a_name_names_the_length(shell: Shell) -> None:
    code, line = shell.fails("status", "x" * 300)
    assert code == Exit.NOT_FOUND
    assert line.endswith("a run's name has at most 100 characters, this has 300")


def test_a_profile_of_slurm_that_is_missing_is_a_matter_of_configuration(shell: Shell) -> None:
    """Its exit code is 2 and not 4, which is for a Slurm that does not answer: trying again does not help."""
    code, line = shell.fails("cluster", "env")
    assert (code, line.startswith("zslurm: no cluster profile yet: ")) == (Exit.USAGE, True)


@pytest.mark.parametrize("command", [("cluster", "rails"), ("doctor",)])
@pytest.mark.parametrize("nodes", ["node[1-", "node[3-1]", ""])
def test_a_broken_list_of_nodes_is_usage(shell: Shell, command: tuple[str, ...], nodes: str) -> None:
    assert shell.fails(*command, "--cluster", "local", "--nodelist", nodes)[0] == Exit.USAGE


def test_a_vocabulary_that_is_smaller_than_asked_says_why(shell: Shell) -> None:
    (shell.directory / "few.txt").write_text("the same few words, the same few words\n" * 3)
    done = shell.zslurm("data", "build", "few.txt", "--out", "few", "--vocab-size", "4096")
    assert done.code == 0
    assert (
        "not 4096: an entry joins two that occur together at least twice, and the text has no more" in done.stderr
    )


def test_the_list_of_checks_is_json_where_that_is_asked_for(shell: Shell) -> None:
    rows = json.loads(shell.zslurm("doctor", "--list", "--json").stdout)
    assert {"check", "group", "where", "about", "on_request"} == set(rows[0])
    assert "memlock" in [row["check"] for row in rows]


# --- hostile text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        *("run.name", "run.runs_dir", "data.path", "cluster.env.A", "cluster.setup", "cluster.interface"),
        *("cluster.template", "cluster.name", "slurm.job_name", "slurm.account", "slurm.partition"),
        *("slurm.nodelist", "slurm.flags.comment"),
    ],
)
def test_a_line_break_is_refused_everywhere(shell: Shell, key: str) -> None:
    section, _, name = key.partition(".")
    value = '"a\\ntouch trapped"'
    text = f"[{value}]" if key == "cluster.setup" else value
    code, line = shell.fails("submit", "--dry-run", shell.write_run(), "--set", f"{section}.{name}={text}")
    assert code in (Exit.USAGE, Exit.NOT_FOUND)
    assert line.isprintable()
    assert not (shell.directory / "trapped").exists()


@pytest.mark.parametrize(
    "text", ["$(touch trapped)", "`touch trapped`", "'; touch trapped; '", '"; touch trapped; "']
)
def test_a_dry_run_of_hostile_text_runs_nothing_even_in_a_shell(shell: Shell, text: str) -> None:
    """Somebody pipes the dry run into bash: its comments stay comments, its values stay values."""
    run_file = shell.write_run(
        slurm={"job_name": text, "account": text, "flags": {"comment": text}},
        cluster={"launcher": "slurm", "env": {"A": text}, "interface": text},
        run={"name": "tiny", "runs_dir": f"runs {text}".replace("/", "")},
        phases=[PHASE | {"name": f"{text}\ntouch trapped\n"}],
    )
    renamed = run_file.rename(run_file.with_name(f"x {text}\ntouch trapped #".replace("/", "")))
    done = shell.zslurm("submit", "--dry-run", renamed)
    assert (done.code, done.stderr) == (0, "")
    script = done.stdout.replace("submitit.core._submit", "zslurm_nonesuch").replace("-lt 20", "-lt 1")
    assert '[ ! -e "$call" ]' in script  # the job waits for its submission, of which there is none
    script = script.replace('[ ! -e "$call" ]', "false")
    subprocess.run(["bash"], input=script, text=True, cwd=shell.directory, capture_output=True, timeout=60)
    assert not list(shell.directory.rglob("trapped"))


# --- and all of that in a separate process ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("submit", "none.yaml"), Exit.NOT_FOUND),
        (("submit", "run.yaml", "--set", "model.layers=0"), Exit.USAGE),
        (("submit", "run.yaml", "--set", "cluster.launcher=slurm"), Exit.SLURM_UNAVAILABLE),
        (("submit", "run.yaml", "--nodes", "0"), Exit.USAGE),
        (("status", "987654"), Exit.NOT_FOUND),
    ],
)
def test_a_separate_process_refuses_alike(shell: Shell, arguments: tuple[str, ...], code: Exit) -> None:
    shell.write_run()
    before = shell.everything()
    done = separate_zslurm(*arguments, cwd=shell.directory, PATH="/nonexistent")
    check_refused(done)
    assert done.code == code
    assert shell.everything() == before


# --- values that are no names and no numbers --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("bench", "compare", "", "other.json"), ".: cannot be read: Is a directory"),
        (("bench", "plot", "", "plots"), ".: cannot be read: Is a directory"),
        (("bench", "gemm", "--quick", "--out="), ": the result cannot be written: it is a directory"),
        (("bench", "gemm", f"--m={'9' * 5000}"), f"--m {'9' * 40}: expected numbers from 1 to 1,048,576"),
    ],
)
def test_an_empty_name_and_an_endless_number(shell: Shell, command: tuple[str, ...], message: str) -> None:
    code, line = shell.fails(*command)
    assert code == Exit.USAGE
    assert message in line
    assert not list(shell.directory.glob(".*partial*"))
