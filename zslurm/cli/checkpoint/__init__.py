"""Checkpoints and weights: list, look into, check, compare, rewrite, convert, and continue a text with them."""
