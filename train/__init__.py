"""The trainer: ZAYA1, ZeRO-1 data parallelism, phases, checkpoints.

`torchrun -m zslurm.train RUN_DIR` trains the run whose resolved configuration is in RUN_DIR/config.json.
Importing this package never imports torch; its submodules that need torch do.
"""
