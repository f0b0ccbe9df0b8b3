"""Runs: submit, show, follow, control."""
