"""Run a benchmark: start the nodes and their ranks, time what they do, and follow what they report."""
