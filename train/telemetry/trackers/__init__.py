"""Experiment trackers: the numbers of metrics.jsonl for TensorBoard, Weights & Biases, MLflow and trackio.

One file for each service, a subclass of `Tracker` with three methods; `feed.py` feeds them from rank 0.
"""
