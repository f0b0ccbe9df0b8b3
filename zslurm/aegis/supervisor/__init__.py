"""The process beside the training step: it starts attempts, watches them and acts."""
