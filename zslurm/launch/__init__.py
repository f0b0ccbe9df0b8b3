"""From a resolved run to processes: run directory, rendered script, launchers, and what runs inside the job."""
