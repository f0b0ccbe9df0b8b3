"""Validation loss and evaluation commands during a run."""
