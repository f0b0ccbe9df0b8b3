"""The core of Aegis in a simulated world: seeded, without clocks and processes, with invariants."""
