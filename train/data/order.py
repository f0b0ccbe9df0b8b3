"""The global order of a run: which sequence of which source is trained on when, a pure function of (seed, place).

A place is a phase and a number among its sequences. The phase's mixture gives the source it comes from and how
many of that source the phase takes before it (train/data/mixture.py); the phases before with the same context give
how many they took; together that is the counter whose sequence the source's own shuffle gives
(train/data/sampler.py). So a phase continues each source after the last sequence of earlier phases of its context,
whatever their mixtures were, and a source that a phase leaves out does not move. Contexts cut a corpus
differently: each has a separate order. A source that comes to its end begins again, in a new order.

Ranks, microbatches, workers and prefetching do not appear. Nothing is stored but the configuration: to resume, a
step is enough. What checkpoints record next to it is there to notice when configuration or data have changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.data.mixture import Mixture
from zslurm.train.data.sampler import Sampler
from zslurm.train.data.training_data import ALONE, TrainingData, key_of
from zslurm.train.errors import ConfigError, DataError
from zslurm.train.schedule import Plan
from zslurm.train.sections.phases import Packing, PhaseConfig

PACKED = " best_fit"
"""How the name of a cut ends that makes packs of whole documents."""


_NEARLY = Fraction(1, 10)
"""How near to a whole the sum of shares must be to look as if it were meant to be one."""


@dataclass(frozen=True)
class SourceProgress:
    """What was taken of a source.

    Attributes:
        tokens: places in its sequences, padding included.
        epochs: times that it was gone through.
    """

    tokens: int
    epochs: float


class DataOrder:
    """The order of a run.

    Attributes:
        data: its sources.
        plan: its steps.
        packed: whether each phase trains on packs of whole documents; else on windows.
        mixtures: one for each phase.
    """

    def __init__(self, data: TrainingData, plan: Plan, seed: int, packing: Packing = "windows") -> None:
        """Work out the mixtures, and how far the phases before each one got in every source.

        `packing` is for the phases which set none.

        Raises:
            ConfigError: a share is too small.
            DataError: a source is too short for a phase that takes from it.
        """
        self.data, self.plan, self.seed = data, plan, seed
        self.packed = tuple((phase.packing or packing) == "best_fit" for phase in plan.phases)
        self.mixtures = tuple(self._mixture(index, phase) for index, phase in enumerate(plan.phases))
        self._before: list[dict[str, int]] = []
        taken: dict[str, Counter[str]] = defaultdict(Counter)
        for index in range(len(plan.phases)):
            self._before.append(dict(taken[self._cut(index)]))
            taken[self._cut(index)].update(self.counts(index))

    def masked(self, phase_index: int) -> bool:
        """Return whether some of the targets of a phase may not count."""
        return self.packed[phase_index] or self.data.masked

    def sequences(self, name: str, phase_index: int) -> int:
        """Return how many sequences of a phase's kind a source has: one epoch.

        Raises:
            DataError: not a single one.
        """
        context = self.plan.phases[phase_index].context
        return self.data.sequences(name, context, packed=self.packed[phase_index])

    def _cut(self, phase_index: int) -> str:
        """Name how a phase makes sequences of a source; phases of one name continue each other's order."""
        return f"{self.plan.phases[phase_index].context}{PACKED if self.packed[phase_index] else ''}"

    def counts(self, phase_index: int) -> dict[str, int]:
        """Return how many sequences of each source a phase trains on."""
        segments = self.plan.phases[phase_index].segments
        return self.mixtures[phase_index].counts(sum(segment.steps * segment.global_batch for segment in segments))

    def at(self, phase_index: int, sequences: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Locate sequences, int64 [k], numbered from 0 in their phase.

        Returns:
            The source's place in `data.names`, and the sequence's index in it; int64 [k] each.
        """
        mixture = self.mixtures[phase_index]
        source_of, before = mixture.at(sequences)
        source, index = np.empty_like(source_of), np.empty_like(source_of)
        for source_index in np.unique(source_of).tolist():
            of_source, name = source_of == source_index, mixture.names[source_index]
            sampler = Sampler(self.sequences(name, phase_index), self.seed, name)
            source[of_source] = self.data.names.index(name)
            index[of_source] = sampler.indices(self._before[phase_index].get(name, 0) + before[of_source])
        return source, index

    def taken(self, done: int) -> dict[str, dict[str, int]]:
        """Return how many sequences of each source the first `done` steps train on, by context and packing.

        As {"4096": {"web": 90, "code": 10}, "4096 best_fit": {"chats": 8}}: keys are text, as in JSON.
        """
        position = self.plan.at(done) if done < self.plan.total_steps else None
        finished = len(self.plan.phases) if position is None else position.phase_index
        counts = [self.counts(index) for index in range(finished)]
        if position is not None:
            counts.append(self.mixtures[finished].counts(position.sequence))
        taken: dict[str, Counter[str]] = defaultdict(Counter)
        for index, of_phase in enumerate(counts):
            if some := {name: count for name, count in of_phase.items() if count}:
                taken[self._cut(index)].update(some)
        return {context: dict(of_context) for context, of_context in taken.items()}

    def progress(self, done: int) -> dict[str, SourceProgress]:
        """Return what the first `done` steps took of each source."""
        by_source = {name: SourceProgress(0, 0.0) for name in self.data.names}
        for cut, counts in self.taken(done).items():
            context, packed = int(cut.removesuffix(PACKED)), cut.endswith(PACKED)
            for name, count in counts.items():
                epochs = count / self.data.sequences(name, context, packed=packed)
                before = by_source[name]
                by_source[name] = SourceProgress(before.tokens + count * context, before.epochs + epochs)
        return by_source

    def check_epochs(self, most: float | None) -> None:
        """Make sure that the run takes no more epochs of a source than it may.

        Raises:
            DataError: it would; names the source.
        """
        if most is None:
            return
        for name, taken in self.progress(self.plan.total_steps).items():
            if taken.epochs > most:
                raise DataError(
                    f"{key_of(name)}: the run takes {taken.epochs:.3g} epochs of it, more than data.max_epochs "
                    f"({most:g}); lower its share or the tokens of a phase, add data, or raise data.max_epochs"
                )

    def notes(self) -> list[str]:
        """Return what is strange about the mixtures, a line each: shares that nearly sum to a whole."""
        lines = []
        for index, phase in enumerate(self.plan.phases):
            total = sum((Fraction(str(share)) for share in phase.mix.values()), Fraction())
            total_expected = next(
                (
                    total_expected
                    for total_expected in (1, 100)
                    if total != total_expected and abs(total - total_expected) <= total_expected * _NEARLY
                ),
                None,
            )
            if total_expected is not None:
                lines.append(
                    f"phases[{index}].mix: the shares sum to {float(total):g}, not {total_expected}; each "
                    "counts as its part of the sum"
                )
        return lines

    def record(self, done: int) -> dict[str, Any]:
        """Return what a checkpoint after `done` steps records of the data."""
        return {
            "seed": self.seed,
            "data_fingerprint": self.data.fingerprint,
            "tokenizer_sha256": self.data.header.tokenizer_sha256,
            "sources": {name: corpus.fingerprint for name, corpus in self.data.corpora.items()},
            "sequences": self.taken(done),
            "packs": self._checksums(),
        }

    def _checksums(self) -> dict[str, dict[str, int]]:
        """Return the checksum of each packing that the run trains on, by context and source."""
        by_cut: dict[str, dict[str, int]] = {}
        for index, phase in enumerate(self.plan.phases):
            if self.packed[index]:
                names = self.mixtures[index].names
                checksums = {name: self.data.packs(name, phase.context).crc32 for name in names}
                by_cut.setdefault(self._cut(index), {}).update(checksums)
        return by_cut

    def changes(self, recorded: Mapping[str, Any], done: int) -> list[str]:
        """Describe what has changed in the data of a run that is resumed, a line for each change.

        `recorded` is what `record` gave after the `done` steps; an imported checkpoint has none of it.

        Raises:
            DataError: the tokenizer is another one.
            ConfigError: the same data were mixed differently in the steps that are done.
        """
        own_record = self.record(done)
        if recorded.get("tokenizer_sha256", own_record["tokenizer_sha256"]) != own_record["tokenizer_sha256"]:
            raise DataError(
                f"{self.data.paths}: made with another tokenizer than the checkpoint's run; "
                "set data.path back, or submit with --new"
            )
        lines = []
        if recorded.get("data_fingerprint", own_record["data_fingerprint"]) != own_record["data_fingerprint"]:
            lines = self._changed_sources(recorded.get("sources", {}))
        if recorded.get("seed", self.seed) != self.seed:
            lines.append(f"run.seed is {self.seed}, and was {recorded['seed']}: from here on the order is another")
        if not lines and any(
            own_record["packs"].get(cut, {}).get(name, checksum) != checksum
            for cut, of_cut in recorded.get("packs", {}).items()
            for name, checksum in of_cut.items()
        ):
            lines.append("data.long_documents was changed: from here on other documents are packed together")
        before, now = recorded.get("sequences", own_record["sequences"]), own_record["sequences"]
        if before != now and not lines:
            raise ConfigError(
                f"phases[].mix or packing: the {counted(done, 'step that is done', 'steps that are done')} took "
                f"{_shown(before)}; now they would take "
                f"{_shown(now)}; set the mix back and give the new one to a phase that begins after them"
            )
        return lines

    def _changed_sources(self, before: Mapping[str, str]) -> list[str]:
        lines = [
            f"{corpus.path} is not the data that the checkpoint was trained on"
            for name, corpus in self.data.corpora.items()
            if before.get(name, "" if name == ALONE else corpus.fingerprint) != corpus.fingerprint
        ]
        lines += [f"{key_of(name)} is new" for name in self.data.names if name not in before and name != ALONE]
        return lines + [f"{key_of(name)} is gone" for name in before if name not in self.data.names]

    def _mixture(self, index: int, phase: PhaseConfig) -> Mixture:
        corpora = self.data.corpora
        shares = phase.mix or {name: corpus.token_count for name, corpus in corpora.items()}
        try:
            mixture = Mixture.of(shares, f"zslurm mixture {self.seed} {index}")
        except ValueError as error:
            raise ConfigError(f"phases[{index}].mix: {error}") from error
        for name in mixture.names:
            self.sequences(name, index)
        return mixture


def _shown(taken: Mapping[str, Mapping[str, int]]) -> str:
    parts = [
        f"{count} {'packs ' if cut.endswith(PACKED) else ''}of {name or 'the data'}"
        for cut, counts in taken.items()
        for name, count in counts.items()
    ]
    return ", ".join(parts)
