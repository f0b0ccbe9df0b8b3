"""A user's own templates win, may change one block of ours, and are checked before a run is lost to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.rails.fabrics import published_form
from tests.submit.scripted_slurm import ScriptedSlurm
from tests.submit.specs import run_spec
from tests.train.runs import make_corpus
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, NotFound
from zslurm.run.run_dir import RunDir
from zslurm.submit.script.render import render, template_of
from zslurm.submit.script.template_check import TemplateFinding, check_template
from zslurm.submit.script.templates import find_template, shipped_templates, user_templates_dir
from zslurm.submit.submit import submit

ON_SLURM = {"launcher": "slurm", "gpus_per_node": 8, "interface": "eth0", "setup": ["ulimit -n 4096"]}
EXTENDS = '{% extends "train.sbatch.j2" %}\n'


def own(name: str, text: str) -> Path:
    """A template of the user's."""
    path = user_templates_dir() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def spec_of(directory: Path, **cluster: Any) -> RunSpec:
    return run_spec(directory, cluster={**ON_SLURM, **cluster}, slurm={"time": "1:00:00"})


def script_of(spec: RunSpec) -> str:
    return render(spec, RunDir(Path("/runs/tiny"))).text


def findings(spec: RunSpec) -> list[TemplateFinding]:
    return check_template(template_of(spec), spec, RunDir(Path("/runs/tiny")))[1]


def errors(spec: RunSpec) -> list[str]:
    return [finding.message for finding in findings(spec) if finding.level == "error"]


# --- finding and extending ------------------------------------------------------------------------------------


def test_a_template_of_the_users_hides_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    path = own("train.sbatch.j2", EXTENDS + "{% block about %}\n# mine\n{% endblock %}\n")
    template = find_template("train")
    assert (template.owner, template.place) == ("yours", str(path))
    assert script_of(spec_of(tmp_path)).startswith("#!/bin/bash\n# mine\n#SBATCH --job-name=tiny\n")
    path.unlink()
    assert find_template("train") == shipped_templates()["train"]


def test_a_block_keeps_what_it_had_with_super_and_the_rest_stays_as_shipped(tmp_path: Path) -> None:
    before = script_of(spec_of(tmp_path))
    own("train.sbatch.j2", EXTENDS + "{% block setup %}\n{{ super() }}\nmodule load site\n{% endblock %}\n")
    after = script_of(spec_of(tmp_path)).splitlines()
    added = [line for line in after if line not in before.splitlines()]
    assert added == ["module load site"]
    assert after.index("ulimit -n 4096") < after.index("module load site")


def test_templates_may_extend_and_include_their_neighbours(tmp_path: Path) -> None:
    own("site.sbatch.j2", EXTENDS + '{% block setup %}\n{% include "lines.j2" %}\n{% endblock %}\n')
    own("lines.j2", "echo neighbour\n")
    path = tmp_path / "mine.sbatch.j2"
    path.write_text('{% extends "site.sbatch.j2" %}\n{% block about %}\n# of a path\n{% endblock %}\n')
    script = script_of(spec_of(tmp_path, template=str(path)))
    assert "# of a path\n" in script
    assert "echo neighbour\n" in script


def test_the_local_script_can_be_overridden_too(tmp_path: Path) -> None:
    own("local.sh.j2", '{% extends "local.sh.j2" %}\n{% block setup %}\necho here\n{% endblock %}\n')
    spec = run_spec(tmp_path, cluster={"launcher": "local"})
    assert "echo here\n" in script_of(spec)


def test_a_misspelt_name_gets_the_nearest_one(tmp_path: Path) -> None:
    own("bigmem.sbatch.j2", EXTENDS)
    with pytest.raises(NotFound, match="did you mean `bigmem`"):
        find_template("bigmen")


# --- checking ---------------------------------------------------------------------------------------------------

EVERYTHING = {
    "modules": ["rocm/7.2"],
    "env": {"A": "it's", "HF_TOKEN": "abcdefgh"},
    "venv": "/shared/a venv",
}


SLICES = published_form(["node[0,2]", "node[1,3]"]).model_dump()
RAILS = {"nics": [f"rdma{i}" for i in range(8)], "rails_only": True, "nodes_per_switch": 1, "fabric": SLICES}


