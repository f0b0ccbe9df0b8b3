"""A job's script says what the run says, and no text of a user's can make it say anything else."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.rails.fabrics import published_form
from tests.submit.specs import run_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, NotFound
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import slurm_step
from zslurm.run.run_dir import RunDir
from zslurm.slurm.sbatch_options import RESERVED
from zslurm.submit.script.render import directives, job_environment, render
from zslurm.submit.script.templates import find_template, shipped_templates

ON_SLURM = {"launcher": "slurm", "gpus_per_node": 8, "gpu_type": "mi300x", "cpus_per_node": 96}
# What a shell, sbatch or a terminal could take for more than text; no control characters, which RunSpec refuses.
PIECES = st.sampled_from(
    [
        *(
            "$(touch trapped)",
            "`touch trapped`",
            "; touch trapped;",
            "&& touch trapped",
            "| tee trapped",
            "> trapped",
        ),
        *(
            "'",
            '"',
            "\\",
            "\\\\",
            "$HOME",
            "${HOME}",
            "$'x'",
            '$"x"',
            "<<E",
            "*",
            "~",
            "!!",
            "#",
            "-",
            "--",
            "=",
            ":",
        ),
        *("%j", "%%", "{{ 1 }}", "{% if %}", "{#", " ", "  ", "/", "a", "0", "é", "☃", "𝄞", "\u00a0", "\u202e"),
    ]
)
HOSTILE = st.lists(PIECES, max_size=8).map("".join)
HOSTILE_NAME = HOSTILE.map(lambda text: f"x{text}".replace("/", "_"))


def run_dir(spec: RunSpec) -> RunDir:
    return RunDir(Path(spec.run.runs_dir) / spec.run.name)


def script_of(spec: RunSpec) -> str:
    return render(spec, run_dir(spec)).text


def sbatch_lines(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def site_template(directory: Path, text: str) -> dict[str, Any]:
    """The section `cluster` of a run with a separate template."""
    path = directory / "site.sbatch.j2"
    path.write_text(text)
    return {**ON_SLURM, "template": str(path)}


# --- what the script says ---------------------------------------------------------------------------------------


def test_the_directives_are_those_of_the_run_in_a_fixed_order(tmp_path: Path) -> None:
    slurm = {
        "nodes": 4,
        "time": "24:00:00",
        "partition": "gpu",
        "account": "lab",
        "qos": "high",
        "constraint": "a&b",
        "nodelist": "n[1-4]",
        "exclude": "n7",
        "mem": "500G",
        "save_margin_s": 120,
        "flags": {"reservation": "spring", "exclusive": True, "contiguous": False, "mail-user": None},
    }
    assert sbatch_lines(script_of(run_spec(tmp_path, slurm=slurm, cluster=ON_SLURM))) == [
        "--job-name=tiny",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--cpus-per-task=12",
        "--gpus-per-node=mi300x:8",
        "--mem=500G",
        "--time=24:00:00",
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--constraint='a&b'",
        "--nodelist=n[1-4]",
        "--exclude=n7",
        f"--output={tmp_path}/runs/tiny/logs/job-%j.log",
        "--open-mode=append",
        "--requeue",
        "--export=ALL",
        "--signal=B:USR2@120",
        "--reservation=spring",
        "--exclusive",
    ]


def test_what_is_not_given_is_left_to_slurm(tmp_path: Path) -> None:
    lines = sbatch_lines(script_of(run_spec(tmp_path, cluster={"launcher": "slurm"})))
    assert [line.partition("=")[0] for line in lines] == [
        "--job-name",
        "--nodes",
        "--ntasks-per-node",
        "--cpus-per-task",
        "--output",
        "--open-mode",
        "--requeue",
        "--export",
        "--signal",
    ]


NICS = [f"rdma{index}" for index in range(8)]


def test_a_job_on_rails_has_its_nodes_to_itself_unless_a_flag_has_another_word(tmp_path: Path) -> None:
    for cluster in ({"nics": NICS}, {"rails_only": True}):
        on_rails = {**ON_SLURM, **cluster}
        assert "--exclusive" in sbatch_lines(script_of(run_spec(tmp_path, cluster=on_rails, slurm={"nodes": 2})))
        for word, lines in (("user", ["--exclusive=user"]), (False, [])):
            spec = run_spec(tmp_path, cluster=on_rails, slurm={"nodes": 2, "flags": {"exclusive": word}})
            assert [line for line in sbatch_lines(script_of(spec)) if line.startswith("--exclusive")] == lines
    assert "--exclusive" not in sbatch_lines(script_of(run_spec(tmp_path, cluster=ON_SLURM)))


@pytest.mark.parametrize(
    ("nodes", "cluster"),
    [
        (1, {}),  # sends nothing between nodes
        (2, {"gpus_per_node": 2, "gpu_nics": [0, 1]}),  # leaves most NICs of its nodes to others
        (2, {"gpus_per_node": 0, "gpu_type": None}),  # trains on CPUs
    ],
)
def test_on_an_ordinary_network_a_job_that_needs_no_whole_rails_shares_its_nodes(
    tmp_path: Path, nodes: int, cluster: dict[str, Any]
) -> None:
    with_nics = {**ON_SLURM, "nics": NICS, **cluster}
    spec = run_spec(tmp_path, cluster=with_nics, slurm={"nodes": nodes})
    assert "--exclusive" not in sbatch_lines(script_of(spec))


@pytest.mark.parametrize(
    ("slurm", "lines"),
    [
        ({"nodes": 4}, ["--switches=1"]),
        ({"nodes": 4, "spares": 1}, ["--switches=2"]),
        ({"nodes": 5}, ["--switches=2"]),
        ({"nodes": 8, "flags": {"switches": "1@5"}}, ["--switches=1@5"]),
        ({"nodes": 8, "flags": {"switches": False}}, []),
        ({"nodes": 1}, []),
    ],
)
def test_as_few_leaf_switches_as_hold_the_job(tmp_path: Path, slurm: dict[str, Any], lines: list[str]) -> None:
    spec = run_spec(tmp_path, slurm=slurm, cluster={**ON_SLURM, "nodes_per_switch": 4})
    assert [line for line in sbatch_lines(script_of(spec)) if line.startswith("--switches")] == lines


def test_the_script_shows_the_rails(tmp_path: Path) -> None:
    units = published_form(["node[0,2]", "node[1,3]"], ports=2, uplinks=1)
    cluster = {**ON_SLURM, "nics": NICS, "rails_only": True, "fabric": units.model_dump()}
    lines = script_of(run_spec(tmp_path, cluster=cluster)).splitlines()
    assert "#   rail 3: local rank 3, GPU 3, NIC rdma3" in lines
    assert "# Nothing goes from one rail to another between nodes." in lines
    first = lines.index(
        "# Leaf slices (4 leaf switches for each node, 4 spines above each leaf, slices of 2 ports at 400 Gb/s, "
        "1 uplink at 400 Gb/s); ranks are numbered along the shortest ring over them:"
    )
    assert lines[first + 1 : first + 3] == ["#   leaf0, rails 0-1: node[0,2]", "#   leaf1, rails 2-3: node[0,2]"]
    assert first + 8 < lines.index("export SUBMITIT_EXECUTOR=slurm"), "before the first command"
    assert not [
        line for line in script_of(run_spec(tmp_path, cluster=ON_SLURM)).splitlines() if line.startswith("# Rails")
    ]


def test_rails_that_gpus_share(tmp_path: Path) -> None:
    shared = {"nics": ["a", "b"], "gpu_nics": [0, 0, 0, 0, 1, 1, 1, 1]}
    lines = script_of(run_spec(tmp_path, cluster={**ON_SLURM, **shared})).splitlines()
    assert "#   rail 1: local rank 5, GPU 5, NIC b" in lines


def test_every_directive_is_reserved_from_flags(tmp_path: Path) -> None:
    """Else a flag could silently win over the run's own key."""
    slurm = dict.fromkeys(("partition", "account", "qos", "constraint", "nodelist", "exclude", "mem"), "x")
    spec = run_spec(tmp_path, slurm={**slurm, "time": "5", "spares": 1}, cluster=ON_SLURM)
    assert {flag for flag, _ in directives(spec, run_dir(spec))} <= RESERVED


