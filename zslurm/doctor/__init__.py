"""`zslurm doctor`: is this login node, and is every compute node, fit to train?

A file for each subject in `checks/`; `node.py` runs them on a node, `run_checks.py` on this machine and, as a
Slurm job, on all nodes at once; `node_differences.py` finds the nodes that differ from the others.
"""
