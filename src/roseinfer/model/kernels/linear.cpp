// y = activation(x W^T + b) in float32, in registers, the weight packed once. Knows nothing of layers.
//
// Beside gemm.cpp because there are no tiles of float32: here a product is a register's and not a tile's, rows are read
// where they lie, and AVX2 will do. What both do to a sum at the end is in activation.h.
//
// An output is one chain of fused multiply-adds over k, in ascending order, from 0: a sum that has to wait in memory is
// a float32 there as in its register. Rows do not mix. So an output's bits depend on its row of x and its row of W
// alone: not on the number of rows, on how they are cut into blocks, or on the threads, which share out panels and rows
// and never k.
//
// Packed weight: panels of kPanel outputs, one below the other; in a panel, for each input, the weights of its outputs.
// Outputs past the weight's edge are 0.

#include <omp.h>

#include <algorithm>

#include "activation.h"
#include "common.h"

namespace {

constexpr int64_t kLineFloats = 16;  // a cache line

constexpr int kVectors = 3;                   // registers of outputs side by side: 8 rows of 3 sums, 3 weights and a
constexpr int kBlockRows = LANES / 2;         // number of x fill 28 of AVX-512's 32 registers; 4 rows AVX2's 16
constexpr int64_t kPanel = kVectors * LANES;  // register_linear.py rounds up to 48
constexpr int64_t kChunk = 768;               // inputs of a panel that all rows pass before the next ones take their
                                              // turn: 144 KiB in the second cache, and as much on its way there
constexpr int64_t kPiece = 8;                 // of them, how many between two turns of asking for what is to come:
constexpr int64_t kAheadLines = 3;            // so many lines each of
constexpr int64_t kStreams = kPiece * kPanel / kLineFloats / kAheadLines;  // places, which memory likes more than one
constexpr int64_t kRowsBytes = 1 << 19;       // rows of x that stay in the second cache while panels go by
constexpr int64_t kMaxRows = 128;             // of them
constexpr int64_t kWorthThreads = 1 << 16;    // multiply-adds; below, waking a thread costs more than it saves

// A linear layer, as register_linear.py's _Descriptor lays it out.
struct Linear {
    const float* weight;  // packed
    const float* bias;    // [num_outputs], or null
    int64_t num_outputs;
    int64_t num_inputs;
    int32_t activation;
};

// Some rows times a chunk of a panel.
struct Block {
    const float* x;
    int64_t row_step;
    const float* weight;
    int64_t num_inputs;
    bool is_first;        // chunk of the panel: sums begin at 0
    float* sums;          // [row][kPanel]
    const float* ahead;   // the first stream to ask for
    int64_t num_streams;  // how many
    int64_t stream_step;  // from one to the next
};

template <int num_rows>
inline __attribute__((always_inline)) void multiply_input(const float* x, int64_t row_step, const float* weight,
                                                          Floats (&sums)[num_rows][kVectors]) {
    Floats weights[kVectors];
    for (int i = 0; i < kVectors; ++i) weights[i] = load(weight + i * LANES);
    for (int row = 0; row < num_rows; ++row) {
        const Floats value = splat(x[row * row_step]);
        for (int i = 0; i < kVectors; ++i) sums[row][i] = multiply_add(value, weights[i], sums[row][i]);
    }
}

// Not inlined, so that the general registers are enough for the rows' addresses.
template <int num_rows>
__attribute__((noinline)) void multiply_rows(const Block& block) {
    Floats sums[num_rows][kVectors];
    for (int row = 0; row < num_rows; ++row) {
        for (int i = 0; i < kVectors; ++i) {
            sums[row][i] = block.is_first ? zeros() : load(block.sums + row * kPanel + i * LANES);
        }
    }
    const float *x = block.x, *weight = block.weight, *ahead = block.ahead;
    const int64_t row_step = block.row_step;
    int64_t input = 0;
    for (; input + kPiece <= block.num_inputs; input += kPiece, ahead += kAheadLines * kLineFloats) {
        for (int64_t stream = 0; stream < block.num_streams; ++stream) {
            for (int64_t line = 0; line < kAheadLines; ++line) {
                _mm_prefetch(ahead + stream * block.stream_step + line * kLineFloats, _MM_HINT_T1);
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < kPiece; ++i, ++x, weight += kPanel) multiply_input<num_rows>(x, row_step, weight, sums);
    }
    for (; input < block.num_inputs; ++input, ++x, weight += kPanel) {
        multiply_input<num_rows>(x, row_step, weight, sums);
    }
    for (int row = 0; row < num_rows; ++row) {
        for (int i = 0; i < kVectors; ++i) store(block.sums + row * kPanel + i * LANES, sums[row][i]);
    }
}

template <int at_most = kBlockRows>
void multiply_block(int64_t num_rows, const Block& block) {
    if constexpr (at_most > 1) {
        if (num_rows < at_most) return multiply_block<at_most - 1>(num_rows, block);
    }
    multiply_rows<at_most>(block);
}

// Sums of rows into outputs: add the bias, activate.
void finish_rows(const Linear& linear, const float* sums, int64_t num_rows, int64_t column, float* out) {
    const int64_t count = std::min(kPanel, linear.num_outputs - column);
    alignas(64) float bias[kPanel] = {};
    if (linear.bias) std::memcpy(bias, linear.bias + column, count * sizeof(float));
    with_activation(linear.activation, [&](auto activation) {
        for (int64_t row = 0; row < num_rows; ++row) {
            float* to = out + row * linear.num_outputs + column;
            for (int64_t at = 0; at < count; at += LANES) {
                const Floats x = add(load(sums + row * kPanel + at), load(bias + at));
                store_first(to + at, activate<activation.value>(x), count - at);
            }
        }
    });
}

// All inputs of some rows times one panel, into their outputs. The blocks of rows share out the streams.
void multiply_panel(const Linear& linear, const float* x, int64_t num_rows, int64_t panel, float* sums, float* out) {
    const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    Block block = {};
    block.row_step = linear.num_inputs;
    for (int64_t input = 0; input < linear.num_inputs; input += kChunk) {
        block.num_inputs = std::min(kChunk, linear.num_inputs - input);
        block.weight = linear.weight + (panel * linear.num_inputs + input) * kPanel;
        block.is_first = input == 0;
        block.stream_step = block.num_inputs / kPiece * kAheadLines * kLineFloats;
        const float* next = block.weight + block.num_inputs * kPanel;
        for (int64_t index = 0; index < num_blocks; ++index) {
            const int64_t row = num_rows * index / num_blocks, end = num_rows * (index + 1) / num_blocks;
            const int64_t stream = kStreams * index / num_blocks;
            block.x = x + row * linear.num_inputs + input;
            block.sums = sums + row * kPanel;
            block.ahead = next + stream * block.stream_step;
            block.num_streams = kStreams * (index + 1) / num_blocks - stream;
            multiply_block(end - row, block);
        }
    }
    finish_rows(linear, sums, num_rows, panel * kPanel, out);
}

// So many rows that they stay in the cache, and no more than give every thread something to do.
int64_t rows_at_once(int64_t num_rows, int64_t num_inputs, int64_t num_panels) {
    int64_t at_once = std::min(kMaxRows, kRowsBytes / int64_t(num_inputs * sizeof(float)));
    const int64_t num_wanted = 2 * omp_get_max_threads();
    if (num_panels < num_wanted) at_once = std::min(at_once, num_rows * num_panels / num_wanted);
    return std::max<int64_t>(kBlockRows, at_once / kBlockRows * kBlockRows);
}

}  // namespace

// weight[output * output_step + input * input_step] -> packed, of room for ceil(outputs / kPanel) * kPanel rows.
EXPORT void roseinfer_linear_pack_float32(const float* weight, int64_t output_step, int64_t input_step,
                                          int64_t num_outputs, int64_t num_inputs, float* packed) {
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        float* to = packed + panel * kPanel * num_inputs;
        for (int64_t input = 0; input < num_inputs; ++input) {
            for (int64_t output = panel * kPanel; output < (panel + 1) * kPanel; ++output) {
                *to++ = output < num_outputs ? weight[output * output_step + input * input_step] : 0.0f;
            }
        }
    }
}

// x [num_rows, num_inputs] -> out [num_rows, num_outputs].
EXPORT void roseinfer_linear_float32(const Linear* linear, const float* x, int64_t num_rows, float* out) {
    if (num_rows == 0) return;
    const int64_t num_inputs = linear->num_inputs, num_outputs = linear->num_outputs;
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
    const int64_t at_once = rows_at_once(num_rows, num_inputs, num_panels);
    const int64_t num_units = (num_rows + at_once - 1) / at_once * num_panels;
#pragma omp parallel if (num_rows * num_inputs * num_outputs > kWorthThreads)
    {
        const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        alignas(64) float sums[kMaxRows * kPanel];
        for (int64_t unit = num_units * thread / num_threads; unit < num_units * (thread + 1) / num_threads; ++unit) {
            const int64_t row = unit / num_panels * at_once;
            multiply_panel(*linear, x + row * num_inputs, std::min(at_once, num_rows - row), unit % num_panels, sums,
                           out + row * num_outputs);
        }
    }
}
