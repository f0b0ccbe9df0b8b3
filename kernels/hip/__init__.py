"""Build and launch kernels of HIP C++: one source for AMD, NVIDIA and, to test it, for the CPU.

portability.h    what HIP, CUDA and host C++ call differently; the rules that a source keeps to
multi_tensor.h   kernels over a table of tensors: which elements a block works on, and the formats in memory
*.hip            the kernels; the operations that run them are folders of `zslurm.kernels`
compilers.py     which compilers can build for an architecture, and with which flags; rtc.py: those in a library
build.py         a source to a code object, by the first compiler that works, through a cache on disk
driver.py        load a code object on a device, and launch its kernels
tables.py        fill the tables, in as many launches as it takes

A GPU's code comes from the runtime compiler that torch brings (hipRTC, NVRTC), so no toolchain is needed; if
that is missing or fails, from hipcc or nvcc. Every one of them makes the same: a code object, which the driver
loads. `torch.cuda._compile_kernel` would do the first half, but is private, keeps nothing on disk and adds other
flags; `torch.utils.cpp_extension` needs a toolchain, ninja and torch's headers, and a minute for a build.

The build for the CPU takes any C++17 compiler. It is there for tests, and to see what a kernel does without a GPU;
nothing chooses it by itself.
"""
