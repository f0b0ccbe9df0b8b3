"""The state of a step, from the ranks that were there to those that are left: who sends which elements to whom.

Every rank owned extents of parameter space (checkpoint_tools/format/partition.py), and owns others among fewer
ranks. The state of a rank that survived comes from its own copy, a lost one's from its buddy's. All of it
moves in one all-to-all for each kind of state, so that no rank holds more than what it gives and what it gets.

Cost: each element travels once at most; on a rank, host memory for one kind of what it gives and of what it gets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from zslurm.checkpoint_tools import Extent
from zslurm.train.optim.sharded import OwnedState

Arrays = Mapping[str, npt.NDArray[np.generic]]
"""A rank's copies by the name of the state, each flat."""


@dataclass(frozen=True)
class Owned:
    """What a rank owns, or owned.

    Attributes:
        extents: of its chunk.
        spans: of each state, the elements [start, stop) of the chunk that it is kept of.
    """

    extents: tuple[Extent, ...]
    spans: Mapping[str, tuple[int, int]]

    def of(self, state: str) -> dict[str, list[Extent]]:
        """Return the extents of which a state is kept, by tensor."""
        start, stop = self.spans[state]
        by_tensor: dict[str, list[Extent]] = defaultdict(list)
        for extent in self.extents:
            if start <= extent.offset_in_chunk < stop:
                by_tensor[extent.tensor].append(extent)
        return by_tensor


Moves = list[tuple[slice, slice]]
"""Elements of a state of the former owner, and where the new owner has them."""


def moves(state: str, former: Owned, new: Owned) -> Moves:
    """Return which elements of a state go from one owner to another, in an order that both find."""
    targets, copies = new.of(state), []
    first, begin = former.spans[state][0], new.spans[state][0]
    for tensor, sources in former.of(state).items():
        for source in sources:
            for target in targets.get(tensor, ()):
                start, stop = max(source.start, target.start), min(source.stop, target.stop)
                if start < stop:
                    taken = source.offset_in_chunk - first + start - source.start
                    put = target.offset_in_chunk - begin + start - target.start
                    copies.append((slice(taken, taken + stop - start), slice(put, put + stop - start)))
    return copies


@dataclass(frozen=True)
class Holding:
    """What one member can give.

    Attributes:
        former: the rank that it had; -1 if it had none.
        own: steps of which it has its own copy.
        ward: the former rank whose copies it holds; None if it holds none.
        held: steps of these.
    """

    former: int
    own: Sequence[int]
    ward: int | None
    held: Sequence[int]


def givers(members: Sequence[Holding], size: int, step: int) -> list[int | None]:
    """Return the member that gives the state at a step of each of `size` former ranks; None if none has it."""
    number_of_giver: list[int | None] = [None] * size
    for number, member in enumerate(members):
        if member.ward is not None and step in member.held:
            number_of_giver[member.ward] = number
    for number, member in enumerate(members):
        if member.former >= 0 and step in member.own:
            number_of_giver[member.former] = number
    return number_of_giver


def newest_whole(members: Sequence[Holding], size: int) -> int:
    """Return the newest step of every member that had a rank, and of every former rank; -1 if there is none."""
    common = set.intersection(*(set(member.own) for member in members if member.former >= 0))
    return max((step for step in common if None not in givers(members, size, step)), default=-1)


def why_none(members: Sequence[Holding], size: int) -> str:
    """Return why there is no step to go back to."""
    somewhere = {member.former for member in members if member.own}
    somewhere |= {member.ward for member in members if member.ward is not None and member.held}
    missing = sorted(set(range(size)) - somewhere)
    if not missing:
        return "the ranks have no step in common"
    return f"no copy of rank {missing[0]}'s state is left: its buddy was lost as well, or had no whole copy yet"


def exchange(
    states: Sequence[OwnedState],
    mine: Mapping[int, Arrays],
    given_by: Sequence[int],
    former: Callable[[int], Owned],
    new: Callable[[int], Owned],
    group: dist.ProcessGroup,
) -> None:
    """Fill this rank's states from the copies that all ranks have.

    Args:
        states: of this rank among those that are left; all of their elements that belong to a tensor are filled.
        mine: the copies that this rank gives, by former rank.
        given_by: the rank that gives the state of each former one.
        former: what each of the former ranks owned.
        new: what each rank owns now.
        group: all ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sources, targets = {source: former(source) for source in range(len(given_by))}, [new(r) for r in range(size)]
    of_giver = [[source for source, giver in enumerate(given_by) if giver == member] for member in range(size)]
    for state in states:
        name, values = state.name, state.values
        parts: list[list[npt.NDArray[np.generic]]] = [
            [
                mine[source][name][taken]
                for source in of_giver[rank]
                for taken, _ in moves(name, sources[source], target)
            ]
            for target in targets
        ]
        places = [
            [put for source in of_giver[giver] for _, put in moves(name, sources[source], targets[rank])]
            for giver in range(size)
        ]
        counts = [sum(len(part) for part in to_one) for to_one in parts]
        gets = [sum(put.stop - put.start for put in from_one) for from_one in places]
        send = torch.empty(sum(counts), dtype=values.dtype)
        if sum(counts):
            np.concatenate([part for to_one in parts for part in to_one], out=send.numpy())
        got = torch.empty(sum(gets), dtype=values.dtype, device=values.device)
        dist.all_to_all_single(got, send.to(values.device), gets, counts, group=group)
        start = 0
        for put in (put for from_one in places for put in from_one):
            length = put.stop - put.start
            values[put].copy_(got[start : start + length])
            start += length
