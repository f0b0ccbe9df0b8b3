"""What every part uses: files, processes, console, units, redaction, errors. Imports nothing of ours."""