def test_variables_and_site_lines_come_before_the_supervisor(tmp_path: Path) -> None:
    cluster = {
        **ON_SLURM,
        "setup": ["module load rocm", 'export PATH="/opt/x:$PATH"'],
        "env": {"HSA_NO_SCRATCH_RECLAIM": "1", "PYTHONUNBUFFERED": "0"},
        "interface": "eth0",
    }
    spec = run_spec(tmp_path, cluster=cluster)
    lines = script_of(spec).splitlines()
    places = [
        lines.index("export HSA_NO_SCRATCH_RECLAIM=1"),
        lines.index("module load rocm"),
        lines.index('export PATH="/opt/x:$PATH"'),
        next(i for i, line in enumerate(lines) if "submitit.core._submit" in line),
    ]
    assert places == sorted(places)
    assert "export PYTHONUNBUFFERED=0" in lines, "the run's own value wins"
    assert {"export GLOO_SOCKET_IFNAME=eth0", "export NCCL_SOCKET_IFNAME='=eth0'"} <= set(lines)
    assert "export PYTHONSAFEPATH=1" in lines
    assert job_environment(spec)["HSA_NO_SCRATCH_RECLAIM"] == "1"


def test_a_script_for_this_machine_has_nothing_of_slurm(tmp_path: Path) -> None:
    spec = run_spec(tmp_path, cluster={"launcher": "local"})
    script = render(spec, run_dir(spec)).text
    assert "SBATCH" not in script
    assert "SLURM_JOB_ID" not in script.replace("ZSLURM_JOB_ID", "")
    assert 'export ZSLURM_JOB_ID="$ZSLURM_JOB_ID"' in script, "the launcher gives the id: the text needs none"
    assert f'{tmp_path}/runs/tiny/logs/job-"$ZSLURM_JOB_ID".log' in script


