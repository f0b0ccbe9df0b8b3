"""Aegis: start the supervisor, try its hooks, replay its decisions, classify logs."""
