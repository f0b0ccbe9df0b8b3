"""The command line: rooms by command group; a command parses, calls and prints.

A command's module is imported when the command is called: `zslurm --help` loads typer and nothing else.
"""
