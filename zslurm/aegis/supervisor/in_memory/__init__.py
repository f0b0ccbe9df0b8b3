"""Recovery in memory, the supervisor's side: lost ranks, warm processes and planned moves."""
