"""`zslurm bench`."""
