"""The metrics of a run as others read them: columns, the newest rows, the work of each rank."""
