"""The only code that runs Slurm's commands and reads their output."""
