"""The tasks that come with zslurm: one YAML file each, and the documents that make.py wrote."""
