"""What a run is on disk: paths, index, state, events, metrics, checkpoints, secrets."""
