// A row of numbers into int8 and one scale: x[i] is about scale * q[i], |q[i]| <= 127, the largest |x[i]| exactly 127.

#pragma once

#include <limits>

#include "activation.h"

constexpr int64_t kQuantizedPiece = 64;  // numbers that are written at once: one row of an AMX tile

// The largest |x[i]| of each of a few lanes. Without their sign, numbers have the order of their bits, and what is not
// finite is above all that is.
template <typename T>
struct Magnitudes {
    using Bits = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;
    static constexpr int kLanes = sizeof(Floats) / sizeof(T), kChains = 4;  // so that none waits for the one before
    typedef Bits Vector __attribute__((vector_size(sizeof(Floats))));

    static inline void look(Vector& most, const T* x) {
        Vector bits;
        std::memcpy(&bits, x, sizeof bits);
        bits &= std::numeric_limits<Bits>::max();
        most = bits > most ? bits : most;
    }

    static void of_row(const T* x, int64_t size, T (&largest)[kLanes]) {
        Vector most[kChains] = {};
        int64_t i = 0;
        for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
            for (int chain = 0; chain < kChains; ++chain) look(most[chain], x + i + chain * kLanes);
        }
        for (; i + kLanes <= size; i += kLanes) look(most[0], x + i);
        if (i < size) {
            T rest[kLanes] = {};
            std::memcpy(rest, x + i, (size - i) * sizeof(T));
            look(most[0], rest);
        }
        for (int chain = 1; chain < kChains; ++chain) most[0] = most[chain] > most[0] ? most[chain] : most[0];
        std::memcpy(largest, &most[0], sizeof most[0]);
    }
};

// q = round(x * 127 / max|x|), ties to even. Calls write(index of the piece, its 64 numbers, how many of them the row
// has; the others are 0). Returns the scale. A row so small that 127 / max|x| is no float32, below about 3.7e-37, is a
// row of zeros, and so is its scale. That of a row that is not finite is NaN, and its q are 0: everything computed from
// it is NaN and not a number that looks sound. The same bits as quantized_rows of layers/int8.py gives.
template <typename T, typename Write>
static inline float quantize_row(const T* x, int64_t size, const Write& write) {
    T magnitudes[Magnitudes<T>::kLanes];
    Magnitudes<T>::of_row(x, size, magnitudes);
    Floats most = zeros(), poison = zeros();
    for (int64_t i = 0; i < Magnitudes<T>::kLanes; i += LANES) {
        most = maximum(load(magnitudes + i), most);
        poison = poison + load(magnitudes + i) * zeros();
    }
    const float limit = largest(most), not_finite = total(poison), factor = 127.0f / limit;
    const bool has_factor = factor <= std::numeric_limits<float>::max() && not_finite == 0.0f;
    for (int64_t piece = 0; piece * kQuantizedPiece < size; ++piece) {
        alignas(64) int8_t rounded[kQuantizedPiece] = {};
        const int64_t first = piece * kQuantizedPiece;
        const int64_t count = size - first < kQuantizedPiece ? size - first : kQuantizedPiece;
        if (has_factor && count == kQuantizedPiece) {
            Floats parts[kQuantizedPiece / LANES];
            for (int part = 0; part < kQuantizedPiece / LANES; ++part) {
                parts[part] = load(x + first + part * LANES) * splat(factor);
            }
            store_rounded(rounded, parts);
            // The next row, perhaps: what memory gives meanwhile need not be waited for then.
            for (int64_t i = 0; i < kQuantizedPiece; i += 64 / sizeof(T)) prefetch_to_level1(x + size + first + i);
        } else {
            for (int64_t i = 0; has_factor && i < count; i += LANES) {
                store_bytes(rounded + i, round(load_first(x + first + i, count - i) * splat(factor)));
            }
        }
        write(piece, rounded, count);
    }
    return (has_factor ? limit / 127.0f : 0.0f) + not_finite;
}
