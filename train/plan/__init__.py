"""How much memory and storage traffic a run takes, its matrix products, and the rules for their sizes."""
