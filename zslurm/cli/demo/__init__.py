"""The demo: a tiny ZAYA1 on real text, on this machine alone."""
