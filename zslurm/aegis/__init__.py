"""Aegis: the supervisor next to a run.

For now: one attempt for each start of the job, and the truth about its end.
"""
