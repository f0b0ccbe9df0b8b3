"""Figures of the repository itself."""
