"""Optimizers over sharded state, learning-rate schedules, and the balancing of experts."""
