// Shared by the files of the attention kernel: the arguments of a step, and the places of a tile of keys in the cache.
// The cache's layout is described in attention.cpp.

#pragma once

#include "common.h"
#include "simd.h"

namespace {

constexpr int KEY_TILE = 64;
constexpr int TILE_VECTORS = KEY_TILE / LANES;
constexpr int MAX_TILE_BLOCKS = KEY_TILE / 8;

// What all layers of a step share: _Step of attention/native.py.
struct Step {
    const int32_t* slots;         // [tokens] row of the block table
    const int32_t* positions;     // [tokens]
    const int32_t* query_starts;  // [rows + 1] first token of each row
    const int32_t* block_table;   // [slots, block_table_stride]
    const int32_t* items;         // [num_items, 5], see Item
    int64_t block_table_stride;
    int64_t num_items;
    int64_t num_tokens;
    int64_t appends_first;  // a row has several items: all keys must be there before any of them starts
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    float scale;
    float softcap;  // 0: none
};

// What is a layer's own: _Layer of attention/native.py.
struct Layer {
    int64_t window;      // 0: none
    const float* sinks;  // [heads] or null
    const void* q;  // [tokens, heads, head_dim], the strides in numbers
    const void* k;  // [tokens, kv_heads, head_dim]
    const void* v;
    void* keys;
    void* values;
    float* key_scales;    // of a cache in int8 [blocks, kv_heads, block_size]; null else
    float* value_scales;
    void* out;  // [tokens, heads * head_dim]
    int64_t q_strides[2];
    int64_t k_strides[2];
    int64_t v_strides[2];
};

struct Call : Step, Layer {};

// Where the pages of one tile of keys lie for one head, in the type of the cache or widened. Past the sequence's last
// block its last block is repeated.
//
// Keys and values are read from memory once, and while one tile is computed the next one is prefetched: its lines come in
// between the products, since the processor has room for a few outstanding requests only.
template <class Number>
struct Tile {
    const Number* keys[MAX_TILE_BLOCKS];
    const Number* values[MAX_TILE_BLOCKS];
};

// Sums are kept in whole registers.
inline int64_t padded_head_dim(const Call& call) { return (call.head_dim + LANES - 1) / LANES * LANES; }

}  // namespace
