// What products read of a tile of keys and values: its pages in the cache, or numbers widened from a cache in int8.

#pragma once

#include "attention_registers.h"
#include "attention_tiles.h"

#include <type_traits>

namespace {

// Products with the tiles of an item's heads at one place, as they lie in a cache of the products' own type.
template <class Products>
struct PlainReader {
    using Operand = typename Products::Operand;
    using Pages = Tile<typename Products::Number>;

    const Pages* heads;
    typename Products::Number* wide;  // not used
    bool are_few;                     // not used
    int num_keys = 0;                 // of the tile that some row sees, in whole registers

    void score(const Call& call, int head, const Pages* next, int num_rows, int num_vectors, const Operand* q,
               float* scores) const {
        Products::score(call, heads[head], next, num_rows, num_vectors, q, scores);
    }
    template <class Beside>
    void mix(const Call& call, int head, const Pages* next, int num_rows, int last, const Operand* weights,
             const float* corrections, float* sums, Beside& beside) const {
        Products::mix(call, heads[head], next, num_rows, last, weights, corrections, sums, beside);
    }
    const float* key_scales(const Call&, int) const { return nullptr; }
    const float* value_scales(const Call&, int) const { return nullptr; }
};

// In place of products that read int8.
struct OnlyWidened {
    using Number = int8_t;
    static constexpr int MAX_ROWS = 0;
};

inline void widen(const int8_t* __restrict from, float* __restrict to) {
    for (int i = 0; i < KEY_TILE; i++) to[i] = float(from[i]);
}

// Loses nothing: bfloat16 has all whole numbers up to 256.
inline void widen(const int8_t* __restrict from, bfloat16* __restrict to) {
    for (int i = 0; i < KEY_TILE; i++) {
        const float number = from[i];
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        to[i] = bfloat16(bits >> 16);
    }
}

// A cache in int8. Where one block has all rows of a head, Few widens in registers; else the keys of a head, and then its
// values, are widened once for all rows. Both multiply the same numbers in the same order.
template <class Products, class Few>
struct BytesReader {
    using Number = typename Products::Number;
    using Operand = typename Products::Operand;
    using Pages = Tile<int8_t>;

    const Pages* heads;
    Number* wide;  // [KEY_TILE, head_dim], in pages
    bool are_few;
    int num_keys = 0;
    const int8_t* const* pages = nullptr;  // whose numbers `wide` has
    const int8_t* const* scaled_pages = nullptr;
    Tile<Number> tile;
    alignas(64) float scales[KEY_TILE];

    void score(const Call& call, int head, const Pages* next, int num_rows, int num_vectors, const Operand* q,
               float* scores) {
        if constexpr (Few::MAX_ROWS > 0)
            if (are_few) return Few::score(call, heads[head], next, num_rows, num_vectors, q, scores);
        widen_pages(call, heads[head].keys, next ? next->keys : nullptr, tile.keys);
        Products::score(call, tile, nullptr, num_rows, num_vectors, q, scores);
    }
    template <class Beside>
    void mix(const Call& call, int head, const Pages* next, int num_rows, int last, const Operand* weights,
             const float* corrections, float* sums, Beside& beside) {
        if constexpr (Few::MAX_ROWS > 0)
            if (are_few) return Few::mix(call, heads[head], next, num_rows, last, weights, corrections, sums, beside);
        widen_pages(call, heads[head].values, next ? next->values : nullptr, tile.values);
        Products::mix(call, tile, nullptr, num_rows, last, weights, corrections, sums, beside);
    }
    const float* key_scales(const Call& call, int head) {
        return find_scales(call, heads[head].keys, call.keys, call.key_scales);
    }
    const float* value_scales(const Call& call, int head) {
        return find_scales(call, heads[head].values, call.values, call.value_scales);
    }

private:
    void widen_pages(const Call& call, const int8_t* const* from, const int8_t* const* next, const Number** places) {
        if (from == pages) return;
        pages = from;
        const int64_t page_size = call.block_size * call.head_dim;  // whole pieces of 64
        for (int64_t block = 0; block * call.block_size < num_keys; block++) {
            Number* to = wide + block * page_size;
            places[block] = to;
            for (int64_t i = 0; i < page_size; i += KEY_TILE) {
                if (next) prefetch_to_level2(next[block] + i);
                widen(from[block] + i, to + i);
            }
        }
    }

    const float* find_scales(const Call& call, const int8_t* const* from, const void* cache, const float* all) {
        if (from == scaled_pages) return scales;
        scaled_pages = from;
        for (int64_t block = 0; block * call.block_size < num_keys; block++) {
            const int64_t first = (from[block] - static_cast<const int8_t*>(cache)) / call.head_dim;
            std::memcpy(scales + block * call.block_size, all + first, call.block_size * sizeof *scales);
        }
        return scales;
    }
};

template <class Products, class Few>
using Reader =
    std::conditional_t<std::is_same_v<Products, Few>, PlainReader<Products>, BytesReader<Products, Few>>;

}  // namespace
