"""The command line: a folder for each group of commands; a command parses, calls and prints.

A command's module is imported when the command is called: `zslurm --help` loads typer and nothing else.
"""
