"""How to read a machine: sysfs, GPUs, NICs, amd-smi, nvidia-smi, RAS, mounts, routes."""
