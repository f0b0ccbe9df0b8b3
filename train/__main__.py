"""`python -m zslurm.train RUN_DIR`, also under torchrun."""

import sys

from zslurm.train.loop import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
