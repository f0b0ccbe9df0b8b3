"""`zslurm submit`: its options, one run or a sweep, and the dry run."""
