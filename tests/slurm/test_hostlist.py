"""Hostlists say exactly the names that Slurm means by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.core.errors import ZslurmError
from zslurm.slurm.hostlist import HostlistError, compress, expand, expand_ranges


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("node[0-2]", ["node0", "node1", "node2"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("n[1,3-4,07],login1", ["n1", "n3", "n4", "n07", "login1"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a[1-2],b[3,5]c , d", ["a1", "a2", "b3c", "b5c", "d"]),
        ("[1-3]", ["1", "2", "3"]),
    ],
)
def test_a_hostlist_is_expanded_in_slurms_order(hostlist: str, names: list[str]) -> None:
    assert expand(hostlist) == names


@pytest.mark.parametrize(
    ("names", "hostlist"),
    [
        ([], ""),
        (["login"], "login"),
        (["node7"], "node7"),
        (["node2", "node10", "node1"], "node[1-2,10]"),
        (["node1", "node1"], "node1"),
        (["node08", "node09", "node10"], "node[08-10]"),
        (["node8", "node9", "node10"], "node[8-10]"),
        (["n1-ib", "n2-ib", "n3"], "n[1-2]-ib,n3"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n1-ib0", "n2-ib0", "n3-ib0"], "n[1-3]-ib0"),
    ],
)
def test_names_are_compressed_as_slurm_would(names: list[str], hostlist: str) -> None:
    assert compress(names) == hostlist


text = st.from_regex(r"[a-z][a-z\-.]{0,4}", fullmatch=True)
number = st.integers(0, 120).map(str) | st.integers(0, 120).map("{:03d}".format) | st.just("00")
name = st.tuples(text, number, st.one_of(st.just(""), text), st.one_of(st.just(""), number)).map("".join)


@given(st.sets(name | text, max_size=40))
def test_what_is_compressed_expands_to_the_same_names(names: set[str]) -> None:
    expanded = expand(compress(names))
    assert len(expanded) == len(set(expanded))
    assert set(expanded) == names


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 6))
def test_a_run_of_numbered_nodes_is_one_range(first: int, more: int, width: int) -> None:
    names = [f"node{index:0{width}d}" for index in range(first, first + more + 1)]
    assert compress(reversed(names)).count("[") == (1 if more else 0)
    assert expand(compress(names)) == names


@given(st.text("ab01[]-, ", max_size=12))
def test_any_text_is_expanded_or_refused(hostlist: str) -> None:
    try:
        names = expand(hostlist)
    except HostlistError:
        return
    assert not any(set("[]") & set(name) for name in names)


@pytest.mark.parametrize("hostlist", ["node[1-2", "node1-2]", "n[2-1]", "n[a-b]", "n[]", "n[1-]", "n[[1]]"])
def test_a_wrong_hostlist_is_refused_in_one_line(hostlist: str) -> None:
    with pytest.raises(HostlistError) as caught:
        expand(hostlist)
    assert isinstance(caught.value, ZslurmError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hostlist", ["n[0-99999999999]", "a[0-9999]b[0-9999]"])
def test_an_absurd_hostlist_does_not_fill_the_memory(hostlist: str) -> None:
    with pytest.raises(HostlistError, match="more than"):
        expand(hostlist)


def test_more_digits_than_a_number_has_are_text_in_a_name_and_refused_in_a_range() -> None:
    long = "9" * 5000
    assert compress([long, "n2", f"n{long}", "n1"]) == f"{long},n[1-2],n{long}"
    assert expand(f"n{long}") == [f"n{long}"]
    for ranges in (f"0-{long}", long):
        with pytest.raises(HostlistError, match=r"range `.{1,60}`: expected a number"):
            expand_ranges(ranges)


def test_task_lists_are_numbers() -> None:
    assert expand_ranges("0-3,7") == [0, 1, 2, 3, 7]
