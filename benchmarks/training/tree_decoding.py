"""Decoding one token over ranks: tree attention against ring attention, and against one rank.

One layer's attention of ZAYA1-base (8 query heads, 2 key heads of 128 channels) for one next token; its keys
and values are divided evenly over the ranks. Ring attention passes each rank's keys and values on, ranks - 1 times
and joins what each gives; tree attention (train/context/tree_attention.py) joins results by two all-reduces.
The same processes, one thread each, turn by turn, over gloo; both results are compared with the whole's.

The model beside it is for 8 MI300X of a node (xGMI) and for one GPU in each of 8 nodes (Pollara), per layer:

    read    2 J P S b / (N HBM)                    each rank reads its keys and values once, b bytes a number
    ring    (N - 1) (hop + 2 J P S b / (N link))   passing them on; as much reading as one rank has
    tree    2 2 log2(N) hop + 4 H (P + 2) / link   two all-reduces of fp32, by trees up and down

The values of link, hop and HBM are stated with the result: link rates are nominal, HBM's is the published triad.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import alternate, write_result
from tests.train.ranks import in_group
from zslurm.train.context.blocks import merge
from zslurm.train.context.tree_attention import DividedCache, partial_attention

QUERY_HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 128
LENGTHS = (4096, 32768, 131072)
RANKS = (2, 4)
RUNS = 20

HBM = 4.33e12
FABRICS = {
    "xGMI, 8 GPUs of one node": {"link_bytes_per_s": 64e9, "hop_s": 3e-6},
    "Pollara, one GPU in each of 8 nodes": {"link_bytes_per_s": 50e9, "hop_s": 10e-6},
}
MODELLED_RANKS = 8


class Layer:
    """One layer's cache and the next token's queries, whole and this rank's part."""

    def __init__(self, group: dist.ProcessGroup, length: int) -> None:
        self.cache = DividedCache(group)
        generator = torch.Generator().manual_seed(length)
        self.q_BHSP = torch.randn(1, QUERY_HEADS, 1, HEAD_DIM, generator=generator)
        self.whole = torch.randn(2, 1, KEY_HEADS, length, HEAD_DIM, generator=generator)
        self.part = self.whole.chunk(self.cache.size, dim=3)[self.cache.rank].contiguous()

    def alone(self) -> Tensor:
        """Attend to all keys and values here."""
        grouped = self.q_BHSP.view(1, KEY_HEADS, -1, HEAD_DIM)
        return F.scaled_dot_product_attention(grouped, *self.whole).view_as(self.q_BHSP)

    def tree(self) -> Tensor:
        """Attend to this rank's, and join the results of all."""
        return self.cache.attend(self.q_BHSP, *self.part, None)

    def ring(self) -> Tensor:
        """Attend to this rank's, then to what comes round, which is on its way while the last is attended to."""
        rank, size = self.cache.rank, self.cache.size
        here, out, lse = self.part, None, None
        for turn in range(size):
            work, coming = [], torch.empty_like(here)
            if turn + 1 < size:
                work = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, here, (rank + 1) % size, self.cache.group),
                        dist.P2POp(dist.irecv, coming, (rank - 1) % size, self.cache.group),
                    ]
                )
            part, part_lse = partial_attention(self.q_BHSP, *here, None)
            if out is None or lse is None:
                out, lse = part, part_lse.squeeze(-1)
            else:
                merge(out, lse, part, part_lse.squeeze(-1))
            for each in work:
                each.wait()
            here = coming
        assert out is not None
        return out


def measured(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Times of this rank over lengths."""
    rows = []
    for length in LENGTHS:
        layer = Layer(group, length)
        expected = layer.alone()
        error = max((found - expected).abs().max().item() for found in (layer.tree(), layer.ring()))
        assert error < 1e-5, error
        dist.barrier(group)
        timings = alternate({"one rank": layer.alone, "tree": layer.tree, "ring": layer.ring}, runs=RUNS)
        tree, ring, alone = (timings[name].median for name in ("tree", "ring", "one rank"))
        rows.append(
            {
                "ranks": layer.cache.size,
                "tokens_in_cache": length,
                "ring_to_tree": round(ring / tree, 2),
                "one_rank_to_tree": round(alone / tree, 2),
                "timings": [timing.row() for timing in timings.values()],
            }
        )
    return rows


def modelled() -> list[dict[str, Any]]:
    """Microseconds of a layer by the model of the docstring, in bf16."""
    rows = []
    for fabric, facts in FABRICS.items():
        link, hop, ranks = facts["link_bytes_per_s"], facts["hop_s"], MODELLED_RANKS
        for length in (*LENGTHS, 1 << 20):
            keys = 2 * KEY_HEADS * HEAD_DIM * length * 2
            reading = keys / HBM
            ring = max(reading, (ranks - 1) * (hop + keys / ranks / link))
            tree = reading / ranks + 4 * math.log2(ranks) * hop + 4 * QUERY_HEADS * (HEAD_DIM + 2) / link
            rows.append(
                {
                    "fabric": fabric,
                    "tokens_in_cache": length,
                    "one_rank_us": round(1e6 * reading, 1),
                    "tree_us": round(1e6 * tree, 1),
                    "ring_us": round(1e6 * ring, 1),
                }
            )
    return rows


def run() -> None:
    """Measure and write results/tree_decoding.json."""
    write_result(
        "tree_decoding",
        {
            "torch": torch.__version__,
            "heads": [QUERY_HEADS, KEY_HEADS, HEAD_DIM],
            "over_gloo": [row for ranks in RANKS for row in in_group(measured, ranks)[0]],
            "model": {
                "hbm_bytes_per_s": HBM,
                "ranks": MODELLED_RANKS,
                "fabrics": FABRICS,
                "per_layer": modelled(),
            },
        },
    )
