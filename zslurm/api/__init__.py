"""What Python programs use, as `import zslurm`: runs, submissions, faults in logs, environments, checkpoints.

Each file is a thin layer over the functions that the commands call too; nothing here needs torch.
"""
