"""Hold every device-specific fast path: one operation each, its reference beside it, and one dispatch.

    matmul          products of two matrices: torch's, or oneDNN's on the CPUs where that is faster
    grouped_gemm    products of groups of rows with one matrix per group: one call, or a loop over the groups

Callers name the operation and nothing else: which library or kernel runs is decided here, from the device, the
format and the shapes. This package imports nothing of ours.
"""
