"""What a run will cost until it is done, faults included: a simulation of it on its cluster, without torch."""
