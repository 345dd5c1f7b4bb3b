// Eight registers of 16 rows of 64 bytes, four of them sums, and the block of products that gemm.cpp is made of.

#pragma once

#include <immintrin.h>

#include <type_traits>

#include "common.h"

namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kLineBytes = 64;  // of a tile row, and of a cache line
constexpr int64_t kTileBytes = kTileRows * kLineBytes;

constexpr int64_t kManyBytes = 1 << 20;  // outputs of which the second cache would keep few until they are read

template <typename T>
using Sum = std::conditional_t<sizeof(T) == 1, int32_t, float>;

// While it lives, this thread's tiles 0 to 3, the sums, have `rows` rows, 4 and 5 so many of `depth` bytes, and 6 and 7
// what is multiplied with these.
class TileScope {
public:
    explicit TileScope(int64_t rows, int64_t depth = kLineBytes) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int tile = 0; tile < 8; ++tile) {
            shapes.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? depth : kLineBytes);
            shapes.rows[tile] = uint8_t(tile < 6 ? rows : depth / 4);
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
    const uint8_t* ahead;  // lines of the columns that will be needed later
    int64_t num_ahead;     // how many of each column to ask for with each tile of k
};

template <int kColumns>
inline void ask_for_ahead(Operands& at) {
    for (int64_t line = 0; line < at.num_ahead; ++line, at.ahead += kLineBytes) {
        prefetch_to_level2(at.ahead);
        if constexpr (kColumns > 1) prefetch_to_level2(at.ahead + at.column_step);
    }
}

#define ROSEINFER_DOT(sum, rows, column)                               \
    do {                                                               \
        if constexpr (sizeof(T) == 1) _tile_dpbssd(sum, rows, column); \
        else _tile_dpbf16ps(sum, rows, column);                        \
    } while (0)

// sums [row tile][two columns] = (is_first ? 0 : sums) + rows * columns. After each tile of k, `pending` takes a step: what
// is left to do with other sums runs beside the products of these. The columns stay in the nearest cache for more rows;
// what is read once passes it by.
template <typename T, int kRowTiles, int kColumns, typename Pending>
__attribute__((noinline)) void multiply_tiles(const Operands& operands, bool is_first, uint8_t* sums, Pending& pending) {
    constexpr bool kIsSquare = kRowTiles == 2 && kColumns == 2;
    // Part by part, into registers: a wider read would wait until its parts, and the tiles stored before, are in the cache.
    Operands at = {operands.rows,        operands.row_step,  operands.rows_step, operands.column,
                   operands.column_step, operands.num_tiles, operands.ahead,     operands.num_ahead};
    if (is_first) {
        _tile_zero(0);
        if constexpr (kColumns > 1) _tile_zero(1);
        if constexpr (kRowTiles > 1) _tile_zero(2);
        if constexpr (kIsSquare) _tile_zero(3);
    } else {
        _tile_stream_loadd(0, sums, kLineBytes);
        if constexpr (kColumns > 1) _tile_stream_loadd(1, sums + kTileBytes, kLineBytes);
        if constexpr (kRowTiles > 1) _tile_stream_loadd(2, sums + 2 * kTileBytes, kLineBytes);
        if constexpr (kIsSquare) _tile_stream_loadd(3, sums + 3 * kTileBytes, kLineBytes);
    }
    Pending beside = pending;  // whose members stay in registers
    const int64_t num_rows = beside.rows_of_step(at.num_tiles);
    for (int64_t tile = 0; tile < at.num_tiles; ++tile) {
        _tile_loadd(6, at.column, kLineBytes);
        _tile_stream_loadd(4, at.rows, kLineBytes);
        ROSEINFER_DOT(0, 4, 6);
        if constexpr (kColumns > 1) _tile_loadd(7, at.column + at.column_step, kLineBytes);
        if constexpr (kColumns > 1) ROSEINFER_DOT(1, 4, 7);
        if constexpr (kRowTiles > 1) _tile_stream_loadd(5, at.rows + at.rows_step, kLineBytes);
        if constexpr (kRowTiles > 1) ROSEINFER_DOT(2, 5, 6);
        beside.step(num_rows);
        if constexpr (kIsSquare) ROSEINFER_DOT(3, 5, 7);
        ask_for_ahead<kColumns>(at);
        at.column += kTileBytes;
        at.rows += at.row_step;
    }
    pending.follow(beside);
    _tile_stored(0, sums, kLineBytes);
    if constexpr (kColumns > 1) _tile_stored(1, sums + kTileBytes, kLineBytes);
    if constexpr (kRowTiles > 1) _tile_stored(2, sums + 2 * kTileBytes, kLineBytes);
    if constexpr (kIsSquare) _tile_stored(3, sums + 3 * kTileBytes, kLineBytes);
}

#undef ROSEINFER_DOT

// The same for so many row tiles and columns.
template <typename T, typename Pending>
void multiply_block(const Operands& at, int64_t num_row_tiles, int64_t num_columns, bool is_first, uint8_t* sums,
                    Pending& pending) {
    if (num_row_tiles == 2) {
        if (num_columns == 2) return multiply_tiles<T, 2, 2>(at, is_first, sums, pending);
        return multiply_tiles<T, 2, 1>(at, is_first, sums, pending);
    }
    if (num_columns == 2) return multiply_tiles<T, 1, 2>(at, is_first, sums, pending);
    multiply_tiles<T, 1, 1>(at, is_first, sums, pending);
}

}  // namespace
