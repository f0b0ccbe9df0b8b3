"""What a run measures of itself."""
