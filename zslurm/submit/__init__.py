"""What runs on the login node: submission, sweeps, control, the Slurm and the local launcher."""
