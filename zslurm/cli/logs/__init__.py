"""Logs of ranks: one as it is, several merged by time, what went wrong in them."""
