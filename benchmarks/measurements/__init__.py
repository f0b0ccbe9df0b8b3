"""`zslurm bench` against what it should find."""
