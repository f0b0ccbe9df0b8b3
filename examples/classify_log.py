"""Find out by its logs why a job died: of any program, on any cluster.

    python examples/classify_log.py slurm-4242.out dmesg.txt

Without a file it reads a log that it writes itself. `zslurm why` prints the same as a table.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import zslurm

SAMPLE = """\
step 1200 loss 2.31
[rank3]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has 191.98 GiB in total.
srun: error: node7: task 3: Exited with exit code 1
"""


def main() -> None:
    """Print the root cause, what it points at, and what to do."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(name) for name in sys.argv[1:]]
        if not files:
            files = [Path(directory) / "slurm-1.out"]
            files[0].write_text(SAMPLE)
        found = zslurm.classify(files)
    if found.root is None:
        print("no fault was found")
        return
    print(f"root cause: {found.root.match.kind}, line {found.root.finding.number} of {found.root.file}")
    print(f"suspect:    node {found.suspect.node}, rank {found.suspect.rank}, GPU {found.suspect.gpu}")
    print(f"what to do: {found.advice}")
    print(f"lines that report a fault: {len(found.lines)}")


if __name__ == "__main__":
    main()
