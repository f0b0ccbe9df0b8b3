// AdamW's step over many tensors in one pass; kernels/adamw/reference.py defines it.
#include "multi_tensor.h"

// The numbers of one step; `Factors` in kernels/adamw/reference.py has them in this order.
struct Factors {
    float decay;
    float mean_weight;
    float square_decay;
    float square_weight;
    float root_scale;
    float rate;
    float eps;
};

// Reads 16 bytes an element, writes 12, and 2 where weights are wanted. Operands of the table: masters, gradients,
// both moments, weights, whose address may be 0.
KERNEL void adamw(const IN_PLACE Table<5> table, const Factors by) {
    const Chunk chunk = chunk_of_block(table);
    const Address masters = table.address[0][chunk.tensor];
    const Address gradients = table.address[1][chunk.tensor];
    const Address means = table.address[2][chunk.tensor];
    const Address squares = table.address[3][chunk.tensor];
    const Address weights = table.address[4][chunk.tensor];
    FOR_EACH_LANE(lane) {
        for_each_run(chunk, lane, [&](unsigned first, unsigned count) {
            float master[WIDTH], gradient[WIDTH], mean[WIDTH], square[WIDTH];
            Fp32::load(masters, first, count, master);
            Fp32::load(gradients, first, count, gradient);
            Fp32::load(means, first, count, mean);
            Fp32::load(squares, first, count, square);
            for (unsigned j = 0; j < WIDTH; ++j) {
                mean[j] = mean[j] + (gradient[j] - mean[j]) * by.mean_weight;
                square[j] = square[j] * by.square_decay + gradient[j] * by.square_weight * gradient[j];
                const float root = square_root(square[j]) * by.root_scale + by.eps;
                master[j] = master[j] * by.decay - mean[j] * by.rate / root;
            }
            Fp32::store(masters, first, count, master);
            Fp32::store(means, first, count, mean);
            Fp32::store(squares, first, count, square);
            if (weights) Bf16::store(weights, first, count, master);
        });
    }
}
HOST_ENTRY(adamw)
