"""Saves and loads: `schedule` (when), `writer` (the background thread), `checkpointer` (what)."""
