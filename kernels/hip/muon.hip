// Muon's two passes around the Newton-Schulz steps; kernels/muon/reference.py defines them.
#include "multi_tensor.h"

// Momentum, what is orthogonalised, and the sum of squares of each chunk of that: reads 8 bytes an element, writes 4
// and what x takes. Operands of the table: gradients, momenta, x. `partials` has a place for each block.
template <class Format>
DEVICE void momentum_chunk(const Table<3>& table, float weight, unsigned nesterov, float* partials, float* sums) {
    const Chunk chunk = chunk_of_block(table);
    const Address gradients = table.address[0][chunk.tensor];
    const Address momenta = table.address[1][chunk.tensor];
    const Address x = table.address[2][chunk.tensor];
    FOR_EACH_LANE(lane) {
        float sum = 0.0f;
        for_each_run(chunk, lane, [&](unsigned first, unsigned count) {
            float gradient[WIDTH], momentum[WIDTH], ahead[WIDTH];
            Fp32::load(gradients, first, count, gradient);
            Fp32::load(momenta, first, count, momentum);
            for (unsigned j = 0; j < WIDTH; ++j) {
                momentum[j] = momentum[j] + (gradient[j] - momentum[j]) * weight;
                ahead[j] = nesterov ? momentum[j] - (momentum[j] - gradient[j]) * weight : momentum[j];
            }
            Fp32::store(momenta, first, count, momentum);
            Format::store(x, first, count, ahead);
            for (unsigned j = 0; j < WIDTH; ++j) {  // behind the end all is zero and adds nothing
                const float rounded = Format::rounded(ahead[j]);
                sum = sum + rounded * rounded;
            }
        });
        sums[lane] = sum;
    }
    add_lanes(sums);
    FOR_EACH_LANE(lane) {
        if (lane == 0) partials[block_index()] = sums[0];
    }
}

KERNEL void muon_momentum_bf16(const IN_PLACE Table<3> table, float weight, unsigned nesterov, float* partials) {
    SHARED float sums[LANES];
    momentum_chunk<Bf16>(table, weight, nesterov, partials, sums);
}
HOST_ENTRY(muon_momentum_bf16)

KERNEL void muon_momentum_fp32(const IN_PLACE Table<3> table, float weight, unsigned nesterov, float* partials) {
    SHARED float sums[LANES];
    momentum_chunk<Fp32>(table, weight, nesterov, partials, sums);
}
HOST_ENTRY(muon_momentum_fp32)

// The norm of each matrix from its partial sums; block k has matrix k.
template <class Format>
DEVICE void norm_of_matrix(const float* partials, unsigned per_matrix, Address norms, float* sums) {
    const float* own = partials + (unsigned long long)block_index() * per_matrix;
    FOR_EACH_LANE(lane) {
        float sum = 0.0f;
        for (unsigned i = lane; i < per_matrix; i += LANES) sum = sum + own[i];
        sums[lane] = sum;
    }
    add_lanes(sums);
    FOR_EACH_LANE(lane) {
        if (lane == 0) {
            const float norm[WIDTH] = {square_root(sums[0])};
            Format::store(norms, block_index(), 1, norm);
        }
    }
}

KERNEL void muon_norms_bf16(const float* partials, unsigned per_matrix, Address norms) {
    SHARED float sums[LANES];
    norm_of_matrix<Bf16>(partials, per_matrix, norms, sums);
}
HOST_ENTRY(muon_norms_bf16)

KERNEL void muon_norms_fp32(const float* partials, unsigned per_matrix, Address norms) {
    SHARED float sums[LANES];
    norm_of_matrix<Fp32>(partials, per_matrix, norms, sums);
}
HOST_ENTRY(muon_norms_fp32)

// Decay and step of the masters, and the bf16 weights: reads 4 bytes an element and what x takes, writes 4, and 2
// where weights are wanted. Operands of the table: masters, x, weights, whose address may be 0.
template <class Format>
DEVICE void update_chunk(const Table<3>& table, float decay, float rate) {
    const Chunk chunk = chunk_of_block(table);
    const Address masters = table.address[0][chunk.tensor];
    const Address x = table.address[1][chunk.tensor];
    const Address weights = table.address[2][chunk.tensor];
    FOR_EACH_LANE(lane) {
        for_each_run(chunk, lane, [&](unsigned first, unsigned count) {
            float master[WIDTH], direction[WIDTH];
            Fp32::load(masters, first, count, master);
            Format::load(x, first, count, direction);
            for (unsigned j = 0; j < WIDTH; ++j) master[j] = master[j] * decay - direction[j] * rate;
            Fp32::store(masters, first, count, master);
            if (weights) Bf16::store(weights, first, count, master);
        });
    }
}

KERNEL void muon_update_bf16(const IN_PLACE Table<3> table, float decay, float rate) {
    update_chunk<Bf16>(table, decay, rate);
}
HOST_ENTRY(muon_update_bf16)

KERNEL void muon_update_fp32(const IN_PLACE Table<3> table, float decay, float rate) {
    update_chunk<Fp32>(table, decay, rate);
}
HOST_ENTRY(muon_update_fp32)
