"""Pure: log lines become faults."""
