"""What a cluster is: its profile, and what can be found out about it."""
