"""Templates of the scripts that start a run's job. `zslurm config template ls|show` prints them."""
