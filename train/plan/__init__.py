"""How much memory and storage traffic a run takes."""
