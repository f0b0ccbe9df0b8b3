"""Context parallelism: one sequence divided over several ranks."""
