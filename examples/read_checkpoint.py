"""Look into a checkpoint: what it holds, one tensor as a numpy array, and whether every byte is sound.

    python examples/read_checkpoint.py my-run                            # the newest of a run
    python examples/read_checkpoint.py runs/my-run/checkpoints/step-00000400

It needs numpy and neither torch nor a GPU, and reads only what is asked for.
"""

from __future__ import annotations

import sys

import zslurm


def main() -> int:
    """Print; returns the exit code."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    try:
        with zslurm.Checkpoint.open(sys.argv[1]) as checkpoint:
            print(checkpoint)
            first = checkpoint.names()[0]
            values = checkpoint.numpy(first)
            print(f"{first}: shape {values.shape}, from {values.min():.5g} to {values.max():.5g}")
            print("every byte is sound" if checkpoint.verify().sound else "it is damaged")
    except zslurm.Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
