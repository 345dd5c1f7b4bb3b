// Norm and rotation of queries and keys, and gating: one head or one number at a time. The same in torch, and the shapes,
// are in layers/rope.py and layers/activation.py.
//
// A head, or a run of a row's numbers, is cut at places that do not depend on how many rows there are and is one
// thread's work, so a row's bits do not depend on its neighbours.

#include <algorithm>
#include <cmath>

#include "activation.h"
#include "team.h"

namespace {

constexpr int64_t kLanes = 16;  // partial sums of a head, the same at every level
constexpr int64_t kRun = 1024;  // numbers of a row that one thread gates
constexpr int64_t kPiece = 64;  // of them, how many are in registers and the nearest cache together
constexpr int64_t kWorthThreads = 16384;  // numbers; below, waking a thread costs more than it saves

void from_float(float value, float* to) { *to = value; }
void from_float(float value, bfloat16* to) { *to = to_bfloat16(value); }

// 1 / sqrt(mean(x^2) + epsilon). Zhang and Sennrich 2019.
template <typename T>
float norm_scale(const T* x, int64_t size, float epsilon) {
    constexpr int64_t kSums = kLanes / LANES;
    Floats sums[kSums] = {};
    for (int64_t i = 0; i < size; i += kLanes) {
        for (int64_t sum = 0, at = i; sum < kSums && at < size; ++sum, at += LANES) {
            const Floats value = load_first(x + at, size - at);
            sums[sum] = sums[sum] + value * value;
        }
    }
    for (int64_t count = kSums / 2; count; count /= 2) {
        for (int64_t sum = 0; sum < count; ++sum) sums[sum] = sums[sum] + sums[sum + count];
    }
    return 1.0f / std::sqrt(total(sums[0]) / float(size) + epsilon);
}

// Dimensions i and i + head_dim / 2 are a point of a plane, turned by angle i.
template <typename T>
void turn_head(T* head, const float* weight, const float* cos, const float* sin, int64_t head_dim, float epsilon) {
    const int64_t half = head_dim / 2;
    const Floats scale = splat(weight ? norm_scale(head, head_dim, epsilon) : 1.0f);
    const auto normed = [&](int64_t i, int64_t count) {
        const Floats x = load_first(head + i, count);
        return weight ? x * scale * load_first(weight + i, count) : x;
    };
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i;
        const Floats first = normed(i, count), second = normed(half + i, count);
        const Floats c = load_first(cos + i, count), s = load_first(sin + i, count);
        store_first(head + i, first * c - second * s, count);
        store_first(head + half + i, second * c + first * s, count);
    }
}

// Norms and rotation of a layer: _Descriptor of layers/rope.py.
struct Turn {
    const float* query_weight;  // [head_dim] of the norms, or null
    const float* key_weight;
    int64_t num_query_heads;
    int64_t num_key_heads;
    int64_t num_merged_heads;  // of a row, values too
    int64_t head_dim;
    float epsilon;
};

template <typename T>
void turn(const Turn& layer, T* rows, int64_t num_rows, const float* cos, const float* sin, const int64_t* positions) {
    const int64_t num_heads = layer.num_query_heads + layer.num_key_heads, head_dim = layer.head_dim;
    for_each(num_rows * num_heads, num_rows * num_heads * head_dim > kWorthThreads, [&](int64_t unit) {
        const int64_t row = unit / num_heads, head = unit % num_heads;
        const float* weight = head < layer.num_query_heads ? layer.query_weight : layer.key_weight;
        T* at = rows + (row * layer.num_merged_heads + head) * head_dim;
        const int64_t angle = positions[row] * (head_dim / 2);
        turn_head(at, weight, cos + angle, sin + angle, head_dim, layer.epsilon);
    });
}

// silu(gate) * up of up to kPiece numbers: silu(x) = x / (1 + e^-x), with e^-|x|, which cannot overflow.
template <typename T>
void gate_piece(const T* gate, const T* up, T* out, int64_t size) {
    alignas(64) float x[kPiece], powers[kPiece];
    for (int64_t i = 0; i < size; ++i) x[i] = to_float(gate[i]);
    for (int64_t i = size; i < kPiece; ++i) x[i] = 0.0f;
    for (int64_t i = 0; i < kPiece; ++i) powers[i] = -std::fabs(x[i]);
    for (int64_t i = 0; i < kPiece; i += LANES) store(powers + i, exponential(load(powers + i)));
    for (int64_t i = 0; i < size; ++i) {
        const float share = (x[i] < 0.0f ? powers[i] : 1.0f) / (1.0f + powers[i]);
        from_float(x[i] * share * to_float(up[i]), out + i);
    }
}

template <typename T>
void gate(const T* gate_up, T* out, int64_t num_rows, int64_t inner) {
    const int64_t num_runs = (inner + kRun - 1) / kRun;
    for_each(num_rows * num_runs, num_rows * inner > kWorthThreads, [&](int64_t unit) {
        const int64_t row = unit / num_runs, run = unit % num_runs;
        const T* from = gate_up + row * 2 * inner;
        const int64_t end = std::min(inner, (run + 1) * kRun);
        for (int64_t i = run * kRun; i < end; i += kPiece) {
            gate_piece(from + i, from + inner + i, out + row * inner + i, std::min(kPiece, end - i));
        }
    });
}

}  // namespace

// rows [num_rows, num_merged_heads, head_dim], each beginning with query heads and then key heads, in place; cos and sin
// [any, head_dim / 2], of which a row has those at its position.
EXPORT void roseinfer_turn_heads_float32(const Turn* layer, float* rows, int64_t num_rows, const float* cos,
                                         const float* sin, const int64_t* positions) {
    turn(*layer, rows, num_rows, cos, sin, positions);
}

EXPORT void roseinfer_turn_heads_bfloat16(const Turn* layer, bfloat16* rows, int64_t num_rows, const float* cos,
                                          const float* sin, const int64_t* positions) {
    turn(*layer, rows, num_rows, cos, sin, positions);
}

// gate_up [num_rows, 2 * inner], the gates first -> out [num_rows, inner] = silu(gate) * up.
EXPORT void roseinfer_gate_float32(const float* gate_up, float* out, int64_t num_rows, int64_t inner) {
    gate(gate_up, out, num_rows, inner);
}

EXPORT void roseinfer_gate_bfloat16(const bfloat16* gate_up, bfloat16* out, int64_t num_rows, int64_t inner) {
    gate(gate_up, out, num_rows, inner);
}
