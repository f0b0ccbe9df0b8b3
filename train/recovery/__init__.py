"""Recovery in memory: ranks that survive a fault regroup, go back by at most a step or two, and train on."""
