"""Copies of each rank's state in host memory: which there are, and how they get to a buddy."""
