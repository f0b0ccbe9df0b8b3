// Kernels over many tensors: a table of their addresses, and which elements a block works on.
//
// A table is an argument of the kernel, at most 4 KiB with all others. tables.py fills it, and cuts what is longer
// than a table into several launches. Block b works on CHUNK elements of one tensor: the last one whose first block
// is not behind b. A lane takes WIDTH neighbours at a time, in 16-byte accesses where address and end allow it:
//
//     element of a chunk = (row * LANES + lane) * WIDTH + j        row < ROWS, j < WIDTH
#pragma once

#include "portability.h"

constexpr unsigned WIDTH = 8;
constexpr unsigned ROWS = 4;
constexpr unsigned CHUNK = LANES * WIDTH * ROWS;
constexpr unsigned TABLE_BYTES = 3968;  // the other arguments have the rest

template <unsigned OPERANDS>
struct Table {
    static constexpr unsigned TENSORS = TABLE_BYTES / (8 * OPERANDS + 8);
    Address address[OPERANDS][TENSORS];
    unsigned elements[TENSORS];
    unsigned first_block[TENSORS];
    unsigned tensors;
};

struct Chunk {
    unsigned tensor;
    unsigned start;
    unsigned stop;
};

template <unsigned OPERANDS>
DEVICE Chunk chunk_of_block(const Table<OPERANDS>& table) {
    unsigned low = 0, high = table.tensors;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (table.first_block[middle] <= block_index()) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const unsigned start = (block_index() - table.first_block[low]) * CHUNK;
    const unsigned left = table.elements[low] - start;
    return {low, start, start + (left < CHUNK ? left : CHUNK)};
}

// The elements of a format in memory: WIDTH of them from `first` on, of which `count` exist.

struct Fp32 {
    static DEVICE float rounded(float value) { return value; }

    static DEVICE void load(Address tensor, unsigned first, unsigned count, float (&values)[WIDTH]) {
        const Address from = tensor + 4ull * first;
        if (count == WIDTH && from % 16 == 0) {
            for (unsigned half = 0; half < 2; ++half) {
                const Words words = load_words(from + 16 * half);
                for (unsigned j = 0; j < 4; ++j) values[4 * half + j] = from_bits(words.word[j]);
            }
        } else {
            for (unsigned j = 0; j < WIDTH; ++j) values[j] = j < count ? ((const GLOBAL float*)from)[j] : 0.0f;
        }
    }

    static DEVICE void store(Address tensor, unsigned first, unsigned count, const float (&values)[WIDTH]) {
        const Address to = tensor + 4ull * first;
        if (count == WIDTH && to % 16 == 0) {
            for (unsigned half = 0; half < 2; ++half) {
                Words words;
                for (unsigned j = 0; j < 4; ++j) words.word[j] = to_bits(values[4 * half + j]);
                store_words(to + 16 * half, words);
            }
        } else {
            for (unsigned j = 0; j < WIDTH; ++j) {
                if (j < count) ((GLOBAL float*)to)[j] = values[j];
            }
        }
    }
};

struct Bf16 {
    // To the nearest, halves to even; every NaN becomes the same one.
    static DEVICE unsigned round(float value) {
        const unsigned bits = to_bits(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
        return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    }

    static DEVICE float rounded(float value) { return from_bits(round(value) << 16); }

    static DEVICE void load(Address tensor, unsigned first, unsigned count, float (&values)[WIDTH]) {
        const Address from = tensor + 2ull * first;
        if (count == WIDTH && from % 16 == 0) {
            const Words words = load_words(from);
            for (unsigned j = 0; j < WIDTH; ++j) {
                const unsigned word = words.word[j / 2];
                values[j] = from_bits(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
            }
        } else {
            for (unsigned j = 0; j < WIDTH; ++j) {
                values[j] = j < count ? from_bits((unsigned)((const GLOBAL unsigned short*)from)[j] << 16) : 0.0f;
            }
        }
    }

    static DEVICE void store(Address tensor, unsigned first, unsigned count, const float (&values)[WIDTH]) {
        const Address to = tensor + 2ull * first;
        if (count == WIDTH && to % 16 == 0) {
            Words words;
            for (unsigned j = 0; j < 4; ++j) words.word[j] = round(values[2 * j]) | round(values[2 * j + 1]) << 16;
            store_words(to, words);
        } else {
            for (unsigned j = 0; j < WIDTH; ++j) {
                if (j < count) ((GLOBAL unsigned short*)to)[j] = (unsigned short)round(values[j]);
            }
        }
    }
};

// Calls work(first, count) for each run of WIDTH elements that a lane has in a chunk, in their order.
template <class Work>
DEVICE void for_each_run(const Chunk& chunk, unsigned lane, Work work) {
#pragma unroll 1
    for (unsigned row = 0; row < ROWS; ++row) {
        const unsigned first = chunk.start + (row * LANES + lane) * WIDTH;
        if (first < chunk.stop) {
            const unsigned left = chunk.stop - first;
            work(first, left < WIDTH ? left : WIDTH);
        }
    }
}

// Sums what the lanes left in `sums` into sums[0], in one order on every device: halves are added to halves.
DEVICE void add_lanes(float* sums) {
    BARRIER();
    for (unsigned half = LANES / 2; half > 0; half /= 2) {
        FOR_EACH_LANE(lane) {
            if (lane < half) sums[lane] += sums[lane + half];
        }
        BARRIER();
    }
}
