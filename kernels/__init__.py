"""Fused GPU kernels: one torch reference each, HIP or Triton beside it, one dispatch. None yet.

Imports nothing of ours.
"""