# --- shells agree -----------------------------------------------------------------------------------------------

VARIANTS: list[dict[str, dict[str, Any]]] = [
    {"cluster": {"launcher": "local"}},
    {"cluster": {"launcher": "slurm"}},
    {
        "run": {"name": "a.b-c_d"},
        "cluster": {
            **ON_SLURM,
            "setup": ["module load rocm"],
            "env": {"A": "it's $HOME; `x`"},
            "interface": "eth0",
        },
        "slurm": {"job_name": 'it\'s "quoted" $(x)', "flags": {"comment": "a\\b", "exclusive": True}},
    },
]


@pytest.mark.parametrize("sections", VARIANTS)
def test_bash_and_shellcheck_find_nothing_wrong(tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    path = tmp_path / "script.sh"
    path.write_text(script_of(run_spec(tmp_path, **sections)))
    checks = [["bash", "-n", str(path)]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck", "--shell=bash", "--severity=warning", str(path)])
    for check in checks:
        done = subprocess.run(check, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- the loop around the supervisor -----------------------------------------------------------------------------


def run_loop(directory: Path, setup: list[str], supervisor: str) -> tuple[int, list[str]]:
    """The exit code of a local run's script with this supervisor (its $1 gets the exit code), and its notes."""
    spec = run_spec(directory, cluster={"launcher": "local", "setup": setup})
    run = run_dir(spec)
    run.create(group_readable=False)
    script = render(spec, run, command=f'sh -c {shlex.quote(supervisor)} supervisor "$over"')
    path = directory / "script.sh"
    path.write_text(script.text)
    environment = {**os.environ, "ZSLURM_JOB_ID": "local-1"}
    code = subprocess.run(["bash", str(path)], cwd=directory, env=environment, check=False).returncode
    return code, (directory / "noted").read_text().split()


DIES = "echo start$ZSLURM_STOP >> noted"
NOTES_SECONDS = "sleep() { echo second >> noted; }"


def pauses(noted: list[str]) -> list[int]:
    """Seconds between two starts."""
    return [gap.count("second") for gap in " ".join(noted).split("start")[1:-1]]


def test_a_supervisor_that_dies_at_once_is_started_ever_more_rarely_and_given_up(tmp_path: Path) -> None:
    code, noted = run_loop(tmp_path, [NOTES_SECONDS], DIES)
    assert (code, noted.count("start")) == (1, 20)
    assert pauses(noted) == [1, 2, 4, 8, 16, 32, *[60] * 13]


def test_a_supervisor_that_lived_long_is_always_started_again(tmp_path: Path) -> None:
    """Over weeks there are many deaths, for as many reasons."""
    ten_minutes_pass = 'wait() { SECONDS=$((SECONDS + 600)); builtin wait "$@"; }'
    ends_at_30 = f'{DIES}; [ "$(grep -c start noted)" -lt 30 ] || echo 0 > "$1"'
    code, noted = run_loop(tmp_path, [NOTES_SECONDS, ten_minutes_pass], ends_at_30)
    assert (code, pauses(noted)) == (0, [1] * 29)


def test_a_signal_ends_the_pause_and_is_known_to_the_next_supervisor(tmp_path: Path) -> None:
    """A pause may be longer than what Slurm gives a job that it ends."""
    asked = 'sleep() { echo second >> noted; [ "$(grep -c second noted)" -lt 4 ] || kill -USR2 $$; }'
    ends_once_asked = f'{DIES}; [ -z "$ZSLURM_STOP" ] || echo 75 > "$1"'
    code, noted = run_loop(tmp_path, [asked], ends_once_asked)
    assert (code, noted[-1]) == (75, "startUSR2")
    assert pauses(noted) == [1, 2, 1]


def test_a_scheduler_that_starts_the_script_on_each_node_gets_one_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = 'touch noted; echo start >> noted; echo 0 > "$1"'
    (tmp_path / "noted").touch()
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert run_loop(tmp_path, [NOTES_SECONDS], starts) == (0, [])
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert run_loop(tmp_path, [NOTES_SECONDS], starts) == (0, ["start"])


# --- hostile text -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory for many examples of one test."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@settings(max_examples=40, deadline=None)
@given(name=HOSTILE, folder=HOSTILE_NAME, value=HOSTILE, slurm=st.booleans())
def test_hostile_text_stays_text_in_a_shell(place: Path, name: str, folder: str, value: str, slurm: bool) -> None:
    """The whole script runs, with `env` as its supervisor; nothing else happens, and values arrive unchanged."""
    with tempfile.TemporaryDirectory(dir=place) as inside:
        here = Path(inside)
        cluster = {"launcher": "slurm" if slurm else "local", "env": {"HOSTILE": value}, "interface": f"x{value}"}
        spec = run_spec(here, slurm={"job_name": name}, cluster=cluster)
        run = RunDir(here / "runs" / folder)
        run.create(group_readable=False)
        (here / "cwd").mkdir()
        script = render(spec, run, command='sh -c \'env -0 > dump; echo 0 > "$1"\' supervisor "$over"')
        (here / "script.sh").write_text(script.text)
        done = subprocess.run(
            ["bash", str(here / "script.sh")],
            cwd=here / "cwd",
            env={"PATH": os.defpath, "SLURM_JOB_ID": "7"}
            if slurm
            else {"PATH": os.defpath, "ZSLURM_JOB_ID": "local-1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert [path.name for path in (here / "cwd").iterdir()] == ["dump"]
        variables = dict(entry.split("=", 1) for entry in (here / "cwd" / "dump").read_text().split("\0") if entry)
        assert variables["HOSTILE"] == value
        assert variables["GLOO_SOCKET_IFNAME"] == f"x{value}"
        assert variables["ZSLURM_JOB_ID"] == ("7" if slurm else "local-1")
        assert [path.name for path in here.rglob("*.exit")] == [f"job-{variables['ZSLURM_JOB_ID']}.exit"]
        assert not list(place.rglob("trapped"))


@pytest.fixture(scope="module")
def sbatch(place: Path) -> list[str]:
    """The real sbatch, with a controller that does not listen: it reads its options, prints them, and gives up."""
    program = shutil.which("sbatch")
    if program is None:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail("CI must have sbatch")
        pytest.skip("sbatch is not installed")
    (place / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\n"
        "NodeName=n0 CPUs=1\nPartitionName=p Nodes=n0\n"
    )
    return [program, "-vv"]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(HOSTILE, min_size=6, max_size=6), folder=HOSTILE_NAME)
def test_slurm_itself_reads_back_every_value(
    place: Path, sbatch: list[str], values: list[str], folder: str
) -> None:
    """What the real sbatch takes from #SBATCH lines is what the run says, to the character."""
    keys = ["job_name", "account", "partition", "qos"]
    slurm: dict[str, Any] = dict(zip(keys, values, strict=False))
    slurm["flags"] = {"comment": values[4], "reservation": values[5]}
    # An empty job name means the run's; paths hold no % or backslash, which the configuration refuses.
    expected = {**{key.replace("_", "-"): slurm[key] for key in keys}, **slurm["flags"]}
    expected["job-name"] = values[0] or "tiny"
    spec = run_spec(place, slurm=slurm, cluster={"launcher": "slurm"})
    folder = re.sub(r"[%\\]", "_", folder)
    script = place / "script.sh"
    script.write_text(render(spec, RunDir(place / folder)).text)
    environment = {"PATH": os.defpath, "SLURM_CONF": str(place / "slurm.conf")}
    done = subprocess.run([*sbatch, str(script)], cwd=place, env=environment, capture_output=True, text=True)
    assert "Unable to contact slurm controller" in done.stderr, "it understood every line"
    read = dict(re.findall(r"^sbatch: ([a-z-]+) +: (.*)$", done.stderr, re.MULTILINE))
    assert {key: read[key] for key in expected} == expected
    assert read["output"] == f"{place}/{folder}/logs/job-%j.log"
    assert not list(place.rglob("trapped"))


@given(name=HOSTILE)
def test_no_name_ends_the_comment_that_shows_it(name: str) -> None:
    spec = run_spec(Path("/nowhere"), slurm={"job_name": name}, cluster=ON_SLURM)
    second = script_of(spec).splitlines()[1]
    assert second.isprintable()
    assert second.startswith("# ")
    assert second.endswith(": a training run of zslurm. Submitting the run again continues it.")


# --- templates of the user's own --------------------------------------------------------------------------------


def test_a_template_of_the_users_own_is_found_by_its_path(tmp_path: Path) -> None:
    text = "{% for flag, value in directives %}\n#SBATCH --{{ flag }}{{ value | directive }}\n{% endfor %}\n"
    cluster = site_template(tmp_path, text + 'echo {{ job_name | sh }}\n{% include "_supervise.sh.j2" %}')
    script = script_of(run_spec(tmp_path, cluster=cluster, slurm={"job_name": "a b"}))
    assert "#SBATCH --job-name='a b'\n" in script
    assert "echo 'a b'\n" in script
    assert "while kill -0" in script


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ok\n{{ nonesuch }}\n", r":2: cannot be rendered: 'nonesuch' is undefined"),
        ("ok\n\n{{ spec.slurm.nonesuch }}\n", r":3: cannot be rendered: .* has no attribute 'nonesuch'"),
        ("ok\n{% if %}\n", r":2: not a valid template: "),
        ("{% for x in y %}\n", r":1: not a valid template: "),
        ("a\nb\n{{ 1 // 0 }}\n", r":3: cannot be rendered: integer division or modulo by zero"),
        ('a\n{{ spec.slurm.nodes + "x" }}\n', r":2: cannot be rendered: unsupported operand"),
        ("{{ job_name | nonesuch }}\n", r":1: not a valid template: No filter named 'nonesuch'"),
        ('a\n{% include "nonesuch.j2" %}\n', r":2: includes or extends `nonesuch\.j2`, which does not exist"),
        ("a\n{{ ['x'][3].y }}\n", r":2: cannot be rendered: "),
    ],
)
def test_a_broken_template_names_its_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    spec = run_spec(tmp_path, cluster=site_template(tmp_path, text))
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))}/site\\.sbatch\\.j2{message}") as caught:
        script_of(spec)
    assert "\n" not in str(caught.value)