@pytest.mark.parametrize("cluster", [{}, EVERYTHING, RAILS, {**EVERYTHING, **RAILS, "launcher": "local"}])
def test_the_shipped_templates_are_in_order_whatever_the_run_has(tmp_path: Path, cluster: dict[str, Any]) -> None:
    spec = spec_of(tmp_path, **cluster)
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"snapshot": "copy"})})
    assert findings(spec) == []


SHIPPED = shipped_templates()["train"].source


def without(part: str) -> str:
    assert part in SHIPPED
    return SHIPPED.replace(part, "")


def block(name: str, text: str = "") -> str:
    return f"{EXTENDS}{{% block {name} %}}\n{text}{{% endblock %}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (block("setup", "{{ nonesuch }}\n"), "'nonesuch' is undefined; there are code, directives, env, "),
        (block("directives"), "no line `#SBATCH --nodes=1`; keep the block `directives`"),
        (block("directives"), "no line `#SBATCH --signal=B:USR2@300`; keep the block `directives`"),
        (block("directives"), "no line `#SBATCH --requeue`; keep the block `directives`"),
        (block("directives", "{{ super() }}\n#SBATCH --signal=USR1@60\n"), "--signal=USR1@60: "),
        (block("directives", "{{ super() }}\n#SBATCH --nodes=4\n"), "--nodes=4: the run has 1; set slurm.nodes"),
        (block("setup", "{{ super() }}\n#SBATCH --mem=0\n"), "sbatch reads no options after the first command"),
        (block("identity", "export ZSLURM_JOB_ID=$SLURM_JOB_ID\n"), "has no line `export SUBMITIT"),
        (block("identity", "export SUBMITIT_EXECUTOR=slurm\n"), "does not set ZSLURM_JOB_ID; keep"),
        (block("environment"), "does not export PYTHONSAFEPATH, PYTHONUNBUFFERED, "),
        (block("environment"), "does not read the file of secrets; keep the block `environment`"),
        (block("setup"), "leaves out a line of cluster.setup (`ulimit -n 4096`); keep the block `setup`"),
        (block("modules"), "does not load the module rocm/7.2; keep the block `modules`"),
        (block("launch", "srun train\n"), "does not have the loop around the supervisor; keep the block `launch`"),
        (without("#!/bin/bash\n"), "the first line must name the shell: #!/bin/bash"),
        (block("setup", "{{ super() }}\nif true; then\n"), "not valid shell: line "),
        (block("setup", "{{ super() }}\necho 'open\n"), "not valid shell: line "),
    ],
)  # fmt: skip
def test_what_a_run_would_be_lost_to_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    own("train.sbatch.j2", text)
    assert any(error.startswith(message) for error in errors(spec_of(tmp_path, **EVERYTHING)))


def test_what_only_looks_odd_is_a_warning(tmp_path: Path) -> None:
    lines = ("nodes=1", "ntasks-per-node=8", "output=/runs/tiny/logs/job-%j.log", "signal=B:USR2@99", "export=ALL")
    text = "".join(f"#SBATCH --{line}\n" for line in (*lines, "requeue"))
    own("train.sbatch.j2", block("directives", text))
    found = findings(spec_of(tmp_path))
    assert {finding.level for finding in found} == {"warning"}
    assert "no line `#SBATCH --time=1:00:00`; keep the block `directives`" in [f.message for f in found]


def test_rails_that_a_template_leaves_out_are_warnings_with_the_line_and_what_to_do(tmp_path: Path) -> None:
    """Old copies of the whole template still work."""
    spec = spec_of(tmp_path, **RAILS)
    spec = spec.model_copy(update={"slurm": spec.slurm.model_copy(update={"nodes": 2})})
    directives = "".join(
        f"#SBATCH --{flag}{'' if value is True else f'={value}'}\n"
        for flag, value in render(spec, RunDir(Path("/runs/tiny"))).variables["directives"]
        if flag not in ("exclusive", "switches")
    )
    path = own("train.sbatch.j2", f"{block('directives', directives)}{{% block rails %}}{{% endblock %}}\n")
    last = directives.count("\n") + 4
    no_map = "does not show the map of rails; keep the block `rails`, or write "
    assert [(f.level, f.place, f.message) for f in findings(spec)] == [
        ("warning", f"{path}:2", "no line `#SBATCH --exclusive`: another job on a node would share its rails; "
         "keep the block `directives`"),
        ("warning", f"{path}:2", "no line `#SBATCH --switches=2`: the job would be spread over more leaf switches "
         "than it needs; keep the block `directives`"),
        ("warning", f"{path}:{last}", no_map + '{% include "_rails.sh.j2" %} below the #SBATCH lines'),
    ]  # fmt: skip


