"""The same faults for every way to run a training program on Slurm, and what became of each."""
