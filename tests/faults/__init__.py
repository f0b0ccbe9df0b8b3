"""Faults, injected into real runs on a real Slurm: what each does to the run, and how long it takes.

`matrix.py` lists them; `make faults` injects all of them and writes benchmarks/results/faults.json and faults.md.
"""
