"""`python -m zslurm` is the command line."""

from zslurm.cli.main import main

main()