def test_an_error_below_an_include_names_the_file_that_it_is_in(tmp_path: Path) -> None:
    text = 'ok\n{% set run_dir = nonesuch %}\n{% include "_supervise.sh.j2" %}\n'
    with pytest.raises(ConfigError, match=r"^sbatch_templates/_supervise\.sh\.j2:\d+: cannot be rendered: "):
        script_of(run_spec(tmp_path, cluster=site_template(tmp_path, text)))


def test_a_template_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match=r"^nonesuch: no template and no file has this name; templates: local, train$"
    ):
        find_template("nonesuch")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary: not a template: not a text file in UTF-8"):
        find_template(str(tmp_path / "binary"))


def test_every_shipped_template_can_be_named_and_shown() -> None:
    templates = shipped_templates()
    assert {"train", "local", "_supervise"} <= set(templates)
    for name, template in templates.items():
        assert find_template(name) == template
        assert template.source.endswith("\n")


@pytest.mark.parametrize(
    ("form", "directive"),
    [
        ("gpus-per-node", ("gpus-per-node", "mi300x:8")),
        ("gres", ("gres", "gpu:mi300x:8")),
        ("gpus-per-task", ("gpus-per-task", "mi300x:4")),
    ],
)
def test_gpus_are_asked_for_in_the_form_of_the_site(tmp_path: Path, form: str, directive: tuple[str, str]) -> None:
    cluster = {"name": "lab", "launcher": "slurm", "gpus_per_node": 8, "gpu_type": "mi300x", "gpu_option": form}
    spec = run_spec(tmp_path, slurm={"ranks_per_node": 2}, cluster=cluster)
    found = [option for option in directives(spec, run_dir(spec)) if option[0].startswith(("gpus", "gres"))]
    assert found == [directive]


