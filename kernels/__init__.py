"""Hold every device-specific fast path: one operation each, its reference next to it, and one dispatch.

An operation is a folder: `reference.py` (or the folder's `__init__.py`) states in plain torch what is computed,
the other files compute it faster on one kind of device. Callers name the operation and nothing else: which library
or kernel runs is decided here, from the device, the format, the sizes and what was measured.

    grouped_gemm        products of groups of rows with one matrix per group: Triton's, torch's, or a loop
    experts             routing, the order of rows by expert, SwiGLU and the way back: torch's, or Triton's kernels
    head                products of 16-bit matrices with an fp32 result; losses and gradient in the logits' place
    symmetric_product   X X^T and b A + c A A with half of the FLOPs: what Newton-Schulz steps are made of
    qk_conv             queries and keys of CCA: convolutions, mean skip, norm, temperature and rotation
    residual_norm       residual scaling, addition and norm as one: by torch, or by kernels in Triton
    muon                momentum and update of many matrices: by torch, or in one pass each by HIP kernels

Besides the operations:

    dispatch            the frame of an operation, and how one of its implementations is chosen
    arch                the architectures that kernels are chosen, compiled and measured for
    checks              what is wrong with operands, for every implementation
    case                operands that an operation is checked and measured on; cases.py in its folder has them
    harness             build, check and measure all of them: `zslurm dev kernels`
    cache               the user's directories of builds and measured tables
    prepared            kernels that were built before a process started
    amd_assembly        resources and instructions of kernels in what LLVM writes for AMD's GPUs
    code_object         what a GPU's compiler makes of the kernels in Triton, read without such a GPU
    triton_tools        what the kernels in Triton share
    hip                 build and launch kernels of HIP C++ on AMD's and NVIDIA's GPUs, and on the CPU for tests

This package imports nothing of ours.
"""
