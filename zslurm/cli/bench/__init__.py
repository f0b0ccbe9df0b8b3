"""`zslurm bench`: one file for each measurement; what they share is in options.py and run.py."""
