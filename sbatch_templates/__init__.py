"""Templates of the scripts that start a run's job. `zslurm template ls|show` prints them."""
