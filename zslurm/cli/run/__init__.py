"""Runs: submit, show, watch, control."""
