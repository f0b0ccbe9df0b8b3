"""A secret reaches the job, and lies nowhere but in one file that only its owner can read."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.submit.local_runs import LocalUser
from tests.submit.scripted_slurm import BAD_TIME, CANCELLED, ScriptedSlurm
from tests.submit.specs import run_spec
from tests.train.runs import make_corpus
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, SlurmRefused
from zslurm.run.run_dir import RunDir
from zslurm.run.secrets import read_secrets, with_secrets, write_secrets
from zslurm.submit.script.render import render
from zslurm.submit.submit import submit
from zslurm.train.jsonl import read_jsonl

TOKEN = "hf_" + "AbCd" * 8 + "xY"
PASSWORD = 'it\'s $HOME; `touch trapped` "x"'
ENV = {"HF_TOKEN": TOKEN, "DB_PASSWORD": PASSWORD, "INNOCENT": f"Bearer {TOKEN}", "LEVEL": "3"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    make_corpus(tmp_path / "tokens.h5")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return ScriptedSlurm(tmp_path / "bin", monkeypatch)


def spec_of(directory: Path, **cluster: Any) -> RunSpec:
    return run_spec(directory, cluster={"name": "lab", "launcher": "slurm", "env": ENV, **cluster})


def holders(directory: Path, secret: str) -> list[str]:
    """Names of the files below a directory that hold a text."""
    found = [path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    return sorted(path.name for path in found)


def test_only_one_closed_file_of_the_run_directory_holds_secrets(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    spec = spec_of(tmp_path).model_copy(
        update={"run": spec_of(tmp_path).run.model_copy(update={"group_readable": True})}
    )
    run = submit(spec).run
    assert holders(run.path, TOKEN) == ["secrets.env"]
    assert holders(run.path, "touch trapped") == ["secrets.env"]
    assert stat.S_IMODE(run.secrets.stat().st_mode) == 0o600
    assert TOKEN not in slurm.submitted, "Slurm keeps the script"
    assert "LEVEL=3" in slurm.submitted
    assert json.loads(run.config.read_text())["cluster"]["env"]["HF_TOKEN"] == "[redacted]"
    assert with_secrets(load_spec(run.config), run.secrets) == spec


def test_the_script_gives_the_job_every_value_to_the_character(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    run = RunDir(tmp_path / "a b")
    run.create(group_readable=False)
    write_secrets(run.secrets, {name: ENV[name] for name in ("HF_TOKEN", "DB_PASSWORD", "INNOCENT")})
    script = render(spec, run, command='sh -c \'env -0 > dump; echo 0 > "$1"\' supervisor "$over"')
    subprocess.run(
        ["bash"],
        input=script.text,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        check=True,
    )
    variables = dict(entry.split("=", 1) for entry in (tmp_path / "dump").read_text().split("\0") if entry)
    assert {name: variables[name] for name in ENV} == ENV
    assert not list(tmp_path.rglob("trapped"))


def test_a_job_without_its_file_of_secrets_stops_at_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    script = render(spec_of(tmp_path), run, command="touch started")
    done = subprocess.run(
        ["bash"], input=script.text, text=True, cwd=tmp_path, env={"SLURM_JOB_ID": "7"}, capture_output=True
    )
    assert done.returncode == 1
    assert "secrets.env" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_changed_secret_is_told_but_not_shown(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path)).run
    slurm.gives(CANCELLED)
    assert submit(spec_of(tmp_path)).changed == []
    again = submit(spec_of(tmp_path, env={**ENV, "HF_TOKEN": "another-one", "LEVEL": "4"}))
    assert again.changed == [
        'cluster.env.HF_TOKEN: "[redacted]" -> "[redacted]"',
        'cluster.env.LEVEL: "3" -> "4"',
    ]
    assert read_secrets(run.secrets)["HF_TOKEN"] == "another-one"
    assert holders(run.path, "another-one") == ["secrets.env"]
    assert not any(TOKEN in json.dumps(line) for line in read_jsonl(run.submissions))


def test_a_refused_submission_leaves_the_accepted_secrets(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path)).run
    slurm.refuses(BAD_TIME)
    with pytest.raises(SlurmRefused):
        submit(spec_of(tmp_path, env={"HF_TOKEN": "another-one"}))
    assert read_secrets(run.secrets) == {name: ENV[name] for name in ("HF_TOKEN", "DB_PASSWORD", "INNOCENT")}
    assert stat.S_IMODE(run.secrets.stat().st_mode) == 0o600


def test_a_run_without_secrets_has_no_such_file(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path)).run
    slurm.gives(CANCELLED)
    submit(spec_of(tmp_path, env={"LEVEL": "3"}))
    assert not run.secrets.exists()
    assert "secrets.env" not in run.script.read_text()


def test_what_is_gone_cannot_be_made_up(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path)).run
    run.secrets.unlink()
    with pytest.raises(
        ConfigError, match=r"secrets\.env: the value of HF_TOKEN, DB_PASSWORD, INNOCENT is not there"
    ):
        with_secrets(load_spec(run.config), run.secrets)


@pytest.mark.parametrize(
    ("sections", "key", "what"),
    [
        ({"cluster": {"setup": ["true", f"login {TOKEN}"]}}, "cluster.setup[1]", "a Hugging Face token"),
        ({"cluster": {"setup": ["export WANDB_API_KEY=0123abc"]}}, "cluster.setup[0]", "a secret, by the name"),
        ({"slurm": {"flags": {"comment": f"x {TOKEN}"}}}, "slurm.flags.comment", "a Hugging Face token"),
        ({"cluster": {"setup": ["git clone https://me:pw@host"]}}, "cluster.setup[0]", "a URL with a password"),
    ],
)  # fmt: skip
def test_a_secret_in_any_other_key_is_refused(
    tmp_path: Path, slurm: ScriptedSlurm, sections: dict[str, Any], key: str, what: str
) -> None:
    cluster = {"name": "lab", "launcher": "slurm", **sections.pop("cluster", {})}
    with pytest.raises(ConfigError) as caught:
        submit(run_spec(tmp_path, cluster=cluster, **sections))
    assert str(caught.value).startswith(f"{key}: holds {what}")
    assert TOKEN not in str(caught.value)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_secret_that_is_only_referred_to_is_fine(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    submit(
        run_spec(
            tmp_path, cluster={"name": "lab", "launcher": "slurm", "setup": ['export HF_TOKEN="$(cat ~/.t)"']}
        )
    )


def test_a_local_requeue_gives_the_secret_again(tmp_path: Path) -> None:
    """It submits what config.json has, where a placeholder stands for the secret."""
    user = LocalUser(tmp_path)
    seen = tmp_path / "seen"
    cluster = {"env": {"HF_TOKEN": TOKEN}, "setup": [f'echo "$HF_TOKEN" >> {seen}']}
    try:
        user.zslurm("submit", user.write_run("again", cluster=cluster))
        user.wait_for_step("again", 2)
        user.zslurm("requeue", "again")
        user.wait_for_step("again", user.steps("again")[-1]["step"], attempt=2)
        user.zslurm("cancel", "again", "--wait")
    finally:
        user.close()
    assert seen.read_text().splitlines() == [TOKEN, TOKEN]
    assert holders(user.run_dir("again").path, TOKEN) == ["secrets.env"]
