// Products of integers in registers. The sums are the same with every family of instructions.
//
// A family's header has the type Integers, of the words of a register, and either HAS_FOURS and
//     add_fours(sum, x, weight)       sum + the four products of bytes in each word, those of x unsigned on x86
// or what it is made of here:
//     pair_products(a, b)             of each word, the sum of its two products of signed 16 bits
//     odd_bytes(x), even_bytes(x)     the second and fourth byte of each word, or the first and third, in 16 bits each
//     add_byte_pairs(sum, a, b)       16 bits each: sum + two products of bytes, those of a unsigned
// With HAS_EIGHTS there is an instruction for the products of two rows with two outputs, see row_pairs.h:
//     add_eights(sum, x, weight)      sum + the eight products of signed bytes of each half of x and each of weight
//     join_eights(a, b)               eight bytes each
//     lower_words(a, b), upper_words, lower_halves, upper_halves   the words, or eights, of both in turn, of one half
// Sums wrap around.

#pragma once

#include "simd.h"

// With ROSEINFER_MODEL_FOURS what is made of the instruction for four products is tested on processors without it.
#if defined(HAS_FOURS) || defined(ROSEINFER_MODEL_FOURS)
constexpr bool kHasFours = true;
#else
constexpr bool kHasFours = false;
#endif

// Whether rows of int8 have 128 added, since the instruction takes their bytes unsigned.
#ifdef __ARM_NEON
constexpr bool kRowsAreUnsigned = false;
#else
constexpr bool kRowsAreUnsigned = kHasFours;
#endif

#ifndef HAS_FOURS

// Keeps a sum where it is: GCC 12 otherwise computes many products before it adds them, and they go to memory meanwhile.
static inline __attribute__((always_inline)) Integers in_order(Integers sum) {
    asm("" : "+v"(sum));
    return sum;
}

// sum + the two products of signed 16 bits in each word; sums wrap around.
static inline __attribute__((always_inline)) Integers add_pairs(Integers sum, Integers a, Integers b) {
    typedef uint32_t Wrapping __attribute__((vector_size(sizeof(Floats))));  // signed ones must not
    return in_order((Integers)((Wrapping)sum + (Wrapping)pair_products(a, b)));
}

static inline __attribute__((always_inline)) Integers add_fours(Integers sum, Integers x, Integers weight) {
    const Integers even = x & 0x00ff00ff, odd = (x >> 8) & 0x00ff00ff;
    return add_pairs(add_pairs(sum, even, even_bytes(weight)), odd, odd_bytes(weight));
}

#endif

// int4: weights are numbers from 0 to 15 less a zero; x is signed, 32 inputs are a group, and sums of one fit in 16 bits.
// A sum begins with a word that takes the zeros away, in the form that the level sums in: a whole word, or a half for the
// first two bytes of each word and one for the last two.

static inline __attribute__((always_inline)) Integers low_nibbles(Integers words) { return words & 0x0f0f0f0f; }
static inline __attribute__((always_inline)) Integers high_nibbles(Integers words) { return (words >> 4) & 0x0f0f0f0f; }

#if defined(HAS_FOURS) || defined(ROSEINFER_MODEL_FOURS)

static inline __attribute__((always_inline)) Integers add_nibbles(Integers sum, Integers weight, Integers x) {
    return add_fours(sum, weight, x);
}

// The sum of a group as floats, exactly.
static inline __attribute__((always_inline)) Floats total_of_group(Integers sum) {
    return __builtin_convertvector(sum, Floats);
}

#else

static inline __attribute__((always_inline)) Integers add_nibbles(Integers sum, Integers weight, Integers x) {
    return in_order(add_byte_pairs(sum, weight, x));
}

static inline __attribute__((always_inline)) Floats total_of_group(Integers sum) {
    return __builtin_convertvector(add_pairs(Integers{}, sum, Integers{} + 0x00010001), Floats);
}

#endif

// Of 32 numbers of x, where the weights have this zero.
static inline int32_t first_of_group(const int8_t* values, int zero) {
    int32_t first = 0, last = 0;
    for (int i = 0; i < 32; i += 4) {
        first -= zero * (values[i] + values[i + 1]);
        last -= zero * (values[i + 2] + values[i + 3]);
    }
    return kHasFours ? first + last : int32_t((uint32_t(last) << 16) | (uint32_t(first) & 0xffff));
}

static inline __attribute__((always_inline)) Integers load_zeros(const uint8_t* from) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Integers);
}

// The first word of a group for zeros of 1, for the zeros of the outputs.
static inline __attribute__((always_inline)) Integers times_zeros(Integers first, Integers zeros) {
    typedef int16_t Halves __attribute__((vector_size(sizeof(Floats))));
    if (!kHasFours) return (Integers)((Halves)first * (Halves)(zeros | zeros << 16));
    return first * zeros;
}
