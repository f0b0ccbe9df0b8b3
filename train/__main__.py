"""`python -m zslurm.train RUN_DIR`, also under torchrun."""

import os
import sys

from zslurm.train.allocator import set_allocator

if __name__ == "__main__":
    set_allocator(os.environ)  # before torch is imported
    from zslurm.train.main import main

    sys.exit(main(sys.argv[1:]))
