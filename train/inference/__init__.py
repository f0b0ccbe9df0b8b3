"""Run the model over many sequences of different lengths at once: caches in pages, batches of next tokens."""
