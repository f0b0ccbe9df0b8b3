"""What the server of tests/train/ranks.py imports before it forks a rank, so that no rank has to.

The trainer, what the modules of tests import, and torch's compiler, which recomputation imports. None of it is
looked at again by a rank's collections.
"""

import gc

import hypothesis  # noqa: F401
import numpy.random  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import zslurm.train.main  # noqa: F401

gc.collect()
gc.freeze()
