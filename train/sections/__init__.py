"""Sections of a run's configuration that login nodes read too: phases, segments, metrics, evaluation."""
