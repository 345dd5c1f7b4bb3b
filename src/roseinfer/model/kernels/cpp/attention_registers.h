// Products of a few rows with a tile of keys and values, in registers of float32 lanes.
//
// Every sum is one chain, whatever the number of rows and registers that are computed together.

#pragma once

#include "attention.h"

#include <algorithm>

namespace {

constexpr int BLOCK_VECTORS = REGISTERS == 32 ? 4 : 2;  // registers of each row that are computed together

// How numbers of a type are multiplied: an Operand is broadcast, and a Vector multiplied with it lane by lane.

struct Float32 {
    using Number = float;
    using Operand = float;
    using Vector = Floats;
    static constexpr int STEP = 1;

    static Vector load(const Number* from) { return ::load(from); }
#if defined(__AVX512F__)
    static Vector load_half(const Number* from) { return as_floats(load_half_words(from)); }
    static Vector join(const Number* low, const Number* high) { return as_floats(join_halves(low, high)); }
#endif
    static Floats dot(Floats sum, const Operand* a, Vector b) { return multiply_add(splat(*a), b, sum); }
    static void store_weights(Operand* to, Floats weights) { store(to, weights); }
    static Operand to_operand(Number x) { return x; }
};

struct BFloat16 {
    using Number = bfloat16;
    using Vector = Words;
    static constexpr int STEP = 2;

    static Vector load(const Number* from) { return load_words(from); }
#if defined(__AVX512F__)
    static Vector load_half(const Number* from) { return load_half_words(from); }
    static Vector join(const Number* low, const Number* high) { return join_halves(low, high); }
#endif
#ifdef HAS_BFLOAT16_PRODUCTS
    using Operand = bfloat16;
    static Floats dot(Floats sum, const Operand* a, Vector b) {
        int32_t pair;
        std::memcpy(&pair, a, sizeof pair);
        return add_bfloat16_pairs(sum, splat_word(pair), b);
    }
    static void store_weights(Operand* to, Floats weights) { store_bfloat16(to, weights); }
    static Operand to_operand(Number x) { return x; }
#else
    using Operand = float;  // widened, and so are the weights
    static Floats dot(Floats sum, const Operand* a, Vector b) {
        sum = multiply_add(splat(a[0]), lower_bfloat16(b), sum);
        return multiply_add(splat(a[1]), upper_bfloat16(b), sum);
    }
    static void store_weights(Operand* to, Floats weights) { store(to, weights); }
    static Operand to_operand(Number x) { return to_float(x); }
#endif
};

// The same numbers out of int8, widened on their way into a register. For few rows, since each four of them do it anew.

#if defined(__AVX512F__)

// Two halves, of which one may be missing, as a whole register of bytes.
template <int SIZE>
struct Joined {
    int8_t bytes[SIZE] = {};
    Joined(const int8_t* low, const int8_t* high = nullptr) {
        std::memcpy(bytes, low, SIZE / 2);
        if (high) std::memcpy(bytes + SIZE / 2, high, SIZE / 2);
    }
};

#endif

struct Float32OfBytes : Float32 {
    using Number = int8_t;

