"""A profile states what differs from another: its values win key by key, and each remembers its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.places import own
from tests.config.run_files import PHASES, write
from zslurm.cluster.profile import find_profile, profile_layers, profiles
from zslurm.cluster.site import resolve_profile
from zslurm.config.layers import show_path
from zslurm.core.errors import ConfigError, NotFound
from zslurm.submit.resolve import resolve_run

OURS = """\
cluster:
  extends: mi300x-pollara
  nics: [rdma0, rdma1, rdma2, rdma3, rdma4, rdma5, rdma6, rdma7]
  gid_index: 3
slurm:
  partition: gpu
"""


def origins(name: str) -> dict[str, str]:
    return {show_path(path): str(origin) for path, _, origin in resolve_profile(name).rows()}


def test_a_profile_is_laid_over_the_one_that_it_extends(site: Path) -> None:
    file = own("lab", OURS)
    spec = resolve_profile("lab").spec
    assert (spec.cluster.network, spec.cluster.rails_only, spec.cluster.gid_index) == ("pollara", True, 3)
    assert (spec.cluster.name, spec.cluster.launcher, spec.slurm.partition) == ("lab", "slurm", "gpu")
    found = origins("lab")
    assert found["cluster.gid_index"] == f"cluster profile {file}:4"
    assert found["slurm.partition"] == f"cluster profile {file}:6"
    assert found["cluster.network"].startswith("cluster profile mi300x-pollara:")
    assert found["cluster.interface"] == "default"


def test_a_run_shows_which_file_each_value_came_from(site: Path, tmp_path: Path) -> None:
    file = own("lab", OURS)
    resolved = resolve_run(write(tmp_path / "run.yaml", PHASES), cluster="lab")
    found = {show_path(path): str(origin) for path, _, origin in resolved.rows()}
    assert found["cluster.nics[7]"] == f"cluster profile {file}:3"
    assert found["cluster.gpu_family"].startswith("cluster profile mi300x-pollara:")
    assert resolved.spec.cluster.name == "lab"


def test_a_profile_may_extend_the_sites_and_that_one_a_shipped_one(site: Path) -> None:
    write(site / "centre.yaml", "cluster: {extends: h100-ib, interface: eno1, env: {A: site, B: site}}\n")
    own("mine", "cluster: {extends: centre, env: {B: mine, NCCL_IB_TIMEOUT: null}}\n")
    cluster = resolve_profile("mine").spec.cluster
    assert (cluster.gpu_family, cluster.interface) == ("h100", "eno1")
    assert cluster.env == {"A": "site", "B": "mine", "NCCL_IB_TIMEOUT": None}
    assert [file for _, file in profile_layers("mine")] == [
        "cluster profile h100-ib",
        str(site / "centre.yaml"),
        str(find_profile("mine").path),
    ]


def test_a_profile_may_extend_the_one_of_its_name_that_it_hides(site: Path) -> None:
    write(site / "lab.yaml", "cluster: {interface: eno1}\nslurm: {partition: site}\n")
    own("lab", "cluster: {extends: lab}\nslurm: {account: me}\n")
    own("h100-ib", "cluster: {extends: h100-ib, gpus_per_node: 4}\n")
    slurm = resolve_profile("lab").spec.slurm
    assert (slurm.partition, slurm.account) == ("site", "me")
    cluster = resolve_profile("h100-ib").spec.cluster
    assert (cluster.gpus_per_node, cluster.network) == (4, "infiniband")


def test_the_launcher_is_the_bases_unless_the_heir_names_another(site: Path) -> None:
    own("desk", "cluster: {extends: local, gpus_per_node: 1}\n")
    own("plain", "cluster: {gpus_per_node: 1}\n")
    assert resolve_profile("desk").spec.cluster.launcher == "local"
    assert resolve_profile("plain").spec.cluster.launcher == "slurm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cluster:\n  extends: mi300x-polara\n",
            "lab.yaml:2: cluster.extends: mi300x-polara: no cluster profile has this name; did you mean "
            "`mi300x-pollara`?",
        ),
        ("cluster:\n  extends: lab\n", "lab.yaml:2: cluster.extends: this is the profile itself; no other is ca"),
        ("cluster:\n  extends: [a]\n", "lab.yaml:2: cluster.extends: expected the name of a cluster profile, go"),
        ("cluster:\n  extends: other\n", "other.yaml:2: cluster.extends: profiles extend each other in a circle"),
        ("cluster:\n  extends: h100-ib\n  nics: [a]\n", "lab.yaml:3: cluster: nics: 8 GPUs but 1 NIC: list one"),
        ("cluster:\n  extends: h100-ib\n  nisc: [a]\n", "lab.yaml:3: cluster.nisc: unknown key; did you mean `n"),
    ],
)
def test_a_bad_heir_is_one_line(site: Path, text: str, message: str) -> None:
    folder = own("lab", text).parent
    own("other", "cluster:\n  extends: lab\n")
    with pytest.raises(ConfigError) as caught:
        resolve_profile("lab")
    assert str(caught.value).replace(f"{folder}/", "").startswith(message)
    assert "\n" not in str(caught.value)


def test_a_circle_names_every_profile_of_it(site: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        own(name, f"cluster: {{extends: {base}}}\n")
    with pytest.raises(ConfigError, match=r"in a circle: a -> b -> c -> a$"):
        resolve_profile("a")


def test_a_broken_base_is_named_by_its_own_file(site: Path) -> None:
    write(site / "centre.yaml", "cluster:\n  gpus_per_node: eight\n")
    own("mine", "cluster: {extends: centre}\n")
    with pytest.raises(ConfigError, match=r"centre\.yaml:2: cluster\.gpus_per_node: expected"):
        resolve_profile("mine")


def test_a_run_file_extends_recipes_and_no_profiles(site: Path, tmp_path: Path) -> None:
    run_file = write(tmp_path / "run.yaml", PHASES + "cluster: {extends: h100-ib}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:7: cluster\.extends: unknown key"):
        resolve_run(run_file, cluster="local")


def test_everything_that_ships_is_valid_and_states_what_it_is_for(site: Path) -> None:
    shipped = [profile for profile in profiles() if profile.place == "shipped"]
    assert {profile.name for profile in shipped} == {
        "h100-ib", "local", "mi300x-broadcom", "mi300x-cx7", "mi300x-pollara",
        "frontier", "lumi-g", "mi300a-slingshot", "setonix",
    }  # fmt: skip
    for profile in shipped:
        assert resolve_profile(profile.name).spec.cluster.name == profile.name
        assert profile.read().startswith("# ")


def test_only_what_a_user_or_site_wrote_can_be_the_only_profile(site: Path) -> None:
    with pytest.raises(NotFound):
        find_profile("nonesuch")
    assert find_profile("h100-ib").path is None
