"""The core of Aegis in a simulated world of nodes, agents, ranks and Slurm, without clocks and processes."""
