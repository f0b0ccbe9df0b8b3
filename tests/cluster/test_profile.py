"""Which cluster profile applies, how a bad one is refused, and what `zslurm init` writes without a Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.places import own
from tests.config.run_files import PHASES, write
from zslurm.cluster import profile
from zslurm.cluster.detect import detect
from zslurm.cluster.profile import default_name, profile_files, profile_layers, profile_path, save_profile
from zslurm.cluster.profile_writer import scalar
from zslurm.config import yaml12
from zslurm.config.layers import Override
from zslurm.core.errors import ConfigError, NoProfile, NotFound, ZslurmError
from zslurm.submit.resolve import resolve_run


def test_without_any_profile_the_next_step_is_named(site: Path) -> None:
    with pytest.raises(NoProfile, match=r"run `zslurm init` on a login node, or .* --cluster local$"):
        default_name()


def test_the_only_profile_is_the_default(site: Path) -> None:
    own("lab")
    assert default_name() == "lab"


def test_of_several_profiles_init_or_the_environment_chooses(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own("lab")
    own("farm")
    with pytest.raises(ConfigError, match=r"several cluster profiles \(farm, lab\) and no default; .*--cluster$"):
        default_name()
    save_profile("lab", "cluster: {launcher: slurm}\n", make_default=True)
    assert default_name() == "lab"
    save_profile("third", "cluster: {launcher: slurm}\n", make_default=False)
    assert default_name() == "lab"
    monkeypatch.setenv("ZSLURM_CLUSTER", "farm")
    assert default_name() == "farm"


def test_an_empty_choice_is_no_choice(site: Path) -> None:
    own("lab")
    (profile.config_dir() / "default-cluster").write_text("\n")
    assert default_name() == "lab"


def test_profiles_lie_where_xdg_says(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert own("lab") == tmp_path / "xdg" / "zslurm" / "clusters" / "lab.yaml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert profile_path("lab") == Path.home() / ".config" / "zslurm" / "clusters" / "lab.yaml"
    assert not profile_files()


def test_a_users_profile_hides_the_sites_of_the_same_name(site: Path) -> None:
    write(site / "lab.yaml", "slurm: {partition: site}\n")
    write(site / "farm.yaml", "slurm: {partition: farm}\n")
    assert profile_layers("lab")[-1][0].data["slurm"] == {"partition": "site"}
    mine = own("lab", "slurm: {partition: mine}\n")
    document, file = profile_layers("lab")[-1]
    assert document.data["slurm"] == {"partition": "mine"}
    assert file == str(mine)
    assert set(profile_files()) == {"lab", "farm"}


def test_a_profile_is_called_by_its_file_unless_it_names_itself(site: Path) -> None:
    own("lab", "cluster: {gpus_per_node: 8}\n")
    own("named", "cluster: {name: Frontier}\n")
    own("empty", "# nothing yet\n")
    own("hollow", "cluster:\n  # name: x\n")
    names = [profile_layers(name)[-1][0].data["cluster"]["name"] for name in ("lab", "named", "empty", "hollow")]
    assert names == ["lab", "Frontier", "empty", "hollow"]


def test_a_profile_that_is_written_down_is_a_slurm_clusters_unless_it_states_otherwise(site: Path) -> None:
    own("lab", "slurm: {partition: gpu}\n")
    own("box", "cluster: {launcher: local}\n")
    assert [profile_layers(name)[-1][0].data["cluster"]["launcher"] for name in ("lab", "box")] == [
        "slurm",
        "local",
    ]


def test_this_machine_needs_no_profile(site: Path) -> None:
    ((document, file),) = profile_layers("local")
    assert document.data == {"cluster": {"name": "local", "launcher": "local"}}
    assert file == "cluster profile local"


def test_an_unknown_profile_suggests_the_nearest(site: Path) -> None:
    own("frontier")
    with pytest.raises(NotFound, match=r"^fronteir: no cluster profile has this name; did you mean `frontier`\?"):
        profile_layers("fronteir")
    with pytest.raises(NotFound, match=r"^xyz: no cluster profile has this name; profiles: frontier, h100-ib, "):
        profile_layers("xyz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: [\n", "lab.yaml:2: not valid YAML: "),
        ("- a\n", "lab.yaml:1: expected sections such as "),
        ("cluster: 5\n", "lab.yaml:1: cluster: expected a mapping of keys to values, got 5"),
        ("cluster:\n  gpu: 8\n", "lab.yaml:2: cluster.gpu: unknown key; did you mean `gpu_type`?"),
        ("extends: h100-ib\n", "lab.yaml:1: extends: in a profile it belongs into the section cluster: "),
        ("slurm:\n  partition: [a]\n", "lab.yaml:2: slurm.partition: expected a valid string"),
    ],
)
def test_a_bad_profile_names_its_own_file_and_line(site: Path, tmp_path: Path, text: str, message: str) -> None:
    folder = own("lab", text).parent
    run_file = write(tmp_path / "run.yaml", PHASES)
    with pytest.raises(ConfigError) as caught:
        resolve_run(run_file, cluster="lab")
    assert str(caught.value).replace(f"{folder}/", "").startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "a b", "$(touch x)", "a\nb"])
def test_a_profiles_name_is_a_file_name(name: str) -> None:
    with pytest.raises(ConfigError, match="a profile's name is letters, digits"):
        profile_path(name)


def test_a_profile_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(ZslurmError, match=r"lab\.yaml: cannot be written: Not a directory$"):
        save_profile("lab", "", make_default=True)


@pytest.mark.parametrize(
    ("option", "override", "in_file", "environment", "chosen"),
    [
        ("a", "b", "c", "d", "a"),
        (None, "b", "c", "d", "b"),
        (None, None, "c", "d", "c"),
        (None, None, None, "d", "d"),
        (None, None, None, None, "e"),
    ],
)
def test_the_profile_is_that_of_the_option_then_the_run_file_then_the_default(
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    override: str | None,
    in_file: str | None,
    environment: str | None,
    chosen: str,
) -> None:
    for name in "abcd":
        own(name, f"slurm: {{partition: of-{name}}}\n")
    save_profile("e", "slurm: {partition: of-e}\n", make_default=True)
    if environment:
        monkeypatch.setenv("ZSLURM_CLUSTER", environment)
    section = f"cluster: {{name: {in_file}}}\n" if in_file else ""
    run_file = write(tmp_path / "run.yaml", PHASES + section)
    overrides = [Override.of("cluster.name", override)] if override else []
    spec = resolve_run(run_file, cluster=option, overrides=overrides).spec
    assert (spec.cluster.name, spec.slurm.partition) == (chosen, f"of-{chosen}")


def test_a_template_in_a_profile_is_found_beside_it(site: Path, tmp_path: Path) -> None:
    folder = own("lab", "cluster: {template: site.sbatch.j2}\n").parent
    spec = resolve_run(write(tmp_path / "run.yaml", PHASES), cluster="lab").spec
    assert spec.cluster.template == str(folder / "site.sbatch.j2")


def test_a_machine_without_slurm_gets_a_profile_that_trains_there(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = detect(name="desk")
    assert (found.name, found.partition_choices) == ("desk", [])
    save_profile(found.name, found.text, make_default=True)
    spec = resolve_run(write(tmp_path / "run.yaml", PHASES)).spec
    assert (spec.cluster.name, spec.cluster.launcher) == ("desk", "local")
    assert spec.cluster.cpus_per_node == len(os.sched_getaffinity(0))
    assert detect().name == "local"


_NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn", "Zl", "Zp"], exclude_characters="\ufeff"))


@given(
    _NAMES | st.sampled_from(["*a", "'a", '"', "- a", "010", "no", "null", "24:00:00", "8e12", "a: b", "a #b", ""])
)
def test_whatever_slurm_calls_things_a_profile_has_the_same(name: str) -> None:
    assert yaml12.parse(f"cluster:\n  name: {scalar(name)}\n", "profile").data == {"cluster": {"name": name}}


def test_plain_names_are_written_plainly() -> None:
    assert [scalar(name) for name in ("batch", "mi300x", "gpu-large", "010")] == [
        "batch",
        "mi300x",
        "gpu-large",
        "'010'",
    ]
