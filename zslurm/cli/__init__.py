"""The command line: one file for each command or group, which parses, calls and prints. No logic is here.

A command's module is imported when the command is called: `zslurm --help` loads typer and nothing else.
"""