@pytest.mark.parametrize("flags", [{"gres": "gpu:4"}, {"gres": "nvme:1,gpu:mi300x:8"}, {"gpus": "8"}])
@pytest.mark.parametrize("form", ["gpus-per-node", "gres"])
def test_a_second_request_for_gpus_is_refused(tmp_path: Path, flags: dict[str, str], form: str) -> None:
    """Slurm 26.05 ends with "mutually exclusive"."""
    cluster = {"name": "lab", "launcher": "slurm", "gpus_per_node": 8, "gpu_option": form}
    spec = run_spec(tmp_path, slurm={"flags": flags}, cluster=cluster)
    with pytest.raises(ConfigError, match=rf"^slurm\.flags\.{next(iter(flags))}: .*by --{form} already"):
        directives(spec, run_dir(spec))


def test_other_generic_resources_join_those_of_the_profile(tmp_path: Path) -> None:
    cluster = {"name": "lab", "launcher": "slurm", "gpus_per_node": 8, "gpu_option": "gres"}
    spec = run_spec(tmp_path, slurm={"flags": {"gres": "nvme:1"}}, cluster=cluster)
    assert [value for flag, value in directives(spec, run_dir(spec)) if flag == "gres"] == ["gpu:8,nvme:1"]


def test_gpus_that_the_ranks_cannot_share_evenly_have_no_request_per_task(tmp_path: Path) -> None:
    cluster = {"name": "lab", "launcher": "slurm", "gpus_per_node": 8, "gpu_option": "gpus-per-task"}
    spec = run_spec(tmp_path, slurm={"ranks_per_node": 3}, cluster=cluster)
    with pytest.raises(ConfigError, match=r"^cluster\.gpu_option: 8 GPUs cannot be divided by 3 ranks of a node"):
        directives(spec, run_dir(spec))


