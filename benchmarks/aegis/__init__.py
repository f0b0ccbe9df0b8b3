"""Aegis: its own cost, how it scales, reading logs, and the goodput of runs with faults."""
