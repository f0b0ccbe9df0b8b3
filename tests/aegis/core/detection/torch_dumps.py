"""`python -m tests.aegis.core.detection.torch_dumps FOLDER`: dumps of torch's flight recorder, in both formats."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Write both after three collectives of one rank."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "10"
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    text = c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    (folder / "pickled").write_bytes(c10d._dump_fr_trace())  # type: ignore[attr-defined]
    (folder / "json").write_bytes(text if isinstance(text, bytes) else text.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
