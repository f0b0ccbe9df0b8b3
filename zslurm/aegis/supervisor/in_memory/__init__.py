"""Recovery in memory, the supervisor's side: lost ranks, warm processes, planned moves and ranks that hang."""
