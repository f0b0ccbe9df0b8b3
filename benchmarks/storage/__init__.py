"""Benchmarks of storage: what `bench storage` counts against the kernel, and restarts on warmed spares."""
