// A row of numbers into int8 and one scale: x[i] is about scale * q[i], |q[i]| <= 127, the largest |x[i]| exactly 127.

#pragma once

#include <limits>

#include "activation.h"

constexpr int64_t kQuantizedPiece = 64;  // numbers that are written at once: one row of an AMX tile

// q = round(x * 127 / max|x|), ties to even. Calls write(index of the piece, its 64 numbers, how many of them the row
// has; the others are 0). Returns the scale. A row so small that 127 / max|x| is no float32, below about 3.7e-37, is a
// row of zeros, and so is its scale. That of a row that is not finite is NaN, and its q are 0: everything computed from
// it is NaN and not a number that looks sound. The same bits as quantized_rows of layers/int8.py gives.
template <typename T, typename Write>
static inline float quantize_row(const T* x, int64_t size, const Write& write) {
    Floats most = zeros(), poison = zeros();
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats values = load_first(x + i, size - i);
        most = maximum(magnitude(values), most);
        poison = poison + values * zeros();
    }
    const float limit = largest(most), not_finite = total(poison), factor = 127.0f / limit;
    const bool has_factor = factor <= std::numeric_limits<float>::max() && not_finite == 0.0f;
    for (int64_t piece = 0; piece * kQuantizedPiece < size; ++piece) {
        alignas(64) int8_t rounded[kQuantizedPiece] = {};
        const int64_t first = piece * kQuantizedPiece;
        const int64_t count = size - first < kQuantizedPiece ? size - first : kQuantizedPiece;
        for (int64_t i = 0; has_factor && i < count; i += LANES) {
            store_bytes(rounded + i, round(load_first(x + first + i, count - i) * splat(factor)));
        }
        write(piece, rounded, count);
    }
    return (has_factor ? limit / 127.0f : 0.0f) + not_finite;
}
