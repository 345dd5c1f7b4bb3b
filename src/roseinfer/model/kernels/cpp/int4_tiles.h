// Linear layers of int4 in AMX tiles, for many rows: panels.h tells of the weight, and linear.cpp of the order of its sums.
//
// A tile product takes as long for the 32 inputs of a group as for 64, and the sums of a group leave their tile, since they
// are floats from there on. Even so a tile takes half of the time that registers need for its products.

#pragma once

#include <algorithm>
#include <cstring>

#include "activation.h"
#include "buffer.h"
#include "dot.h"
#include "panels.h"
#include "team.h"
#include "tiles.h"

namespace {

constexpr int64_t kGroupBytes = kTileRows * kGroup;  // of 16 rows or of 16 outputs
constexpr int64_t kSumTiles = 4;                     // each has another group's sums
constexpr int64_t kLag = 6;                          // groups between products and the sums' way out
constexpr int64_t kWorthTiles = 16;                  // rows; fewer are faster in registers
constexpr int64_t kTiledBytes = 1 << 20;             // of rows that stay in the second cache while columns go by
constexpr int64_t kTiledRows = 1024;                 // at most

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

// 16 outputs of some rows: sums into outputs, as linear.cpp's finish_rows has it. Many outputs pass the caches by in whole lines, in
// bfloat16 those of two columns: a store that waits for its line would hold up the sums that tiles store after it.
template <typename Out>
class Column {
public:
    Column(const Linear& linear, int64_t column, bool is_streamed)
        : linear_(linear), output_(column * kTileRows), is_streamed_(is_streamed) {
        count_ = std::min(kTileRows, linear.num_outputs - output_);
        bias_ = linear.bias ? load_first(linear.bias + output_, count_) : zeros();
    }

    // `kept` is what the column before has kept, or null; what this one keeps goes to `keeps`, if that is not null.
    void finish(const float* sums, const float* scales, int64_t num_rows, const Out* kept, Out* keeps, Out* out) const {
        with_activation(linear_.activation, [&](auto activation) {
            for (int64_t row = 0; row < num_rows; ++row) {
                const Floats x = load(sums + row * kTileRows) * splat(scales[row]);
                const Floats y = activate<activation.value>(add(x, bias_));
                Out* to = out + row * linear_.num_outputs + output_;
                if (keeps) store(keeps + row * kTileRows, y);
                else if (kept) stream_both(to - kTileRows, kept + row * kTileRows, y);
                else if (is_streamed_ && sizeof(Out) == sizeof(float)) _mm512_stream_ps(reinterpret_cast<float*>(to), y);
                else store_first(to, y, count_);
            }
        });
    }

    // Has the lines brought near that some rows of this column will be written to.
    void ask_for(const Out* out, int64_t num_rows) const {
        if (is_streamed_) return;
        for (int64_t row = 0; row < num_rows; ++row) prefetch_to_level2(out + row * linear_.num_outputs + output_);
    }

private:
    static void stream_both(Out* to, const Out* low, Floats high) {
        alignas(64) Out both[2 * kTileRows];
        std::memcpy(both, low, kTileRows * sizeof(Out));
        store(both + kTileRows, high);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), load_words(both));
    }

    const Linear& linear_;
    int64_t output_, count_;
    bool is_streamed_;
    Floats bias_;
};

thread_local Buffer column_sums;  // of each thread

// Rows of int8, for each 16 of them [group][row][32 inputs].
template <typename Out>
void multiply_in_tiles(const Linear& linear, const uint8_t* rows, const float* scales, int64_t num_rows, Out* out) {
    const int64_t num_groups = linear.num_words / kGroupWords, tile_bytes = num_groups * kGroupBytes;
    const int64_t num_columns = (linear.num_outputs + kTileRows - 1) / kTileRows;
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    const int64_t wanted = (2 * omp_get_max_threads() + num_columns - 1) / num_columns;
    const int64_t at_once = std::min(kTiledRows / kTileRows, std::max<int64_t>(1, kTiledBytes / tile_bytes));
    const int64_t parts = std::min(num_tiles, std::max(wanted, (num_tiles + at_once - 1) / at_once));
    const int64_t num_pairs = (num_columns + 1) / 2, row_bytes = linear.num_outputs * int64_t(sizeof(Out));
    const bool has_lines = (reinterpret_cast<uintptr_t>(out) | row_bytes) % kLineBytes == 0;
    const bool is_streamed = has_lines && num_rows * row_bytes >= kManyBytes;
    const bool is_worth_threads = num_rows * linear.num_words * linear.num_outputs > kWorthThreads;
    Team::share_out(parts * num_pairs, is_worth_threads, [&](Pieces& pieces) {
        const TileScope scope(kTileRows, kGroup);
        const int64_t most_rows = (num_tiles + parts - 1) / parts * kTileRows;
        float* sums = reinterpret_cast<float*>(column_sums.take(most_rows * kTileRows * (sizeof(float) + sizeof(Out))));
        Out* kept = reinterpret_cast<Out*>(sums + most_rows * kTileRows);
        const auto place = [&](int64_t index, int64_t group) { return index / kVectors * num_groups + group; };
        const auto words = [&](int64_t index, int64_t group) {
            return linear.weight + place(index, group) * kGroupWords * kPanel + index % kVectors * kTileRows;
        };
        UnpackedGroups groups;
        bool has_kept = false;
        for (int64_t pair; pieces.take(&pair);) {
            const int64_t part = pair / num_pairs, left = pair % num_pairs * 2;
            const int64_t first = num_tiles * part / parts, end = num_tiles * (part + 1) / parts;
            for (int64_t index = left; index < std::min(left + 2, num_columns); ++index) {
                const Column<Out> column(linear, index, is_streamed);
                const bool keeps = is_streamed && sizeof(Out) == 2 && index == left && index + 1 < num_columns;
                for (int64_t group = 0; group < num_groups; group += groups.kMost) {
                    const int64_t next = group + groups.kMost, count = std::min(groups.kMost, num_groups - group);
                    const int64_t at = place(index, group) * kPanel + index % kVectors * kTileRows;
                    groups.unpack(words(index, group), static_cast<const uint16_t*>(linear.scales) + at,
                                  linear.zeros ? linear.zeros + at : nullptr, count);
                    const auto finish = [&](int64_t tile) __attribute__((noinline)) {
                        if (next < num_groups) return;
                        const int64_t row = (first + tile) * kTileRows, end_row = std::min(num_rows, row + kTileRows);
                        column.ask_for(out + end_row * linear.num_outputs, std::min(kTileRows, num_rows - end_row));
                        Out* of_tile = kept + tile * kTileRows * kTileRows;
                        column.finish(sums + tile * kTileRows * kTileRows, scales + row, end_row - row,
                                      has_kept ? of_tile : nullptr, keeps ? of_tile : nullptr,
                                      out + row * linear.num_outputs);
                    };
                    const float* ahead = next < num_groups ? words(index, next) : words(index + 1, 0);
                    multiply_groups_in_tiles(rows + first * tile_bytes + group * kGroupBytes, tile_bytes, end - first,
                                             groups, ahead, group == 0, sums, finish);
                }
                has_kept = keeps;
            }
        }
        _mm_sfence();  // what is streamed has no order of its own
    });
}

}  // namespace
