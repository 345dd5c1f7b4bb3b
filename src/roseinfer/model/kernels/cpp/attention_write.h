// Keys and values of new tokens into their places in the cache.

#pragma once

#include "attention.h"
#include "quantize.h"

#include <alloca.h>

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

// The place of a token's key and value: numbers from the beginning of the cache's tensors.
struct Place {
    int64_t key;
    int64_t value;
    int64_t scale;
};

template <class Type>
Place place_of(const Call& call, int64_t token, int64_t head) {
    constexpr int STEP = Type::STEP;
    const int64_t position = call.positions[token], offset = position % call.block_size;
    const int64_t block = call.block_table[call.slots[token] * call.block_table_stride + position / call.block_size];
    const int64_t scale = (block * call.num_kv_heads + head) * call.block_size, page = scale * call.head_dim;
    return {page + offset * STEP, page + offset / STEP * call.head_dim * STEP + offset % STEP, scale + offset};
}

// Prefetches the lines that `append` will write a single token to, one for each STEP dimensions of its key.
template <class Type, class Stored>
void prefetch_place(const Call& call, int64_t token, int64_t head) {
    const Place place = place_of<Type>(call, token, head);
    const Stored* key = static_cast<const Stored*>(call.keys) + place.key;
    const Stored* value = static_cast<const Stored*>(call.values) + place.value;
    for (int64_t dim = 0; dim < call.head_dim; dim += Type::STEP)
        __builtin_prefetch(key + dim * call.block_size, 1, 3);
    for (int64_t dim = 0; dim < call.head_dim; dim += LANES) __builtin_prefetch(value + dim * Type::STEP, 1, 3);
}

// One token's key and value into int8, with a scale each: so a later token changes neither.
template <class Type>
[[gnu::noinline]] void append_quantized(const Call& call, int64_t token, int64_t head) {
    using Number = typename Type::Number;
    constexpr int STEP = Type::STEP;
    const int64_t head_dim = call.head_dim;
    const Place place = place_of<Type>(call, token, head);
    const Number* k = static_cast<const Number*>(call.k) + token * call.k_strides[0] + head * call.k_strides[1];
    const Number* v = static_cast<const Number*>(call.v) + token * call.v_strides[0] + head * call.v_strides[1];
    int8_t* numbers = static_cast<int8_t*>(alloca(head_dim));
    Number* values = static_cast<Number*>(alloca(head_dim * sizeof *values));
    for (int64_t dim = 0; dim < head_dim; dim++) values[dim] = finite(v[dim]);
    const auto keep = [&](int64_t piece, const int8_t* some, int64_t count) {
        std::memcpy(numbers + piece * kQuantizedPiece, some, count);
    };
    call.key_scales[place.scale] = quantize_row(k, head_dim, keep);
    int8_t* key = static_cast<int8_t*>(call.keys) + place.key;
    for (int64_t dim = 0; dim < head_dim; dim += STEP) std::memcpy(key + dim * call.block_size, numbers + dim, STEP);
    call.value_scales[place.scale] = quantize_row(values, head_dim, keep);
    int8_t* value = static_cast<int8_t*>(call.values) + place.value;
    for (int64_t dim = 0; dim < head_dim; dim++) value[dim * STEP] = numbers[dim];
}

// Writes a value to its place: numbers side by side, or each beside that of the other token of a pair.
void write_value(const float* from, int64_t head_dim, float* values, int64_t place) {
    for (int64_t dim = 0; dim < head_dim; dim++) values[place + dim] = finite(from[dim]);
}

void write_value(const bfloat16* __restrict from, int64_t head_dim, bfloat16* values, int64_t place) {
    char* __restrict to = reinterpret_cast<char*>(values + place / 2 * 2);
    const int shift = place % 2 * 16;
    for (int64_t dim = 0; dim < head_dim; dim++, to += sizeof(uint32_t)) {
        uint32_t pair;  // both at once, so that some dimensions are written at a time
        std::memcpy(&pair, to, sizeof pair);
        pair = (pair & 0xffff0000u >> shift) | uint32_t(finite(from[dim])) << shift;
        std::memcpy(to, &pair, sizeof pair);
    }
}

// Writes the keys and values of `length` tokens, which go to one block.
template <class Type, class Stored>
void append(const Call& call, int64_t token, int64_t length, int64_t head) {
    using Number = typename Type::Number;
    if constexpr (!std::is_same_v<Stored, Number>) {
        for (int64_t next = 0; next < length; next++) append_quantized<Type>(call, token + next, head);
        return;
    }
    constexpr int STEP = Type::STEP;
    const int64_t head_dim = call.head_dim;
    const Place place = place_of<Type>(call, token, head);
    const Number* k = static_cast<const Number*>(call.k) + token * call.k_strides[0] + head * call.k_strides[1];
    const Number* v = static_cast<const Number*>(call.v) + token * call.v_strides[0] + head * call.v_strides[1];
    Number* keys = static_cast<Number*>(call.keys) + place.key;
    for (int64_t dim = 0; dim < head_dim; dim += STEP)
        for (int64_t next = 0; next < length; next++)
            std::memcpy(keys + dim * call.block_size + next * STEP, k + next * call.k_strides[0] + dim,
                        STEP * sizeof(Number));
    for (int64_t next = 0; next < length; next++) {
        const Place to = place_of<Type>(call, token + next, head);
        write_value(v + next * call.v_strides[0], head_dim, static_cast<Number*>(call.values), to.value);
    }
}

}  // namespace
