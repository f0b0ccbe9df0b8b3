"""Our speed against named peers, side by side in one run. `python -m benchmarks [NAME...]`; results in results/.

The machines that this runs on are shared and noisy: every claim is a ratio of medians of alternating runs.
"""
