"""Integrity of the numbers: what a run computes, sends and keeps is compared, bit for bit, while it trains."""
