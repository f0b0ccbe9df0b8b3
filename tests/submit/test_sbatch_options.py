"""The table of sbatch's options: whatever uses one of them derives it from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.submit.specs import run_spec
from zslurm.cli.commands import load
from zslurm.cli.run.submission import sbatch_flags
from zslurm.cluster.site import Site
from zslurm.config.layers import parse_path
from zslurm.config.spec import RunSpec, SlurmSection
from zslurm.core.errors import ConfigError
from zslurm.run.run_dir import RunDir
from zslurm.slurm.sbatch_options import BY_NAME, OPTIONS, RESERVED, SbatchOption, carried_by
from zslurm.submit.plugin.parameters import SET_BY_SUBMITIT
from zslurm.submit.script.render import directives

OPTION_ID = {"ids": lambda option: option.name}
GIVEN = {"nodes": 3, "ranks_per_node": 2, "cpus_per_task": 5, "mem": "7G", "time": "60", "export": "NONE"}
"""Values of keys that take no free text."""


@pytest.mark.parametrize("option", OPTIONS, **OPTION_ID)
def test_an_option_is_a_key_a_line_of_the_script_and_an_option_of_submit(
    option: SbatchOption, tmp_path: Path
) -> None:
    """Three files at most: the table, the section `slurm`, and `submit`; all else follows from the row."""
    if option.key:
        assert option.key in SlurmSection.model_fields
        spec = run_spec(
            tmp_path,
            cluster={"name": "lab", "launcher": "slurm"},
            slurm={option.key: GIVEN.get(option.key, "node7")},
        )
        lines = dict(directives(spec, RunDir(tmp_path / "run")))
        assert str(lines[option.name]) == str(GIVEN.get(option.key, "node7"))
    typed = {name: each for each in load("submit").params for name in each.opts}
    for name in option.typed:
        assert typed[name].help == option.help
        assert typed[name].metavar == option.metavar
    if option.typed:
        section, key, *_ = parse_path(option.run_key)
        assert str(key) in RunSpec.model_fields[str(section)].annotation.model_fields  # type: ignore[union-attr]


@pytest.mark.parametrize("option", OPTIONS, **OPTION_ID)
def test_what_the_program_decides_is_no_flag_of_the_users(option: SbatchOption) -> None:
    if option.name in RESERVED:
        with pytest.raises(ConfigError, match=f"--{option.name}: zslurm sets it itself"):
            sbatch_flags([f"--{option.name}=1"])
        with pytest.raises(ValueError, match=f"zslurm sets --{option.name} itself"):
            SlurmSection(flags={option.name: "1"})
    else:
        assert sbatch_flags([f"--{option.name}=1"]) == {option.name: "1"}
        assert SlurmSection(flags={option.name: "1"}).flags == {option.name: "1"}


def test_other_jobs_carry_the_same_options() -> None:
    names = {job: {option.name for option in carried_by(job)} for job in ("command", "function", "probe")}
    assert names["probe"] == {"partition", "account", "qos", "constraint"}
    assert names["command"] == names["probe"] | {"exclude"}
    assert names["function"] == names["command"] | {"nodelist"}
    site = Site(slurm=SlurmSection(partition="gpu", constraint="mi300x", exclude="node1"))
    assert site.submit_options() == ["--partition=gpu", "--constraint=mi300x"]
    assert set(SET_BY_SUBMITIT) <= set(BY_NAME)
