"""The checks of one rank, and when they are made.

    every K-th step   weights     a digest of each bucket is equal on all ranks, and this rank's masters round to
      (and the second             its part of them
      of each phase   products    a microbatch is computed again by another rank: equal loss, equal gradients
      and start)      transfers   the reduced gradients fit checksums of what was sent (sums.py), and are bit for
                                  bit the same if they are reduced again; links.py looks for the pair of ranks
    every step        memory      masters and moments are before an update what they were after the last one

All are made before the optimizer takes the step. What is wrong raises on all ranks together, and names the rank:
the run restarts from a checkpoint that is not after the last step that was checked. If no rank is in the minority
(votes.py), the program does not repeat its results: that is reported once, and products are no longer compared.

Cost: in every K-th step one microbatch and one reduction more for each rank, some passes over gradients and
weights, and collectives of a few kilobytes; in every step two passes over what this rank keeps of masters and
moments. No memory but these digests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import TrainConfig
from zslurm.train.data.loader import Loader, Microbatch
from zslurm.train.data.order import DataOrder
from zslurm.train.errors import ChangedMemory, WrongProduct, WrongTransfer
from zslurm.train.integrity.digest import digests, mixed
from zslurm.train.integrity.links import wrong_pairs
from zslurm.train.integrity.sums import wrong_sum
from zslurm.train.integrity.votes import Verdict, agree, checked_within, judge, shifts_of
from zslurm.train.jsonl import Record
from zslurm.train.optim.sharded import ShardedOptimizer
from zslurm.train.parallel.comm import all_gather_into
from zslurm.train.parallel.world import World
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.schedule import Position

_LOG = logging.getLogger(__name__)
_LOSS = "the loss"
COSTLY = 0.01
"""Share of forward and backward above which the start of a run warns."""

Compute = Callable[[Microbatch], Tensor]
"""Runs a microbatch forward and backward, and returns its losses."""


class _Check(NamedTuple):
    """A check under way: the step that it checks (from 0), how ranks compute again, and the results."""

    step: int
    position: Position
    shifts: tuple[int, ...]
    compute: Compute
    results: list[Tensor]  # digests of loss and gradients, one row for each round
    began: float


class Integrity:
    """The checks of one rank; without `integrity.every_steps` it does nothing.

    Attributes:
        verified: steps that were done when the numbers were last found right.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        shards: ZeroShards,
        optimizer: ShardedOptimizer,
        order: DataOrder,
        *,
        local: int,
    ) -> None:
        """Check every `integrity.every_steps` steps; `local` is the number of ranks of a node."""
        self.every, self.verified = config.integrity.every_steps, -1
        self._config, self._world, self._shards, self._optimizer = config, world, shards, optimizer
        self._order, self._local = order, local
        self._fresh = self._repeats = self._sums_repeat = True
        self._check: _Check | None = None
        self._at_rest: tuple[int, Tensor] | None = None

    def is_costly(self) -> bool:
        """Return whether computing microbatches again takes more than COSTLY of forward and backward."""
        return self._share() > COSTLY

    def describe(self) -> str:
        """Return a line on what is checked and what it costs."""
        together = self._config.phases[0].context_parallel
        how = (
            "by the same device, which does not show one that is always wrong"
            if self._world.size == together
            else f"by another rank, by every possible one within {counted(self._turns(together), 'step')}"
        )
        advice = "; a larger integrity.every_steps costs less" if self.is_costly() else ""
        return (
            f"integrity: every {counted(self.every, 'step')} a microbatch of each rank is computed again {how}; "
            f"{100 * self._share():.2g} % of forward and backward{advice}"
        )

    def _share(self) -> float:
        """Return the share of the first phase's microbatches that are computed again."""
        phase = self._config.phases[0]
        groups = self._world.size // phase.context_parallel
        return 1 / (self.every * max(1, phase.segments[0].global_batch // phase.micro_batch // groups))

    def _turns(self, together: int) -> int:
        return self.every * checked_within(self._world.size, self._local, together)

    def start_over(self, step: int) -> None:
        """Check the next step and compare products in it: after `step` steps kernels or shapes are other ones.

        All ranks call it together. A process that took a lost rank's place learns the last verified step.
        """
        if not self.every:
            return
        verified = torch.tensor(self.verified, device=self._world.device)
        self._shards.comm.all_reduce(verified, dist.ReduceOp.MAX)
        self.verified = step if int(verified) < 0 else min(int(verified), step)
        self._fresh = self._repeats = self._sums_repeat = True

    def to_keep(self, saved: Callable[[], Sequence[int]]) -> set[int]:
        """Return the checkpoint to go back to if the next check fails.

        Args:
            saved: returns the steps of the complete checkpoints, which rank 0 must know.
        """
        right = [step for step in saved() if step <= self.verified] if self.every else []
        return {max(right)} if right else set()

    # ---------------------------------------------------------------------------------------- in a checked step

    def is_due(self, step: int) -> bool:
        """Return whether a step (from 0) is to be checked."""
        self._check = None
        return bool(self.every) and (self._fresh or (step + 1) % self.every == 0)

    def begin(self, step: int, position: Position, compute: Compute) -> None:
        """Begin the check of a step before its gradients; all weights are there.

        Raises:
            WrongTransfer: the weights of a rank are not those of the others.
        """
        self._fresh = False
        number, together = (step + 1) // self.every, position.phase.context_parallel
        shifts = shifts_of(number, self._world.size, self._local, together)
        self._check = _Check(step, position, shifts, compute, [], time.monotonic())
        self._compare_weights(step)
        if self._repeats:
            results = self._compute_again(self._check, shifts[0])
            self._check.results.extend([torch.zeros_like(results), results])

    @property
    def wants_first(self) -> bool:
        """Whether the first microbatch of this step is to be noted once its gradients are there."""
        return self._check is not None and bool(self._check.results)

    def note(self, losses: Tensor) -> None:
        """Note the results of this rank's first microbatch, whose gradients are all that was added up."""
        assert self._check is not None
        self._check.results[0] = self._results(losses)

    def finish(self, record: Record) -> None:
        """End the check of this step, whose gradients are reduced.

        Raises:
            WrongTransfer: what a rank received is not the sum of what was sent.
            WrongProduct: a rank computed something else than others.
        """
        check = self._check
        if check is None:
            return
        self._check = None
        self._compare_sums(check.step, record)
        if check.results:
            self._compare_products(check, record)
        self.verified = check.step + 1
        record(
            "integrity",
            step=check.step + 1,
            products=self._repeats,
            sums=self._sums_repeat,
            again=0 if not check.results else check.shifts[0],
            seconds=time.monotonic() - check.began,
        )

    def _compare_sums(self, step: int, record: Record) -> None:
        """Compare the reduced gradients with checksums of the summands, and with another reduction."""
        tensor = wrong_sum(self._shards)
        if rank := self._first_rank(tensor is not None):
            self._raise_wrong_sum(step, rank - 1, tensor, "is not the sum of what all ranks sent")
        if self._world.size == 1 or not self._sums_repeat:
            return
        first, second = self._digests_of_sums(), self._digests_of_next_sums()
        if not self._first_rank(bool((first != second).any())):
            return
        third = self._digests_of_next_sums()
        differs = first != second
        undecided = not torch.equal(first, third) and not torch.equal(second, third)
        tensor = self._shards.extents[int(differs.nonzero()[0])].tensor if bool(differs.any()) else None
        ranks = self._gathered(
            torch.stack([differs.any(), torch.full_like(differs.any(), undecided)]).long()
        ).bool()
        wrong = ranks[:, 0].nonzero().flatten().tolist()
        if not bool(ranks[:, 1].any()) and len({rank // self._local for rank in wrong}) == 1:
            self._raise_wrong_sum(step, wrong[0], tensor, "is another one than two further reductions give")
        self._sums_repeat = False
        self._report_off(record, step, "the sums of gradients", self._told(tensor or "", wrong[0] if wrong else 0),
                         "reductions of the same numbers differ on several nodes, or each time")  # fmt: skip

    def _digests_of_sums(self) -> Tensor:
        gradient = self._shards.master_gradient
        return digests([gradient[:0], *(gradient[extent.in_chunk] for extent in self._shards.extents)])[1:]

    def _digests_of_next_sums(self) -> Tensor:
        self._shards.reduce_again()
        return self._digests_of_sums()

    def _raise_wrong_sum(self, step: int, rank: int, tensor: str | None, problem: str) -> NoReturn:
        name = self._told(tensor or "", rank)
        pairs = wrong_pairs(self._shards)
        ways = ", ".join(f"what rank {sender} sends to rank {receiver} ({self._way(sender, receiver)})"
                         for sender, receiver in pairs[:8])  # fmt: skip
        link = f"{ways} arrives changed" if pairs else "sent again, all arrives between all pairs as it was sent"
        gradient = f"the gradient of {name} that arrived on rank {rank}"
        senders = {sender for sender, _ in pairs}
        if len(pairs) > 1 and len(senders) == 1:  # the first rank that is named is the one at fault
            gradient = f"what is sent on rank {min(senders)} arrives changed, and {gradient}"
        raise WrongTransfer(f"step {step + 1}: {gradient} {problem}; {link}{self._back(step)}", self.verified)

    def _way(self, sender: int, receiver: int) -> str:
        """Return what a message from one rank to another travels over."""
        if sender // self._local == receiver // self._local:
            return "in one node"
        rails = sender % self._local, receiver % self._local
        return f"rail {rails[0]}" if rails[0] == rails[1] else f"from rail {rails[0]} to rail {rails[1]}"

    def _compare_products(self, check: _Check, record: Record) -> None:
        rounds = self._gathered(torch.stack([mixed(results) for results in check.results])).T.tolist()
        if agree(rounds, check.shifts):
            return
        first = self._first_difference(check)
        for shift in check.shifts[1:]:
            result = mixed(self._compute_again(check, shift))
            rounds.append(self._gathered(result.view(1)).flatten().tolist())
        verdict = judge(rounds, check.shifts)
        if verdict.node(self._local) is not None:
            rank = verdict.wrong[0]
            others = "in its other computations" if 0 in check.shifts else "on two others"
            raise WrongProduct(
                f"step {check.step + 1}: a microbatch has another result on rank {rank} than {others}, "
                f"first in {first}{self._back(check.step)}",
                self.verified,
            )
        self._repeats = False
        why = _why_undecided(verdict, self._world.size)
        self._report_off(record, check.step, "the results of a microbatch", first, why)

    def _report_off(self, record: Record, step: int, what: str, first: str, why: str) -> None:
        """Report once that the program does not repeat its numbers, and that these are no longer compared."""
        record("integrity_off", step=step + 1, what=what, first=first, reason=why)
        if self._world.is_first:
            _LOG.warning(
                "integrity: %s do not repeat, first in %s: %s. They are no longer compared; with "
                "parallel.deterministic: true torch's operations repeat",
                what, first, why,
            )  # fmt: skip

    def _first_difference(self, check: _Check) -> str:
        """Return the first of loss and gradients, in the order of backward, that differs between two ranks."""
        names = [_LOSS, *(name for name, _ in self._shards.totals())]
        first, second = (self._gathered(results) for results in check.results[:2])
        differs = (first != second.roll(-check.shifts[0], 0)).any(0)
        return names[int(differs.nonzero()[0])] if bool(differs.any()) else _LOSS

    def _compute_again(self, check: _Check, shift: int) -> Tensor:
        """Return the digests of the first microbatch of the rank that is `shift` before this one."""
        rank = (self._world.rank - shift) % self._world.size
        loader = Loader(
            self._order,
            rank=rank,
            world_size=self._world.size,
            device=self._world.device,
            prefetch=0,
            isolate_documents=self._config.data.isolate_documents,
        )
        losses = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        self._shards.begin_step(backwards=2)  # one more than follow: nothing is reduced
        if loader.share(check.position):
            losses = check.compute(next(loader.microbatches(check.step)))
        return self._results(losses)

    def _results(self, losses: Tensor) -> Tensor:
        return digests([losses, *(total for _, total in self._shards.totals())])

    def _compare_weights(self, step: int) -> None:
        shards = self._shards
        changed = self.changed()
        is_changed = changed is not None and bool(changed)  # which this step will find
        name = None if is_changed else shards.unlike_masters()
        problem = "" if name is None else f"the weights of {name}"
        rank = self._first_rank(bool(problem)) - 1
        if rank < 0 and shards.world_size > 1 and self._buckets_differ():
            rank, problem = self._first_unlike_owners(is_changed=is_changed), "the weights"
        if rank >= 0:
            raise WrongTransfer(
                f"step {step + 1}: {self._told(problem, rank)} on rank {rank} are not what their owners "
                f"sent, or changed in memory{self._back(step)}",
                self.verified,
            )

    def _buckets_differ(self) -> bool:
        """Return whether the weights of some bucket are not the same on all ranks."""
        buckets = digests(self._shards.buckets_of_weights())
        extremes = torch.cat([buckets, ~buckets])
        self._shards.comm.all_reduce(extremes, dist.ReduceOp.MAX)
        return bool((extremes[: len(buckets)] != ~extremes[len(buckets) :]).any())

    def _first_unlike_owners(self, *, is_changed: bool) -> int:
        """Return the first rank whose weights are not what their owners have, which fits the owners' masters.

        -1 if these are padding, which nothing reads, or of an owner whose masters changed in memory. Owners
        decide, no majority does: of two ranks none is in the minority.
        """
        nothing = self._shards.weights[:0]
        by_owner = [mixed(digests([nothing, *parts])) for parts in self._shards.weights_by_owner()]
        changed = torch.full_like(by_owner[0], int(is_changed))
        table = self._gathered(torch.stack([*by_owner, changed]))
        differs = (table[:, :-1] != table.diagonal()) & (table[:, -1] == 0)
        ranks = differs.any(1).nonzero()
        return int(ranks[0]) if len(ranks) else -1

    # --------------------------------------------------------------------------------------------- in each step

    def rest(self) -> None:
        """Note masters and moments as they are after an update."""
        if self.every:
            self._at_rest = (self._optimizer.steps, self._digest_of_state())

    def changed(self) -> Tensor | None:
        """Return 1 if masters or moments of this rank changed since the last update, else 0; None: not known."""
        if self._at_rest is None or self._at_rest[0] != self._optimizer.steps:
            return None
        return (self._digest_of_state() != self._at_rest[1]).any().to(torch.float64)

    def check_at_rest(self, step: int) -> None:
        """Check masters and moments again, after a save that no step follows; all ranks call it together.

        Raises:
            ChangedMemory: those of some rank changed.
        """
        if not self.every:
            return
        changed = (tensor := self.changed()) is not None and bool(tensor)
        if self._first_rank(changed):
            self.raise_changed(step, changed=changed)

    def raise_changed(self, step: int, *, changed: bool) -> None:
        """Raise on all ranks if some rank's state changed in memory before `step`; all of them call it then.

        Raises:
            ChangedMemory: always, with the first of these ranks.
        """
        rank = self._first_rank(changed) - 1
        raise ChangedMemory(
            f"step {step + 1}: masters or moments on rank {rank} changed in memory after step {step}; "
            f"they were right after step {step - 1}",
            step - 1,
        )

    def _digest_of_state(self) -> Tensor:
        return digests([state.values for state in self._optimizer.states])

    # ------------------------------------------------------------------------------------------------- the ranks

    def _first_rank(self, wrong: bool) -> int:
        """Return 1 + the first rank on which something is wrong; 0 if nothing is. All ranks call it together."""
        size = self._world.size
        code = torch.tensor(size - self._world.rank if wrong else 0, device=self._world.device)
        self._shards.comm.all_reduce(code, dist.ReduceOp.MAX)
        return 1 + size - int(code) if int(code) else 0

    def _told(self, text: str, rank: int) -> str:
        """Return the text of one rank on all ranks."""
        texts = [text]
        dist.broadcast_object_list(texts, src=rank, group=self._world.group)
        return texts[0]

    def _gathered(self, values: Tensor) -> Tensor:
        """Return the numbers of all ranks, [ranks, n]."""
        table = values.new_empty(self._world.size * len(values))
        all_gather_into(table, values, group=self._world.group)
        return table.view(self._world.size, -1)

    def _back(self, step: int) -> str:
        """Agree on the last step that was found right, which a process that came later does not know."""
        verified = torch.tensor(self.verified, device=self._world.device)
        self._shards.comm.all_reduce(verified, dist.ReduceOp.MIN)
        self.verified = int(verified)
        ago = counted(step + 1 - self.verified, "step")
        return f"; the numbers were last found right in step {self.verified}, {ago} before"


def _why_undecided(verdict: Verdict, ranks: int) -> str:
    if verdict.wrong and not verdict.undecided:
        return f"ranks of several nodes differ from a majority ({', '.join(map(str, verdict.wrong[:8]))})"
    if ranks == 2:
        return "two ranks differ, and there is no third"
    return f"no two of three computations of the microbatch of rank {verdict.undecided[0]} are equal"
