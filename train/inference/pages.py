"""Hold the caches of many sequences in pages: keys and values in blocks of tokens, the short memories in slots.

    page      PAGE_TOKENS tokens' keys and values, in every layer under the same number
    slot      one sequence: its block table (which pages, in order), its length, and in every layer the projections
              of its last tokens (`train/model/cache.py` has what these are)

A page that is freed is the next one that is handed out. A sequence that continues another one (`fork`) shares its
full pages and copies the one that is not full; a page is free when no sequence holds it any more. The memory
doubles when no page is free, up to `most_tokens`.

For ZAYA1-base in bf16 a page of 32 tokens is 1.25 MiB in all 40 layers (idea: vLLM, arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zslurm.kernels.qk_conv import join
from zslurm.train.inference.next_tokens import Batch, PagedLayer
from zslurm.train.model.decode_step import LayerStep, ModelStep
from zslurm.train.model.zaya import Zaya

PAGE_TOKENS = 32
_FIRST_PAGES = 16


class NoPageLeft(Exception):
    """There is no memory for more: the sequences hold `most_tokens` already."""


class Pages:
    """The caches of sequences that are decoded together, with a model whose weights do not change meanwhile.

    Attributes:
        model: whose caches they are.
        layers: each layer's part.
        lengths: tokens of each slot's sequence.
        most_pages: pages for which there is memory at most; None: no limit.
        step: computes one token of each sequence faster, where the device has such a way; see `decode_step.py`.
    """

    @torch.inference_mode()
    def __init__(self, model: Zaya, slots: int, most_tokens: int | None = None) -> None:
        """Make room for `slots` sequences, which hold no token yet.

        Args:
            model: whose caches they are.
            slots: sequences at one time.
            most_tokens: tokens for which there is memory at most, rounded up to whole pages; None: no limit.
        """
        model.wait_for_weights()
        config, weight = model.config, model.embedding.weight
        self.model, self.device = model, weight.device
        self.most_pages = None if most_tokens is None else pages_for(most_tokens)
        self._refs: list[int] = []
        self._free: list[int] = []
        self._free_slots = list(range(slots))[::-1]
        self._tables: list[list[int]] = [[] for _ in range(slots)]
        self.lengths = [0] * slots
        shape = 0, PAGE_TOKENS, config.kv_heads, config.head_dim
        self.layers: list[PagedLayer] = []
        for layer in model.all_layers():
            attention = layer.attention
            projection_QD = attention.projection()
            half = attention.value_current.out_features
            convolutions = attention.convolutions()
            memory = projection_QD.new_zeros(slots, convolutions.reach, len(projection_QD) - 2 * half)
            self.layers.append(
                PagedLayer(
                    projection_QD=projection_QD,
                    kernel=join(convolutions),
                    keys=weight.new_zeros(shape),
                    values=weight.new_zeros(shape),
                    before=memory,
                    delayed=projection_QD.new_zeros(slots, 1, half),
                )
            )
        self._grow(min(_FIRST_PAGES, self.most_pages or _FIRST_PAGES))
        self.step: ModelStep | None = None
        if self.device.type == "cpu":
            pairs = zip(model.all_layers(), self.layers, strict=True)
            steps = [LayerStep(layer, config, part) for layer, part in pairs]
            self.step = ModelStep(steps, model.head_entry, model.balancing_bias)

    @property
    def pages(self) -> int:
        """Return the pages for which there is memory now."""
        return len(self._refs)

    @property
    def free_pages(self) -> int | None:
        """Return how many more pages can be handed out; None: any number."""
        return None if self.most_pages is None else self.most_pages - self.pages + len(self._free)

    @property
    def used_pages(self) -> int:
        """Return the pages that sequences hold."""
        return self.pages - len(self._free)

    @property
    def free_slots(self) -> int:
        """Return how many more sequences there can be."""
        return len(self._free_slots)

    @torch.inference_mode()
    def add(self) -> int:
        """Return the slot of a new, empty sequence."""
        slot = self._free_slots.pop()
        for layer in self.layers:
            layer.before[slot] = 0
            layer.delayed[slot] = 0
        return slot

    @torch.inference_mode()
    def fork(self, slot: int) -> int:
        """Return the slot of a new sequence with the same tokens so far.

        Raises:
            NoPageLeft: there is no page to copy the last one to.
        """
        new = self._free_slots.pop()
        table, length = self._tables[slot], self.lengths[slot]
        full = length // PAGE_TOKENS
        copied = [self._page() for _ in table[full:]]
        for page in table[:full]:
            self._refs[page] += 1
        self._tables[new], self.lengths[new] = table[:full] + copied, length
        for layer in self.layers:
            layer.before[new] = layer.before[slot]
            layer.delayed[new] = layer.delayed[slot]
            for old_page, new_page in zip(table[full:], copied, strict=True):
                layer.keys[new_page] = layer.keys[old_page]
                layer.values[new_page] = layer.values[old_page]
        return new

    def table(self, slot: int) -> tuple[int, ...]:
        """Return the pages of a sequence, in order."""
        return tuple(self._tables[slot])

    def free(self, slot: int) -> None:
        """Let go of a sequence."""
        for page in self._tables[slot]:
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)
        self._tables[slot], self.lengths[slot] = [], 0
        self._free_slots.append(slot)

    def reserve(self, slots: Sequence[int], counts: Sequence[int]) -> Batch:
        """Make room for so many more tokens of each sequence, which then count as there.

        Raises:
            NoPageLeft: there is no memory for them; nothing has changed then.
        """
        missing = [
            pages_for(self.lengths[slot] + count) - len(self._tables[slot])
            for slot, count in zip(slots, counts, strict=True)
        ]
        if self.free_pages is not None and sum(missing) > self.free_pages:
            raise NoPageLeft
        starts = [self.lengths[slot] for slot in slots]
        for slot, count, more in zip(slots, counts, missing, strict=True):
            self._tables[slot] += [self._page() for _ in range(more)]
            self.lengths[slot] += count
        tables = [self._tables[slot] for slot in slots]
        return Batch.of(slots, starts, counts, tables, PAGE_TOKENS, self.device)

    def _page(self) -> int:
        """Hand out a page, which one sequence then holds."""
        if not self._free:
            self._grow(max(1, self.pages))
        page = self._free.pop()
        self._refs[page] = 1
        return page

    @torch.inference_mode()
    def _grow(self, more: int) -> None:
        if self.most_pages is not None:
            more = min(more, self.most_pages - self.pages)
        if more <= 0:
            raise NoPageLeft
        self._free += range(self.pages + more - 1, self.pages - 1, -1)
        self._refs += [0] * more
        for layer in self.layers:
            layer.keys = torch.cat([layer.keys, layer.keys.new_zeros(more, *layer.keys.shape[1:])])
            layer.values = torch.cat([layer.values, layer.values.new_zeros(more, *layer.values.shape[1:])])


def pages_for(tokens: int) -> int:
    """Return the pages that so many tokens of one sequence take."""
    return -(-tokens // PAGE_TOKENS)
