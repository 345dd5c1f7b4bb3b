// What products read of a tile of keys and values: its pages in the cache, or numbers widened from a cache in int8.

#pragma once

#include "attention.h"

#include <type_traits>

namespace {

// The tiles of the heads of an item at one place. A cache of the products' own type is read where it lies.
template <class Number, class Stored>
struct Reader {
    const Tile<Stored>* heads;
    Number* wide;      // not used
    int num_keys = 0;  // of the tile that some row sees, in whole registers

    const Tile<Number>& keys(const Call&, int head, const Tile<Stored>*) const { return heads[head]; }
    const Tile<Number>& values(const Call&, int head, const Tile<Stored>*) const { return heads[head]; }
    // The tile that products prefetch beside their work.
    const Tile<Number>* prefetched(const Tile<Stored>* next) const { return next; }
    const float* key_scales(const Call&, int) const { return nullptr; }
    const float* value_scales(const Call&, int) const { return nullptr; }
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

// A cache in int8: the keys of a head, or its values, are widened once for all rows, into the same place.
template <class Number>
struct Reader<Number, int8_t> {
    const Tile<int8_t>* heads;
    Number* wide;  // [KEY_TILE, head_dim], in pages
    int num_keys = 0;
    const int8_t* const* pages = nullptr;  // whose numbers `wide` has
    const int8_t* const* scaled_pages = nullptr;
    Tile<Number> tile;
    alignas(64) float scales[KEY_TILE];

    const Tile<Number>& keys(const Call& call, int head, const Tile<int8_t>* next) {
        widen_pages(call, heads[head].keys, next ? next->keys : nullptr, tile.keys);
        return tile;
    }
    const Tile<Number>& values(const Call& call, int head, const Tile<int8_t>* next) {
        widen_pages(call, heads[head].values, next ? next->values : nullptr, tile.values);
        return tile;
    }
    const Tile<Number>* prefetched(const Tile<int8_t>*) const { return nullptr; }
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

}  // namespace
