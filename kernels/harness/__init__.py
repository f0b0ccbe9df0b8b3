"""Build, check and measure all kernels on one machine: what `zslurm dev kernels` and the benchmarks of a GPU run.

builds      every HIP source and every kernel in Triton, compiled for an architecture into the caches
checks      every implementation against the reference, on the cases of its operation
timing      a clock for CPUs and GPUs, and the triad that memory-bound kernels are compared with
bench       every implementation timed on the cases, and the table of crossovers that dispatch reads
figures     comparisons with what is not an implementation: a dense product, torch.compile, fp32
"""
