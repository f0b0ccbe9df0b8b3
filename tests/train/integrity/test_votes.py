"""Which rank is wrong, from the results of all ranks; and who computes whose microbatch again."""

from __future__ import annotations

import pytest

from zslurm.train.integrity.votes import Verdict, agree, checked_within, judge, shifts_of


def rounds_of(shifts: tuple[int, ...], ranks: int, bad: int, *, to: int = 9) -> list[list[int]]:
    """Results of all rounds if rank `bad` computes other numbers until a round."""
    rounds = []
    for number, shift in enumerate((0, *shifts)):
        spoils = number <= to
        right = [100 * ((q - shift) % ranks) for q in range(ranks)]
        rounds.append([result + (1 + number if q == bad and spoils else 0) for q, result in enumerate(right)])
    return rounds


@pytest.mark.parametrize(("ranks", "local", "together"), [(3, 1, 1), (4, 2, 1), (4, 4, 1), (16, 4, 1), (16, 8, 2)])
def test_a_rank_that_is_always_wrong_is_named_in_every_check(ranks: int, local: int, together: int) -> None:
    for check in range(7):
        shifts = shifts_of(check, ranks, local, together)
        for bad in range(ranks):
            rounds = rounds_of(shifts, ranks, bad)
            assert not agree(rounds[:2], shifts)
            assert judge(rounds, shifts) == Verdict((bad,))
            assert judge(rounds, shifts).node(local) == bad // local


@pytest.mark.parametrize(("ranks", "local"), [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2)])
def test_an_error_that_passes_is_named_on_any_number_of_ranks(ranks: int, local: int) -> None:
    shifts = shifts_of(5, ranks, local, 1)
    rounds = rounds_of(shifts, ranks, ranks - 1, to=0)
    assert judge(rounds, shifts) == Verdict((ranks - 1,))


def test_of_two_ranks_none_is_named_if_they_always_differ() -> None:
    shifts = shifts_of(0, 2, 2, 1)
    rounds = [[7, 8], [8 + 1, 7 + 1], [7, 8], [8 + 1, 7 + 1]]
    verdict = judge(rounds, shifts)
    assert verdict == Verdict((), (0, 1))
    assert verdict.node(2) is None


def test_results_that_never_repeat_name_nobody() -> None:
    shifts = shifts_of(0, 4, 2, 1)
    rounds = [[10 * number + rank for rank in range(4)] for number in range(3)]
    assert judge(rounds, shifts) == Verdict((), (0, 1, 2, 3))


def test_two_kinds_of_nodes_are_no_broken_gpu() -> None:
    """Two of four nodes compute other bits than the rest."""
    shifts = (1, 2)
    rounds = [[100 * ((q - shift) % 4) + (q >= 2) for q in range(4)] for shift in (0, *shifts)]
    assert judge(rounds, shifts).node(1) is None


@pytest.mark.parametrize(("ranks", "local", "together"), [(12, 4, 1), (8, 8, 1), (8, 8, 2), (24, 8, 4)])
def test_every_other_node_comes_in_turn(ranks: int, local: int, together: int) -> None:
    """With one node its groups of ranks do; the ranks that share a sequence are compared with their likes."""
    unit = local if ranks > local else together
    checks = checked_within(ranks, local, together)
    firsts = [shifts_of(check, ranks, local, together)[0] for check in range(checks)]
    assert sorted(firsts) == list(range(unit, ranks, unit))
    for check in range(5):
        shifts = shifts_of(check, ranks, local, together)
        assert len({0, *shifts}) == 3
        assert all(shift % together == 0 for shift in shifts)
