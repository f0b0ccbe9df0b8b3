"""What travels between the holders and the owners of matrices, in one hop or two: a plan without torch.

In one hop every rank sends to every other. In two, a piece goes first to the rank of its holder's node that is on
its owner's rail, and then along that rail:

    holder (node a, rail i)  --node-->  (node a, rail j)  --rail-->  owner (node b, rail j)

With n nodes of l ranks that is at most l - 1 + n - 1 messages for each rank instead of n l - 1. Of ZAYA1-base on
1,024 ranks in nodes of eight, in buckets of 64 MiB, a rank holds pieces for some 490 others, and sends 134
messages instead of as many; larger buckets make fewer, larger pieces, for fewer others. Weights take the same way
back. Holders and owners are positions in the layout (topology.py). Pieces are packed in the order of positions
if they are held, and in the order of ranks if they are owned, so that what goes to one rank of a hop is
contiguous at both ends. In between a rank has, from each rank i of its node, what goes to each node b; it is sent
on by b. That transposition is the only copy that the second hop adds, of 1/N of the matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from zslurm.train.parallel.buckets import BucketPiece, MatrixSpace
from zslurm.train.parallel.topology import Topology


class Level(StrEnum):
    """The ranks that a hop is between: all, the node's, or the rail's."""

    ALL = "all"
    NODE = "node"
    RAIL = "rail"


@dataclass(frozen=True, slots=True)
class Hop:
    """An all-to-all on the way to the owners: elements to and from each rank of its group, in order."""

    level: Level
    sends: list[int]
    receives: list[int]

    def messages(self, own: int) -> int:
        """Return the messages that rank `own` of the group sends to others, on the way to the owners."""
        return sum(count > 0 for number, count in enumerate(self.sends) if number != own)


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part in the exchange.

    Attributes:
        held: the pieces that it holds, in the order in which it packs them.
        owned: the pieces that it owns, in the order in which they arrive.
        hops: one or two, in the order of the way to the owners.
        through: with two hops, the elements that it passes on: from rank i of its node to node b, at [i][b].
    """

    held: tuple[BucketPiece, ...]
    owned: tuple[BucketPiece, ...]
    hops: tuple[Hop, ...]
    through: tuple[tuple[int, ...], ...] = ()

    @property
    def passed_on(self) -> int:
        """Return the elements that arrive by the first of two hops."""
        return sum(map(sum, self.through))


def plan_route(space: MatrixSpace, position: int, topology: Topology | None = None) -> Route:
    """Return the route of the rank at `position`: in two hops with a `topology`, else in one."""
    held, owned = space.held_by(position), space.owned_by(position)
    if topology is None:
        sends = _counts(((piece.owner, piece.numel) for piece in held), space.ranks)
        receives = _counts(((piece.holder, piece.numel) for piece in owned), space.ranks)
        return Route(held, owned, (Hop(Level.ALL, sends, receives),))
    nodes, local_size = topology.nodes, topology.local_size
    rail, node = divmod(position, nodes)
    owned = tuple(sorted(owned, key=lambda piece: (topology.rank(piece.holder), piece.start)))
    through = tuple(
        tuple(_to_rail(space.held_by(topology.position(node * local_size + peer)), rail, nodes))
        for peer in range(local_size)
    )
    inside = Hop(
        Level.NODE,
        _counts(((piece.owner // nodes, piece.numel) for piece in held), local_size),
        [sum(counts) for counts in through],
    )
    along = Hop(
        Level.RAIL,
        [sum(counts[peer] for counts in through) for peer in range(nodes)],
        _counts(((piece.holder % nodes, piece.numel) for piece in owned), nodes),
    )
    return Route(held, owned, (inside, along), through)


def _to_rail(pieces: Iterable[BucketPiece], rail: int, nodes: int) -> list[int]:
    """Return the elements of pieces that are owned on a rail, for each of its nodes."""
    return _counts(((piece.owner % nodes, piece.numel) for piece in pieces if piece.owner // nodes == rail), nodes)


def _counts(pieces: Iterable[tuple[int, int]], size: int) -> list[int]:
    """Return the elements for each rank."""
    counts = [0] * size
    for rank, numel in pieces:
        counts[rank] += numel
    return counts
