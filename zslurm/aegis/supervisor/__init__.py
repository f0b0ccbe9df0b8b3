"""The process next to the training step: it starts attempts, watches them and acts."""
