"""zslurm: train ZAYA1-class models on Slurm clusters, and keep the run alive.

Importing this package never imports torch: it runs on login nodes.
"""

__version__ = "0.1.0"
