// Eight registers of 16 rows of 64 bytes, four of them sums: the block of registers that gemm.cpp is made of.

#pragma once

#include <immintrin.h>

#include <type_traits>

#include "common.h"

namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kLineBytes = 64;  // of a tile row, and of a cache line
constexpr int64_t kTileBytes = kTileRows * kLineBytes;

template <typename T>
using Sum = std::conditional_t<sizeof(T) == 1, int32_t, float>;

// While it lives, this thread's tiles 0 to 5 have `rows` rows and the others 16.
class TileScope {
public:
    explicit TileScope(int64_t rows) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int tile = 0; tile < 8; ++tile) {
            shapes.row_bytes[tile] = kLineBytes;
            shapes.rows[tile] = uint8_t(tile < 6 ? rows : kTileRows);
        }
        asm volatile("" : : "r"(&shapes) : "memory");  // some compilers think that only its first bytes are read
        _tile_loadconfig(&shapes);
    }
    ~TileScope() { _tile_release(); }
};

// Tiles of x and of a weight that meet in one block of registers.
struct Operands {
    const uint8_t* rows;
    int64_t row_step;   // bytes from one tile of k to the next
    int64_t rows_step;  // bytes from 16 rows to the next 16
    const uint8_t* column;
    int64_t column_step;   // bytes from 16 outputs to the next 16
    int64_t num_tiles;     // of k
    const uint8_t* ahead;  // lines that will be needed later
    int64_t num_ahead;     // how many of them to ask for with each tile of k
    bool asks_both;        // so many of the second column too
};

inline void ask_for(const uint8_t* lines, int64_t count) {
    for (int64_t line = 0; line < count; line += 4) {
        for (int64_t i = line; i < line + 4; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(lines + i * kLineBytes), _MM_HINT_T1);
        }
    }
}

// Registers 0 to kSums - 1 out of memory and back, `step` bytes apart.
template <int kSums>
void begin_sums(bool is_first, const uint8_t* sums, int64_t step) {
    if (is_first) {
        _tile_zero(0);
        if constexpr (kSums > 1) _tile_zero(1);
        if constexpr (kSums > 2) _tile_zero(2);
        if constexpr (kSums > 3) _tile_zero(3);
    } else {
        _tile_loadd(0, sums, kLineBytes);
        if constexpr (kSums > 1) _tile_loadd(1, sums + step, kLineBytes);
        if constexpr (kSums > 2) _tile_loadd(2, sums + 2 * step, kLineBytes);
        if constexpr (kSums > 3) _tile_loadd(3, sums + 3 * step, kLineBytes);
    }
}

template <int kSums>
void end_sums(uint8_t* sums, int64_t step) {
    _tile_stored(0, sums, kLineBytes);
    if constexpr (kSums > 1) _tile_stored(1, sums + step, kLineBytes);
    if constexpr (kSums > 2) _tile_stored(2, sums + 2 * step, kLineBytes);
    if constexpr (kSums > 3) _tile_stored(3, sums + 3 * step, kLineBytes);
}

#define ROSEINFER_DOT(sum, rows, column)                               \
    do {                                                               \
        if constexpr (sizeof(T) == 1) _tile_dpbssd(sum, rows, column); \
        else _tile_dpbf16ps(sum, rows, column);                        \
    } while (0)

// sums [row tile][two columns] = (is_first ? 0 : sums) + rows * columns: one or two row tiles and two columns, or one
// to four row tiles and the first column.
template <typename T, int kRowTiles, int kColumns>
void multiply_tiles(Operands at, bool is_first, uint8_t* sums) {
    static_assert(kRowTiles * kColumns <= 4);
    constexpr int64_t kStep = (3 - kColumns) * kTileBytes;
    begin_sums<kRowTiles * kColumns>(is_first, sums, kStep);
    for (int64_t tile = 0; tile < at.num_tiles; ++tile) {
        _tile_loadd(6, at.column, kLineBytes);
        _tile_loadd(4, at.rows, kLineBytes);
        ROSEINFER_DOT(0, 4, 6);
        ask_for(at.ahead, at.num_ahead);
        if (kColumns > 1 && at.asks_both) ask_for(at.ahead + at.column_step, at.num_ahead);
        if constexpr (kColumns == 2) {
            _tile_loadd(7, at.column + at.column_step, kLineBytes);
            ROSEINFER_DOT(1, 4, 7);
            if constexpr (kRowTiles > 1) _tile_loadd(5, at.rows + at.rows_step, kLineBytes);
            if constexpr (kRowTiles > 1) ROSEINFER_DOT(2, 5, 6);
            if constexpr (kRowTiles > 1) ROSEINFER_DOT(3, 5, 7);
        } else {
            if constexpr (kRowTiles > 1) _tile_loadd(5, at.rows + at.rows_step, kLineBytes);
            if constexpr (kRowTiles > 1) ROSEINFER_DOT(1, 5, 6);
            if constexpr (kRowTiles > 2) _tile_loadd(4, at.rows + 2 * at.rows_step, kLineBytes);
            if constexpr (kRowTiles > 2) ROSEINFER_DOT(2, 4, 6);
            if constexpr (kRowTiles > 3) _tile_loadd(5, at.rows + 3 * at.rows_step, kLineBytes);
            if constexpr (kRowTiles > 3) ROSEINFER_DOT(3, 5, 6);
        }
        at.column += kTileBytes;
        at.rows += at.row_step;
        at.ahead += at.num_ahead * kLineBytes;
    }
    end_sums<kRowTiles * kColumns>(sums, kStep);
}

#undef ROSEINFER_DOT

// The same for so many row tiles.
template <typename T>
void multiply_both_columns(const Operands& at, int64_t num_row_tiles, bool is_first, uint8_t* sums) {
    if (num_row_tiles == 1) return multiply_tiles<T, 1, 2>(at, is_first, sums);
    multiply_tiles<T, 2, 2>(at, is_first, sums);
}

template <typename T>
void multiply_one_column(const Operands& at, int64_t num_row_tiles, bool is_first, uint8_t* sums) {
    switch (num_row_tiles) {
        case 1:
            return multiply_tiles<T, 1, 1>(at, is_first, sums);
        case 2:
            return multiply_tiles<T, 2, 1>(at, is_first, sums);
        case 3:
            return multiply_tiles<T, 3, 1>(at, is_first, sums);
        default:
            return multiply_tiles<T, 4, 1>(at, is_first, sums);
    }
}

}  // namespace
