"""`zslurm bench`: one file for each measurement; what they share is in run.py."""