def test_a_copy_of_the_template_from_before_the_map_of_rails(tmp_path: Path) -> None:
    old = without('{% block rails %}\n{% include "_rails.sh.j2" %}\n{% endblock %}\n')
    path = own("train.sbatch.j2", old)
    (finding,) = findings(spec_of(tmp_path, **RAILS))
    (line,) = [number for number, text in enumerate(old.splitlines(), 1) if "#SBATCH" in text]
    assert (finding.level, finding.place) == ("warning", f"{path}:{line}")
    path.write_text(old.replace("{% block identity", '{% include "_rails.sh.j2" %}\n{% block identity'))
    assert findings(spec_of(tmp_path, **RAILS)) == []


def test_every_undefined_variable_is_named_with_its_line(tmp_path: Path) -> None:
    path = own(
        "train.sbatch.j2", block("setup", "{{ one }}\n{% set mine = 2 %}{{ mine }}\n{{ two }}\n{{ one }}\n")
    )
    found = findings(spec_of(tmp_path))
    assert [(f.place, f.message.partition(";")[0]) for f in found] == [
        (f"{path}:3", "'one' is undefined"),
        (f"{path}:5", "'two' is undefined"),
    ]


def test_what_rendering_finds_is_named_with_its_line(tmp_path: Path) -> None:
    path = own("train.sbatch.j2", block("setup", "{{ spec.slurm.nonesuch }}\n"))
    (finding,) = findings(spec_of(tmp_path))
    assert finding.place == f"{path}:3"
    assert "has no attribute 'nonesuch'" in finding.message


def test_shellchecks_opinions_are_warnings(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    own("train.sbatch.j2", block("setup", "{{ super() }}\nif [ $HOME = x ]; then cd $(pwd); fi\n"))
    found = findings(spec_of(tmp_path))
    assert {finding.level for finding in found} == {"warning"}
    assert any(finding.message.startswith("shellcheck SC") for finding in found)


def test_shellchecks_answer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the form of https://github.com/koalaman/shellcheck/wiki/Integration (json1), with its sample's texts.
    comment = {"file": "-", "line": 2, "endLine": 2, "column": 6, "endColumn": 8, "level": "warning", "code": 2039}
    comment |= {"message": "In POSIX sh, echo flags are undefined.", "fix": None}
    program = tmp_path / "shellcheck"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps({'comments': [comment]})}'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (finding,) = findings(spec_of(tmp_path))
    assert finding.level == "warning"
    assert finding.message.startswith("shellcheck SC2039: In POSIX sh, echo flags are undefined. (`# tiny: ")


# --- before a submission ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (block("setup", "{{ nonesuch }}\n"), "'nonesuch' is undefined"),
        (block("setup", "{{ super() }}\nfi\n"), "not valid shell: line "),
        (block("launch", "srun train\n"), "does not have the loop"),
    ],
)
def test_a_broken_template_is_never_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    make_corpus(tmp_path / "tokens.h5")
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    (slurm.directory / "bash").symlink_to("/bin/bash")
    path = own("train.sbatch.j2", text)
    with pytest.raises(ConfigError) as caught:
        submit(spec_of(tmp_path))
    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_broken_line_of_the_sites_is_found_in_the_shipped_template_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path / "tokens.h5")
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    (slurm.directory / "bash").symlink_to("/bin/bash")
    with pytest.raises(ConfigError, match=r"not valid shell: line \d+ of the script \(`.*`\): "):
        submit(spec_of(tmp_path, setup=["if module load x; then"]))
    assert not (tmp_path / "runs").exists()


def test_findings_can_be_written_as_json(tmp_path: Path) -> None:
    own("train.sbatch.j2", block("launch"))
    assert json.loads(json.dumps([vars(finding) for finding in findings(spec_of(tmp_path))]))
