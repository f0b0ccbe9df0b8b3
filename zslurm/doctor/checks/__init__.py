"""The checks of `zslurm doctor`, one in each file; a new file here is a new check (see docs/doctor.md)."""