    static Vector load(const Number* from) { return load_bytes(from); }
#if defined(__AVX512F__)
    static Vector load_half(const Number* from) { return load(Joined<LANES>(from).bytes); }
    static Vector join(const Number* low, const Number* high) { return load(Joined<LANES>(low, high).bytes); }
#endif
};

struct BFloat16OfBytes : BFloat16 {
    using Number = int8_t;

#ifdef HAS_BFLOAT16_PRODUCTS
    using Vector = Words;
    static Vector load(const Number* from) { return small_bfloat16(load_bytes(from), load_bytes(from + LANES)); }
#else
    struct Vector {  // of each pair
        Floats lower;
        Floats upper;
    };
    static Vector load(const Number* from) {
        typedef int16_t Pairs __attribute__((vector_size(LANES * sizeof(int16_t))));
        Pairs pairs;
        std::memcpy(&pairs, from, sizeof pairs);
        const Integers wide = __builtin_convertvector(pairs, Integers);
        return {__builtin_convertvector(wide << 24 >> 24, Floats), __builtin_convertvector(wide >> 8, Floats)};
    }
    static Floats dot(Floats sum, const Operand* a, const Vector& b) {
        return multiply_add(splat(a[1]), b.upper, multiply_add(splat(a[0]), b.lower, sum));
    }
#endif
#if defined(__AVX512F__)
    static Vector load_half(const Number* from) { return load(Joined<2 * LANES>(from).bytes); }
    static Vector join(const Number* low, const Number* high) { return load(Joined<2 * LANES>(low, high).bytes); }
#endif
};

// Whether a line of memory has to be asked for at this number of a page; steps of wider numbers take a line or more.
template <class Number>
constexpr bool begins_line(const Number*, int64_t at) {
    return sizeof(Number) > 1 || at % 64 == 0;
}

// scores[row][lane] = q[row] . k[lane], of registers first_vector.. of a tile
template <class Type, int NUM_ROWS, int NUM_VECTORS, bool JOINS>
[[gnu::noinline]] void score_block(const Call& call, const Tile<typename Type::Number>& tile,
                                    const Tile<typename Type::Number>* next, int first_vector,
                                    const typename Type::Operand* q, float* scores) {
    using Number = typename Type::Number;
    const int64_t block_size = call.block_size, head_dim = call.head_dim;
    const Number* keys[NUM_VECTORS];
    const Number* next_keys[NUM_VECTORS] = {};
    [[maybe_unused]] const Number* upper_keys[NUM_VECTORS];
    for (int vector = 0; vector < NUM_VECTORS; vector++) {
        const int64_t key = (first_vector + vector) * LANES;
        keys[vector] = tile.keys[key / block_size] + (key % block_size) * Type::STEP;
        if constexpr (JOINS) upper_keys[vector] = tile.keys[key / block_size + 1];
        if (next) next_keys[vector] = next->keys[key / block_size] + (key % block_size) * Type::STEP;
    }
    Floats sums[NUM_ROWS][NUM_VECTORS];
    for (int row = 0; row < NUM_ROWS; row++)
        for (int vector = 0; vector < NUM_VECTORS; vector++) sums[row][vector] = zeros();
    const int64_t stride = block_size * Type::STEP;
    for (int64_t dim = 0, at = 0; dim < head_dim; dim += Type::STEP, at += stride) {
        typename Type::Vector b[NUM_VECTORS];
        if (next && begins_line(next_keys[0], at))
            for (int vector = 0; vector < NUM_VECTORS; vector++) prefetch_to_level2(next_keys[vector] + at);
        for (int vector = 0; vector < NUM_VECTORS; vector++) {
            if constexpr (JOINS)
                b[vector] = Type::join(keys[vector] + at, upper_keys[vector] + at);
            else
                b[vector] = Type::load(keys[vector] + at);
        }
        for (int row = 0; row < NUM_ROWS; row++)
            for (int vector = 0; vector < NUM_VECTORS; vector++)
                sums[row][vector] = Type::dot(sums[row][vector], q + row * head_dim + dim, b[vector]);
    }
    for (int row = 0; row < NUM_ROWS; row++)
        for (int vector = 0; vector < NUM_VECTORS; vector++)
            store(scores + row * KEY_TILE + (first_vector + vector) * LANES, sums[row][vector]);
}

// sums[row][dims] = corrections[row] * sums[row][dims] + weights[row] . values[dims], of registers from `first_dim` on
template <class Type, int NUM_ROWS, int NUM_VECTORS, bool IS_HALF>
[[gnu::noinline]] void mix_block(const Call& call, const Tile<typename Type::Number>& tile,
                                  const Tile<typename Type::Number>* next, int num_keys, int64_t first_dim,
                                  const typename Type::Operand* weights, const float* corrections, float* sums) {
    using Number = typename Type::Number;
    const int64_t stride = call.head_dim * Type::STEP, row_size = padded_head_dim(call);
    const int block_size = int(call.block_size);
    sums += first_dim;
    Floats mixed[NUM_ROWS][NUM_VECTORS];
    for (int row = 0; row < NUM_ROWS; row++)
        for (int vector = 0; vector < NUM_VECTORS; vector++)
            mixed[row][vector] = multiply(load(sums + row * row_size + vector * LANES), splat(corrections[row]));
    for (int first = 0, block = 0; first < num_keys; first += block_size, block++) {
        const Number* values = tile.values[block] + first_dim * Type::STEP;
        const int last = std::min(first + block_size, num_keys);
        const Number* next_values = next ? next->values[block] + first_dim * Type::STEP : nullptr;
        for (int key = first; key < last; key += Type::STEP) {
            typename Type::Vector b[NUM_VECTORS];
            for (int vector = 0; vector < NUM_VECTORS; vector++) {
                const Number* from = values + vector * LANES * Type::STEP;
                if (next_values && begins_line(next_values, vector * LANES * Type::STEP))
                    prefetch_to_level2(next_values + vector * LANES * Type::STEP);
                if constexpr (IS_HALF)
                    b[vector] = Type::load_half(from);
                else
                    b[vector] = Type::load(from);
            }
            for (int row = 0; row < NUM_ROWS; row++)
                for (int vector = 0; vector < NUM_VECTORS; vector++)
                    mixed[row][vector] = Type::dot(mixed[row][vector], weights + row * KEY_TILE + key, b[vector]);
            values += stride;
            if (next_values) next_values += stride;
        }
    }
    for (int row = 0; row < NUM_ROWS; row++)
        for (int vector = 0; vector < NUM_VECTORS; vector++)
            store(sums + row * row_size + vector * LANES, mixed[row][vector]);
}

template <class Type, int NUM_ROWS, int NUM_VECTORS>
void score_vectors(const Call& call, const Tile<typename Type::Number>& tile, const Tile<typename Type::Number>* next,
                   int first_vector, const typename Type::Operand* q, float* scores) {
    if (call.block_size >= LANES) {
        score_block<Type, NUM_ROWS, NUM_VECTORS, false>(call, tile, next, first_vector, q, scores);
    } else if constexpr (LANES == 16) {
        score_block<Type, NUM_ROWS, NUM_VECTORS, true>(call, tile, next, first_vector, q, scores);
    }
}

template <class Type, int NUM_ROWS>
void score_tile(const Call& call, const Tile<typename Type::Number>& tile, const Tile<typename Type::Number>* next,
                int num_vectors, const typename Type::Operand* q, float* scores) {
    int vector = 0;
    for (; vector + BLOCK_VECTORS <= num_vectors; vector += BLOCK_VECTORS)
        score_vectors<Type, NUM_ROWS, BLOCK_VECTORS>(call, tile, next, vector, q, scores);
    if (num_vectors - vector == 3) score_vectors<Type, NUM_ROWS, 3>(call, tile, next, vector, q, scores);
    if (num_vectors - vector == 2) score_vectors<Type, NUM_ROWS, 2>(call, tile, next, vector, q, scores);
    if (num_vectors - vector == 1) score_vectors<Type, NUM_ROWS, 1>(call, tile, next, vector, q, scores);
}

template <class Type, int NUM_ROWS>
void mix_tile(const Call& call, const Tile<typename Type::Number>& tile, const Tile<typename Type::Number>* next,
              int num_keys, const typename Type::Operand* weights, const float* corrections, float* sums) {
    int64_t dim = 0;
    for (; dim + BLOCK_VECTORS * LANES <= call.head_dim; dim += BLOCK_VECTORS * LANES)
        mix_block<Type, NUM_ROWS, BLOCK_VECTORS, false>(call, tile, next, num_keys, dim, weights, corrections, sums);
    for (; dim + LANES <= call.head_dim; dim += LANES)
        mix_block<Type, NUM_ROWS, 1, false>(call, tile, next, num_keys, dim, weights, corrections, sums);
    if constexpr (LANES == 16)
        if (dim < call.head_dim)
            mix_block<Type, NUM_ROWS, 1, true>(call, tile, next, num_keys, dim, weights, corrections, sums);
}

template <class Type>
struct Registers : Type {
    static constexpr int MAX_ROWS = 4;  // that share the registers

