"""The only code that runs Slurm's commands, and what their answers mean."""
