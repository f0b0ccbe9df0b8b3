"""Recovery in memory inside a job: the store that outlives ranks, and processes that wait for a place."""
