"""`python -m train RUN_DIR`, also under torchrun."""

import sys

from train.loop import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
