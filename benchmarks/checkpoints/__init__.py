"""Saving, loading, verifying and reshaping checkpoints."""
