"""The state of a run, from its job and its own files."""
