"""The process on each node: sensors, commands of the supervisor, the standby supervisor."""
