"""Aegis: the supervisor next to a run.

It starts attempts, watches their ranks and nodes, and decides what follows when one ends.
"""
