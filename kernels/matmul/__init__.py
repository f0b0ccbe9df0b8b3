"""Multiply matrices: by torch (the reference), or by oneDNN on the CPUs where that is faster.

dispatch.py     the operation as callers see it, with torch's function where no other path applies
onednn.py       the path of CPUs from AMD with AVX-512, and what has to hold for it
limits.py       the sizes from which that path pays; without torch, for who plans memory
"""
