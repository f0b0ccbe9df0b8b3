"""Build, check and time all kernels on one machine: what `zslurm dev kernels` and the benchmarks of a GPU run.

builds      every HIP source and every kernel in Triton, compiled for an architecture into the caches
comparison  every implementation against the reference, on the cases of its operation
timing      a clock for CPUs and GPUs, and the triad that memory-bound kernels are compared with
"""
