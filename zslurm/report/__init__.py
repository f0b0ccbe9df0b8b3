"""What people see: status, logs, progress, dry runs."""
