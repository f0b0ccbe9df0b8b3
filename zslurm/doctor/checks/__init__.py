"""The checks of `zslurm doctor`, by group: what `@check` decorates in a file here is one (docs/doctor.md)."""