SLINGSHOT = {
    "name": "lumi-g",
    "launcher": "slurm",
    "gpus_per_node": 8,
    "gpu_family": "mi250x",
    "network": "slingshot",
}


@pytest.mark.parametrize(
    ("cluster", "slurm", "network"),
    [
        ({}, {}, "disable_rdzv_get"),
        ({}, {"flags": {"network": "job_vni"}}, "job_vni"),
        ({}, {"flags": {"network": False}}, None),
        ({"env": {"FI_CXI_RDZV_PROTO": None}}, {}, None),
        ({"network": "other"}, {}, None),
    ],
)
def test_a_job_on_slingshot_asks_the_network_for_what_rccls_protocol_needs(
    tmp_path: Path, cluster: dict[str, Any], slurm: dict[str, Any], network: str | None
) -> None:
    spec = run_spec(tmp_path, cluster=SLINGSHOT | cluster, slurm={"nodes": 2, **slurm})
    run = RunDir(tmp_path / "run")
    assert dict(directives(spec, run)).get("network") == network
    step = slurm_step(spec, run, run.attempt(1), Interpreter(("python",), {}), ["node0", "node1"])
    options = [word for word in step.command if word.startswith("--network")]
    assert options == ([] if network is None else [f"--network={network}"])


def test_ranks_of_one_node_do_not_insist_on_the_plugin_of_the_network(tmp_path: Path) -> None:
    def values(nodes: int) -> dict[str, str]:
        return job_environment(run_spec(tmp_path, cluster=SLINGSHOT, slurm={"nodes": nodes}))

    assert values(2)["NCCL_NET"] == "AWS Libfabric"
    assert values(1) == {name: value for name, value in values(2).items() if name != "NCCL_NET"}
