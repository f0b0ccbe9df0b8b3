"""What computes attention: torch's kernels, an installed package's, and which one is taken."""
