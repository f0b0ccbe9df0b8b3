"""One rank of a run whose trainer is another program: its environment, its process, its progress, its end."""
