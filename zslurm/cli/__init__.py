"""The command line: one file for each command group, which parses, calls and prints. No logic lives here.

What a command needs is imported inside its function: `zslurm --help` loads typer and nothing else.
"""
