"""The repository itself: its size, and what its tests cost."""
