"""What people do to checkpoints that no run writes: verify, compare, reshape."""
