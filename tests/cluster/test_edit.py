"""A profile is edited on a copy: only a valid text replaces it, and no text is ever lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.places import own
from tests.config.run_files import write
from zslurm.cluster.edit import edit_profile, run_editor
from zslurm.cluster.profile import config_dir, profile_path
from zslurm.cluster.site import resolve_profile
from zslurm.core.errors import ConfigError, NotFound, ZslurmError

GOOD = "# mine\ncluster:\n  gpus_per_node: 4\n"


def writes(text: str) -> Callable[[Path], None]:
    """An editor that leaves this text."""

    def editor(path: Path) -> None:
        path.write_text(text)

    return editor


def appends(text: str) -> Callable[[Path], None]:
    def editor(path: Path) -> None:
        path.write_text(path.read_text() + text)

    return editor


def test_a_valid_text_replaces_the_profile(site: Path) -> None:
    path = own("lab", GOOD)
    assert edit_profile("lab", appends("  interface: eno1\n")) == path
    assert path.read_text() == GOOD + "  interface: eno1\n"
    assert not list((config_dir() / "editing").iterdir())


def test_a_text_that_is_left_as_it_was_writes_nothing(site: Path) -> None:
    own("lab", GOOD)
    assert edit_profile("lab", lambda path: None) is None
    assert edit_profile("h100-ib", lambda path: None) is None
    assert not profile_path("h100-ib").exists()


def test_a_profile_of_others_gets_one_of_ones_own_that_extends_it(site: Path) -> None:
    write(site / "centre.yaml", "cluster: {interface: eno1}\n")
    for name in ("centre", "h100-ib"):
        edit_profile(name, appends("  gpus_per_node: 4\n"))
        assert profile_path(name).read_text() == f"cluster:\n  extends: {name}\n  gpus_per_node: 4\n"
    assert resolve_profile("centre").spec.cluster.interface == "eno1"
    assert resolve_profile("h100-ib").spec.cluster.network == "infiniband"


def test_a_text_that_is_not_valid_is_kept_and_the_profile_too(site: Path) -> None:
    path = own("lab", GOOD)
    with pytest.raises(ConfigError) as caught:
        edit_profile("lab", appends("  nisc: [a]\n"))
    first, kept = str(caught.value).splitlines()
    assert first == f"{path}:4: cluster.nisc: unknown key; did you mean `nics`?"
    copy = config_dir() / "editing" / "lab.yaml"
    assert kept == f"nothing was replaced; your text is kept in {copy}: `zslurm cluster edit lab` continues there"
    assert path.read_text() == GOOD
    assert copy.read_text() == GOOD + "  nisc: [a]\n"


def test_the_next_call_continues_with_the_text_that_was_refused(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = own("lab", GOOD)
    with pytest.raises(ConfigError):
        edit_profile("lab", appends("  nisc: [a]\n"))
    caplog.set_level("INFO")
    edit_profile("lab", writes(GOOD + "  setup: [a]\n"))
    assert path.read_text() == GOOD + "  setup: [a]\n"
    assert caplog.messages[0].startswith("continuing with the text that was not accepted the last time: ")


def test_a_profile_that_somebody_else_changes_meanwhile_is_not_overwritten(site: Path) -> None:
    path = own("lab", GOOD)

    def both(copy: Path) -> None:
        copy.write_text(GOOD + "  interface: mine\n")
        path.write_text(GOOD + "  interface: theirs\n")

    with pytest.raises(ZslurmError, match=r"lab\.yaml: it was changed meanwhile; your text is kept in "):
        edit_profile("lab", both)
    assert "theirs" in path.read_text()


def test_bytes_that_are_no_text_are_refused(site: Path) -> None:
    own("lab", GOOD)

    def editor(path: Path) -> None:
        path.write_bytes(b"\xff")

    with pytest.raises(ConfigError, match=r"not a text file in UTF-8; lab\.yaml is as it was$"):
        edit_profile("lab", editor)
    assert profile_path("lab").read_text() == GOOD


def test_what_is_not_there_cannot_be_edited(site: Path) -> None:
    with pytest.raises(NotFound):
        edit_profile("nonesuch", lambda path: None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"EDITOR": "false"}, "^false: ended with 1; nothing was replaced, your text is in "),
        ({"EDITOR": "true", "VISUAL": "false"}, "^false: ended with 1"),
        (
            {"EDITOR": "./no-editor -w"},
            r"\(./no-editor: No such file or directory\); set VIS",
        ),
        ({"EDITOR": "'"}, "^': the editor cannot be run"),
    ],
)
def test_an_editor_that_fails_is_one_line(tmp_path: Path, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ZslurmError, match=message):
        run_editor(tmp_path / "x.yaml", environ)


def test_the_editor_is_that_of_the_user_with_its_options(tmp_path: Path) -> None:
    file = write(tmp_path / "a b.yaml", "old\n")
    run_editor(file, {"VISUAL": "sed -i s/old/new/", "EDITOR": "false"})
    assert file.read_text() == "new\n"