    using Number = typename Type::Number;
    using Operand = typename Type::Operand;

    struct NoScope {
        explicit NoScope(int) {}
    };
    using ScoreScope = NoScope;
    using SumScope = NoScope;

    // scores [num_rows, KEY_TILE], registers 0..num_vectors-1
    static void score(const Call& call, const Tile<Number>& tile, const Tile<Number>* next, int num_rows,
                      int num_vectors, const Operand* q, float* scores) {
        if (num_rows == 1) score_tile<Type, 1>(call, tile, next, num_vectors, q, scores);
        if (num_rows == 2) score_tile<Type, 2>(call, tile, next, num_vectors, q, scores);
        if (num_rows == 3) score_tile<Type, 3>(call, tile, next, num_vectors, q, scores);
        if (num_rows == 4) score_tile<Type, 4>(call, tile, next, num_vectors, q, scores);
    }

    // sums [num_rows, padded head_dim] corrected, and the weighted values added
    template <class Beside>
    static void mix(const Call& call, const Tile<Number>& tile, const Tile<Number>* next, int num_rows, int num_keys,
                    const Operand* weights, const float* corrections, float* sums, Beside&) {
        if (num_rows == 1) mix_tile<Type, 1>(call, tile, next, num_keys, weights, corrections, sums);
        if (num_rows == 2) mix_tile<Type, 2>(call, tile, next, num_keys, weights, corrections, sums);
        if (num_rows == 3) mix_tile<Type, 3>(call, tile, next, num_keys, weights, corrections, sums);
        if (num_rows == 4) mix_tile<Type, 4>(call, tile, next, num_keys, weights, corrections, sums);
    }
};

}  // namespace
