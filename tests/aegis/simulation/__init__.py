"""Schedules of faults, played in the simulated world of `zslurm.aegis.simulation`, and invariants."""
