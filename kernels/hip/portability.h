// One name for what HIP, CUDA and host C++ call differently.
//
// The same source builds with hipcc or hipRTC (AMD), with nvcc or NVRTC (NVIDIA), and with any C++17 compiler as host
// code. On a GPU a block has LANES threads, one for each lane. As host code it has one thread, which takes the lanes
// in turn. So that both give the same bits, a kernel
//
//   - does a lane's work in the body of FOR_EACH_LANE, and hands on what a later such body needs in SHARED memory,
//     with a BARRIER between;
//   - does not depend on the size of a wave: no shuffles, votes or ballots;
//   - is compiled without contraction of a * b + c (the flags are those of compilers.py).
//
// No standard header is needed on a GPU: the runtime compilers have none.
#pragma once

#if defined(__HIP__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)
#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#endif
#define ON_GPU 1
#define ON_AMD 1
#elif defined(__CUDACC__)
#define ON_GPU 1
#define ON_AMD 0
#else
#include <cmath>
#include <cstring>
#include <utility>
#define ON_GPU 0
#define ON_AMD 0
#endif

#if defined(__clang__)
#pragma clang fp contract(off)
#endif

constexpr unsigned LANES = 256;

typedef unsigned long long Address;

#if ON_GPU

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ __launch_bounds__(256)
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define FOR_EACH_LANE(lane) if (const unsigned lane = threadIdx.x; true)
#define HOST_ENTRY(kernel)

DEVICE unsigned block_index() { return blockIdx.x; }
DEVICE float from_bits(unsigned bits) { return __uint_as_float(bits); }
DEVICE unsigned to_bits(float value) { return __float_as_uint(value); }
DEVICE float square_root(float value) { return sqrtf(value); }

#else

#define DEVICE inline
#define KERNEL static
#define SHARED static thread_local
#define BARRIER()
#define FOR_EACH_LANE(lane) for (unsigned lane = 0; lane < LANES; ++lane)

inline thread_local unsigned current_block = 0;
DEVICE unsigned block_index() { return current_block; }
DEVICE float from_bits(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
DEVICE unsigned to_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
DEVICE float square_root(float value) { return std::sqrt(value); }

// Runs `count` blocks of a kernel; the arguments come as a GPU's driver takes them, one address each.
template <class... Parameters, std::size_t... Index>
void run_blocks(void (*kernel)(Parameters...), void** arguments, unsigned first, unsigned count,
                std::index_sequence<Index...>) {
    for (unsigned block = 0; block < count; ++block) {
        current_block = first + block;
        kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[Index])...);
    }
}
template <class... Parameters>
void run_blocks(void (*kernel)(Parameters...), void** arguments, unsigned first, unsigned count) {
    run_blocks(kernel, arguments, first, count, std::index_sequence_for<Parameters...>());
}
#define HOST_ENTRY(kernel)                                                                \
    extern "C" void kernel##_blocks(void** arguments, unsigned first, unsigned count) { \
        run_blocks(kernel, arguments, first, count);                                    \
    }

#endif

// An argument that a kernel indexes at run time: where it is on NVIDIA, instead of a copy in slow memory.
#if ON_GPU && !ON_AMD
#define IN_PLACE __grid_constant__
#else
#define IN_PLACE
#endif

// Global memory. An address out of a table has lost what it points to, and AMD's compiler would make "flat" accesses
// of it, which may be to any kind of memory and wait for all of them.
#if ON_AMD
#define GLOBAL __attribute__((address_space(1)))
#else
#define GLOBAL
#endif

struct Words {
    unsigned word[4];
};

// 16 bytes, aligned.
DEVICE Words load_words(Address address) {
#if ON_AMD
    typedef unsigned Vector __attribute__((ext_vector_type(4)));
    const Vector from = *(const GLOBAL Vector*)address;
    return {{from.x, from.y, from.z, from.w}};
#elif ON_GPU
    const uint4 from = *reinterpret_cast<const uint4*>(address);
    return {{from.x, from.y, from.z, from.w}};
#else
    Words words;
    std::memcpy(&words, reinterpret_cast<const void*>(address), sizeof words);
    return words;
#endif
}

DEVICE void store_words(Address address, const Words& words) {
#if ON_AMD
    typedef unsigned Vector __attribute__((ext_vector_type(4)));
    *(GLOBAL Vector*)address = Vector{words.word[0], words.word[1], words.word[2], words.word[3]};
#elif ON_GPU
    *reinterpret_cast<uint4*>(address) = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
#else
    std::memcpy(reinterpret_cast<void*>(address), &words, sizeof words);
#endif
}
