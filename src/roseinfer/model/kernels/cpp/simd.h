// Registers of float32 lanes, under the same names in every family of instructions; no kernel is known here.
//
// A family's header has the type Floats of LANES lanes, how many REGISTERS there are, and what differs from family to
// family:
//     multiply_add(a, b, c)           a * b + c, rounded once; negative_multiply_add: c - a * b
//     maximum(a, b)                   b where either is NaN
//     round(x)                        to whole numbers, ties to even
//     largest(x), total(x)            of the lanes
//     with_sign_of(y, x)              the size of x, which is not negative, with the sign of y
//     within(first, last, x, other)   x in lanes first..last-1, `other` in the others
//     scale_by_power(x, n)            2^n * x for whole n from -126 to 127
//     zero_below(x, y, limit)         x, or 0 where y < limit
//     reciprocal(x)                   1 / x to 2 units in the last place, for x in 1..2^20
//     store_bytes(to, x)              whole numbers from -128 to 127; load_bytes(from) reads them
//     store_rounded(to, x)            several registers as store_bytes does, rounded first; with HAS_ROUNDED_STORE at once
//     lower_bfloat16, upper_bfloat16  those of each word, widened
//     load_halves, store_halves, half_to_float, to_half   float16; rounded to nearest, ties to even
// With HAS_BFLOAT16_PRODUCTS there are instructions for
//     add_bfloat16_pairs(sum, a, b)   sum + the two products of bfloat16 in each word
//     small_bfloat16(a, b)            words of the numbers of a and then of b, which bfloat16 has exactly
// and with HAS_BFLOAT16_STORE one, or a few, for
//     store_bfloat16(to, x)           rounded as to_bfloat16 does; on x86, numbers below the smallest normal one become 0
// dot.h tells what is there for integers.

#pragma once

#include <utility>

#include "common.h"

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_neon.h"
#endif

#ifndef HAS_BFLOAT16_STORE

static inline void store_bfloat16(bfloat16* to, Floats x) {
    float all[LANES];
    store(all, x);
    for (int i = 0; i < LANES; ++i) to[i] = to_bfloat16(all[i]);
}

#endif

#ifndef HAS_ROUNDED_STORE

template <int count>
static inline void store_rounded(int8_t* to, const Floats (&x)[count]) {
    for (int i = 0; i < count; ++i) store_bytes(to + i * LANES, round(x[i]));
}

#endif

template <typename Call, int... indices>
inline __attribute__((always_inline)) void each(const Call& call, std::integer_sequence<int, indices...>) {
    (call(std::integral_constant<int, indices>()), ...);
}

// Calls call(0) to call(count - 1), as constants: loops are unrolled after GCC 12 has put their arrays into memory.
template <int count, typename Call>
inline __attribute__((always_inline)) void each(const Call& call) {
    each(call, std::make_integer_sequence<int, count>());
}

// e^x for x <= 0, to 2 units in the last place; 0 below -87 and for -infinity, exactly 1 for 0, NaN for NaN.
// Reduced to |f| <= ln(2) / 2 in two steps (Cody and Waite); the polynomial is that of Cephes' expf.
static inline Floats exponential(Floats x) {
    const Floats limit = splat(-87.0f);
    const Floats bounded = maximum(limit, x);
    const Floats n = round(multiply(bounded, splat(1.44269504088896341f)));
    Floats f = negative_multiply_add(n, splat(0.693359375f), bounded);
    f = negative_multiply_add(n, splat(-2.12194440e-4f), f);
    Floats p = splat(1.9875691500e-4f);
    p = multiply_add(p, f, splat(1.3981999507e-3f));
    p = multiply_add(p, f, splat(8.3334519073e-3f));
    p = multiply_add(p, f, splat(4.1665795894e-2f));
    p = multiply_add(p, f, splat(1.6666665459e-1f));
    p = multiply_add(p, f, splat(5.0000001201e-1f));
    p = multiply_add(p, multiply(f, f), f);
    return zero_below(scale_by_power(add(p, splat(1.0f)), n), x, limit);
}
