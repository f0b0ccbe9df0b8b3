"""Muon's update on several ranks: weights written where they are packed, against a second pass that packs them.

Peer: what was there before, `muon.update` of the masters and then torch's `_foreach_copy_` of their pieces into
the packed buffer, in the same process, turn by turn. Both leave the same bits, which is checked.

Matrices: two of one of ZAYA1's experts (4096 x 2048), in as many pieces as 8 ranks and 1,024 ranks hold of them.
On a GPU by the HIP kernel, whose time is that of memory: 12 bytes an element against 16. On a CPU by the same
kernel compiled for the host, on one thread, whose time is that of arithmetic, and by torch's functions, which make
two passes in either case: there is nothing to win there, and a CPU's default rounds in the gather.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import alternate, ratio, write_result
from zslurm.kernels import muon
from zslurm.kernels.dispatch import using

COUNT, ROWS, COLUMNS = 2, 4096, 2048
PIECES = {"8 ranks": 8, "1,024 ranks": 512}
RUNS = 9


def _pieces(parts: int, device: str) -> list[Tensor]:
    """Room for the weights in so many rows for each matrix."""
    packed = torch.zeros(COUNT * ROWS * COLUMNS, dtype=torch.bfloat16, device=device)
    return list(packed.split(ROWS * COLUMNS // parts))


def _one_pass(masters: list[Tensor], x_KMN: Tensor, pieces: list[Tensor], wait: Any) -> None:
    muon.update(masters, x_KMN, decay=0.999, rate=1e-3, pieces=pieces)
    wait()


def _two_passes(masters: list[Tensor], x_KMN: Tensor, pieces: list[Tensor], wait: Any) -> None:
    muon.update(masters, x_KMN, decay=0.999, rate=1e-3)
    torch._foreach_copy_(pieces, list(masters[0].view(-1).split([len(piece) for piece in pieces])))
    wait()


def measure(implementation: str, parts: int, device: str) -> dict[str, Any]:
    """Time both on the same numbers."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    generator = torch.Generator(device).manual_seed(0)
    start = torch.randn(COUNT, ROWS, COLUMNS, generator=generator, device=device)
    x_KMN = torch.randn(COUNT, ROWS, COLUMNS, generator=generator, device=device).bfloat16()
    contenders, left = {}, {}
    for name, action in (("one pass", _one_pass), ("two passes", _two_passes)):
        left[name] = ([start.clone()], _pieces(parts, device))
        masters, pieces = left[name]
        contenders[name] = partial(action, masters, x_KMN, pieces, wait)
    with using("muon", implementation):
        times = alternate(contenders, runs=RUNS)
    one, two = left["one pass"], left["two passes"]
    same = torch.equal(one[0][0], two[0][0]) and all(map(torch.equal, one[1], two[1]))
    if not same:
        raise RuntimeError(f"{implementation}: one pass and two passes left different bits")
    return {
        "implementation": implementation,
        "device": device,
        "pieces_of_a_matrix": parts,
        "times": [timing.row() for timing in times.values()],
        "ratio": ratio(times["two passes"], times["one pass"]),
    }


def run() -> None:
    """Measure and write results/packed_rounding.json."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["hip"] if device == "cuda" else ["hip", "torch"]
    rows = [measure(name, parts, device) for name in names for parts in PIECES.values()]
    write_result(
        "packed_rounding",
        {
            "matrices": f"{COUNT} x {ROWS} x {COLUMNS}, fp32 masters, bf16 steps and weights, one thread on a CPU",
            "ranks": PIECES,
            "rows": rows,
        },
    )
