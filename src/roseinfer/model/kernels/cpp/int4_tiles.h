// Products of int4 on AMX tiles, for many rows: panels.h tells of the weight, and linear.cpp of the order of its sums.
//
// A tile product takes as long for the 32 inputs of a group as for 64, and the sums of a group leave their tile, since they
// are floats from there on. Even so a tile takes half of the time that registers need for its products.

#pragma once

#include "dot.h"
#include "panels.h"
#include "tiles.h"

namespace {

constexpr int64_t kGroupBytes = kTileRows * kGroup;  // of 16 rows or of 16 outputs
constexpr int64_t kSumTiles = 4;                     // each has another group's sums
constexpr int64_t kLag = 6;                          // groups between products and the sums' way out

// Some groups of 16 outputs of a panel, as tiles, and their scales: with those of 16 rows they fit in the nearest cache.
struct UnpackedGroups {
    static constexpr int64_t kMost = 32;

    // Words, scales and zeros, or null, of the outputs, from the first of the groups on.
    void unpack(const float* words, const uint16_t* halves, const uint8_t* zeros, int64_t num_groups) {
        count = num_groups;
        for (int64_t group = 0; group < count; ++group, halves += kPanel) {
            const Integers zero = zeros ? load_zeros(zeros + group * kPanel) : Integers{} + kMiddle;
            uint8_t* to = tiles + group * kGroupBytes;
            for (int64_t word = 0; word < kGroupWords; ++word, words += kPanel, to += 2 * kLineBytes) {
                const Integers both = (Integers)load(words);
                write(to, low_nibbles(both), zero);
                write(to + kLineBytes, high_nibbles(both), zero);
            }
            store(scales + group * kTileRows, load_halves(halves));
        }
    }

    int64_t count;
    alignas(64) uint8_t tiles[kMost * kGroupBytes];
    alignas(64) float scales[kMost * kTileRows];

private:
    static void write(uint8_t* to, Integers numbers, Integers zero) {
        _mm512_store_si512(to, _mm512_sub_epi8((__m512i)numbers, (__m512i)(zero * 0x01010101)));
    }
};

#define ROSEINFER_GROUP(sum, left, right)       \
    do {                                        \
        _tile_zero(sum);                        \
        _tile_loadd(right, column, kLineBytes); \
        _tile_loadd(left, rows, kGroup);        \
        _tile_dpbssd(sum, left, right);         \
    } while (0)

template <int sum>
inline void multiply_group_tiles(const uint8_t* rows, const uint8_t* column) {
    if constexpr (sum == 0) ROSEINFER_GROUP(0, 4, 6);
    if constexpr (sum == 1) ROSEINFER_GROUP(1, 5, 7);
    if constexpr (sum == 2) ROSEINFER_GROUP(2, 4, 6);
    if constexpr (sum == 3) ROSEINFER_GROUP(3, 5, 7);
}

#undef ROSEINFER_GROUP

template <int sum>
inline void store_group_sums(uint8_t* to) {
    if constexpr (sum == 0) _tile_stored(0, to, kLineBytes);
    if constexpr (sum == 1) _tile_stored(1, to, kLineBytes);
    if constexpr (sum == 2) _tile_stored(2, to, kLineBytes);
    if constexpr (sum == 3) _tile_stored(3, to, kLineBytes);
}

// sums [row tile][16 rows][16 outputs] = (is_first ? 0 : sums) + row tiles, `row_step` bytes apart, each of
// [group][row][32 inputs], times the groups; finish(row tile) after its last group. `ahead` are words to prefetch, of as many
// groups. Steps go on from one row tile to the next without a pause: a store of the products of kSumTiles groups ago,
// products in their place, and sums of what was stored before.
template <typename Finish>
__attribute__((noinline)) void multiply_groups_in_tiles(const uint8_t* rows, int64_t row_step, int64_t num_row_tiles,
                                                        const UnpackedGroups& groups, const float* ahead, bool is_first,
                                                        float* sums, const Finish& finish) {
    alignas(64) uint8_t integers[kSumTiles * kTileBytes];
    Floats totals[kTileRows] = {};
    const int64_t num_steps = num_row_tiles * groups.count;
    int64_t group = 0, summed = 0, row_tile = 0;
    for (int64_t first = 0; first < num_steps + kLag; first += kSumTiles) {
        each<kSumTiles>([&](auto sum) __attribute__((always_inline)) {
            const int64_t step = first + sum;
            if (step >= kSumTiles && step < num_steps + kSumTiles) store_group_sums<sum>(integers + sum * kTileBytes);
            if (step < num_steps) {
                multiply_group_tiles<sum>(rows + group * kGroupBytes, groups.tiles + group * kGroupBytes);
                if (step < groups.count) {
                    for (int64_t word = 0; word < kGroupWords; ++word, ahead += kPanel) prefetch_to_level2(ahead);
                }
                if (++group == groups.count) group = 0, rows += row_step;
            }
            if (step < kLag || step >= num_steps + kLag) return;
            if (summed == 0 && !is_first) {
                each<kTileRows>([&](auto row) __attribute__((always_inline)) { totals[row] = load(sums + row * kTileRows); });
            }
            const uint8_t* stored = integers + (sum + 2 * kSumTiles - kLag) % kSumTiles * kTileBytes;
            const Floats scale = load(groups.scales + summed * kTileRows);
            each<kTileRows>([&](auto row) __attribute__((always_inline)) {
                const Floats of_group = load(reinterpret_cast<const int32_t*>(stored + row * kLineBytes));
                totals[row] = multiply_add(of_group, scale, totals[row]);
            });
            if (++summed < groups.count) return;
            summed = 0;
            each<kTileRows>([&](auto row) __attribute__((always_inline)) {
                store(sums + row * kTileRows, totals[row]);
                totals[row] = Floats{};
            });
            sums += kTileRows * kTileRows;
            finish(row_tile++);
        });
    }
}

}  // namespace
