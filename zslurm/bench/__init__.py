"""`zslurm bench`: what the GPUs, links, rails and file systems of a cluster do, measured by its own ranks.

One file here for each measurement (measurement.py has the protocol and the list); `run` starts the ranks and
follows them, `results` compares, draws and applies what they found.
"""
