// Products of up to 16 rows with a tile of keys and values, in the tiles of AMX.
//
// One instruction adds the products of 16 rows, 32 numbers deep, with 16 columns, in an order that the other rows have
// no part in; so a row has the same bits in a tile of its own and among fifteen others. Two columns' worth of numbers
// lie side by side, which is the layout of the cache.

#pragma once

#include "attention_registers.h"

#if defined(__AMX_BF16__)

#include "tiles.h"

namespace {

constexpr int TILE_DEPTH = 32;     // numbers of a key that one instruction multiplies
constexpr int TILE_KEYS = 16;      // keys of which one instruction adds the values; they lie in one block

// Tiles read memory that was written by instructions which the compiler may move, since it does not know of the reads.
inline void settle_memory() { asm volatile("" ::: "memory"); }

struct Tiles : BFloat16 {
    static constexpr int MAX_ROWS = int(kTileRows);

    // The registers for scores, and those for sums, of a head with so many rows.
    struct ScoreScope : TileScope {
        explicit ScoreScope(int num_rows) : TileScope(std::min(num_rows, MAX_ROWS), TILE_DEPTH * sizeof(Number)) {}
    };
    struct SumScope : TileScope {
        explicit SumScope(int num_rows) : TileScope(std::min(num_rows, MAX_ROWS), TILE_KEYS * sizeof(Number)) {}
    };

    // Whether a process with this cache computes with tiles: always, or never.
    static bool can_compute(const Call& call) {
        return call.head_dim % TILE_DEPTH == 0 && call.block_size % TILE_KEYS == 0;
    }

    static void score(const Call& call, const Tile<Number>& tile, const Tile<Number>* next, int, int num_vectors,
                      const Operand* q, float* scores) {
        settle_memory();
        for (int vector = 0; vector < num_vectors; vector += 2)
            score_keys(call, tile, next, vector, std::min(2, num_vectors - vector), q, scores);
        settle_memory();
    }

    // `beside` takes a step after each few products: vectors and tiles are multiplied at the same time.
    template <class Beside>
    static void mix(const Call& call, const Tile<Number>& tile, const Tile<Number>* next, int num_rows, int num_keys,
                    const Operand* weights, const float* corrections, float* sums, Beside& beside) {
        const int64_t row_size = call.head_dim;
        const int num_steps = int(row_size / (2 * LANES)) * ((num_keys + TILE_KEYS - 1) / TILE_KEYS);
        const int rows_of_step = (MAX_ROWS + num_steps - 1) / num_steps;
        for (int row = 0; row < num_rows; row++) {
            if (corrections[row] == 1.0f) continue;
            for (int64_t dim = 0; dim < row_size; dim += LANES) {
                float* sum = sums + row * row_size + dim;
                store(sum, multiply(::load(sum), splat(corrections[row])));
            }
        }
        settle_memory();
        for (int64_t dim = 0; dim < row_size; dim += 2 * LANES)
            mix_dims(call, tile, next, num_keys, dim, weights, sums, beside, rows_of_step);
        settle_memory();
    }

private:
    // Scores with the keys of one or two registers, from `vector` on.
    static void score_keys(const Call& call, const Tile<Number>& tile, const Tile<Number>* next, int vector,
                           int num_vectors, const Operand* q, float* scores) {
        const int64_t block_size = call.block_size, row_bytes = block_size * STEP * sizeof(Number);
        const Number *keys[2] = {}, *next_keys[2] = {};
        for (int i = 0; i < num_vectors; i++) {
            const int key = (vector + i) * LANES, block = key / int(block_size), offset = key % int(block_size) * STEP;
            keys[i] = tile.keys[block] + offset;
            if (next) next_keys[i] = next->keys[block] + offset;
        }
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t dim = 0; dim < call.head_dim; dim += TILE_DEPTH) {
            const int64_t at = dim * block_size;
            _tile_loadd(4, q + dim, call.head_dim * sizeof(Operand));
            _tile_loadd(6, keys[0] + at, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            prefetch_rows(next_keys[0], at, row_bytes, TILE_DEPTH / STEP);
            if (num_vectors == 1) continue;
            _tile_loadd(7, keys[1] + at, row_bytes);
            _tile_dpbf16ps(1, 4, 7);
            prefetch_rows(next_keys[1], at, row_bytes, TILE_DEPTH / STEP);
        }
        scores += vector * LANES;
        _tile_stored(0, scores, KEY_TILE * sizeof(float));
        if (num_vectors > 1) _tile_stored(1, scores + LANES, KEY_TILE * sizeof(float));
    }

    // Dimensions dim..dim+31 of the sums.
    template <class Beside>
    static void mix_dims(const Call& call, const Tile<Number>& tile, const Tile<Number>* next, int num_keys,
                         int64_t dim, const Operand* weights, float* sums, Beside& beside, int rows_of_step) {
        constexpr int VECTOR = LANES * STEP;
        const int64_t sum_bytes = call.head_dim * sizeof(float), row_bytes = call.head_dim * STEP * sizeof(Number);
        sums += dim;
        _tile_loadd(0, sums, sum_bytes);
        _tile_loadd(1, sums + LANES, sum_bytes);
        for (int key = 0; key < num_keys; key += TILE_KEYS) {
            const int64_t block = key / call.block_size;
            const int64_t at = (key % call.block_size) * call.head_dim + dim * STEP;
            const Number* values = tile.values[block] + at;
            _tile_loadd(4, weights + key, KEY_TILE * sizeof(Operand));
            _tile_loadd(6, values, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values + VECTOR, row_bytes);
            _tile_dpbf16ps(1, 4, 7);
            beside.step(rows_of_step);
            if (!next) continue;
            for (int vector = 0; vector < 2; vector++)
                prefetch_rows(next->values[block], at + vector * VECTOR, row_bytes, TILE_KEYS / STEP);
        }
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + LANES, sum_bytes);
    }

    static void prefetch_rows(const Number* page, int64_t at, int64_t row_bytes, int num_rows) {
        if (!page) return;
        const char* line = reinterpret_cast<const char*>(page + at);
        for (int row = 0; row < num_rows; row++) prefetch_to_level2(line + row * row_bytes);
    }
};

}  // namespace

#endif
