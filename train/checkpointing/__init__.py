"""Saves and loads: `save_schedule` (when), `writer` (the background thread), `checkpointer` (what)."""
