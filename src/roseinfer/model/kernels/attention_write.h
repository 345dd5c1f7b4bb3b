// Keys and values of new tokens into their places in the cache.

#pragma once

#include "attention.h"

#include <cfloat>

#include <algorithm>

namespace {

float finite(float x) { return x != x ? 0.0f : std::min(std::max(x, -FLT_MAX), FLT_MAX); }

bfloat16 finite(bfloat16 x) {
    const bfloat16 largest = (x & 0x8000) | 0x7f7f;
    return (x & 0x7f80) != 0x7f80 ? x : (x & 0x7f) ? bfloat16(0) : largest;
}

// Tokens from this one on that go to the same block, or 0 if it is not the first of them.
int64_t run_length(const Call& call, int64_t token, int64_t begin, int64_t end) {
    const auto follows = [&](int64_t next) {
        return call.slots[next] == call.slots[next - 1] && call.positions[next] == call.positions[next - 1] + 1 &&
               call.positions[next] % call.block_size != 0;
    };
    if (token > begin && follows(token)) return 0;
    int64_t length = 1;
    while (token + length < end && follows(token + length)) length++;
    return length;
}

template <class Type>
void append(const Call& call, int64_t token, int64_t length, int64_t head) {
    using Number = typename Type::Number;
    constexpr int STEP = Type::STEP;
    const int64_t position = call.positions[token], block_size = call.block_size, head_dim = call.head_dim;
    const int64_t block = call.block_table[call.slots[token] * call.block_table_stride + position / block_size];
    const int64_t offset = position % block_size, page = (block * call.num_kv_heads + head) * block_size * head_dim;
    const Number* k = static_cast<const Number*>(call.k) + token * call.k_strides[0] + head * call.k_strides[1];
    const Number* v = static_cast<const Number*>(call.v) + token * call.v_strides[0] + head * call.v_strides[1];
    Number* keys = static_cast<Number*>(call.keys) + page + offset * STEP;
    Number* values = static_cast<Number*>(call.values) + page;
    for (int64_t dim = 0; dim < head_dim; dim += STEP)
        for (int64_t next = 0; next < length; next++)
            std::memcpy(keys + dim * block_size + next * STEP, k + next * call.k_strides[0] + dim,
                        STEP * sizeof(Number));
    for (int64_t next = 0; next < length; next++) {
        const Number* value = v + next * call.v_strides[0];
        Number* row = values + (offset + next) / STEP * head_dim * STEP + (offset + next) % STEP;
        for (int64_t dim = 0; dim < head_dim; dim++) row[dim * STEP] = finite(value[dim]);
    }
}

}  // namespace
