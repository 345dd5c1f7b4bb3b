// Products of integers in registers: what the levels have different instructions for. The sums are the same at each.

#pragma once

#include "simd.h"

typedef int32_t Integers __attribute__((vector_size(sizeof(Floats))));

// With ROSEINFER_MODEL_FOURS what is made of the instruction for four products is tested on processors without it.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(ROSEINFER_MODEL_FOURS)
constexpr bool kHasFours = true;
#else
constexpr bool kHasFours = false;
#endif

// Keeps a sum where it is: GCC 12 otherwise computes many products before it adds them, and they go to memory meanwhile.
static inline __attribute__((always_inline)) Integers in_order(Integers sum) {
    asm("" : "+v"(sum));
    return sum;
}

// sum + the two products of signed 16 bits in each word; sums wrap around.
static inline __attribute__((always_inline)) Integers add_pairs(Integers sum, Integers a, Integers b) {
#if defined(__AVX512F__)
    return in_order((Integers)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b)));
#else
    return in_order((Integers)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b)));
#endif
}

// The first and third byte of each word, and the second and fourth, in 16 bits each, with their signs.
static inline __attribute__((always_inline)) Integers odd_bytes(Integers words) {
#if defined(__AVX512F__)
    return (Integers)_mm512_srai_epi16((__m512i)words, 8);
#else
    return (Integers)_mm256_srai_epi16((__m256i)words, 8);
#endif
}

static inline __attribute__((always_inline)) Integers even_bytes(Integers words) {
#if defined(__AVX512F__)
    return odd_bytes((Integers)_mm512_slli_epi16((__m512i)words, 8));
#else
    return odd_bytes((Integers)_mm256_slli_epi16((__m256i)words, 8));
#endif
}

// sum + the four products of bytes in each word, those of x unsigned; sums wrap around.
static inline __attribute__((always_inline)) Integers add_fours(Integers sum, Integers x, Integers weight) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weight);
#elif defined(__AVXVNNI__)
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)weight);
#else
    const Integers even = x & 0x00ff00ff, odd = (x >> 8) & 0x00ff00ff;
    return add_pairs(add_pairs(sum, even, even_bytes(weight)), odd, odd_bytes(weight));
#endif
}

// int4: weights are 0 to 15, 8 too many each; x is signed, 32 inputs are a group, and sums of one fit in 16 bits. A sum
// begins with a word of x that takes away what is too many, in the form that the level sums in: a whole word, or a
// half for the first two bytes of each word and one for the last two.

static inline __attribute__((always_inline)) Integers low_nibbles(Integers words) { return words & 0x0f0f0f0f; }
static inline __attribute__((always_inline)) Integers high_nibbles(Integers words) { return (words >> 4) & 0x0f0f0f0f; }

static inline __attribute__((always_inline)) Integers add_nibbles(Integers sum, Integers weight, Integers x) {
    if constexpr (kHasFours) return add_fours(sum, weight, x);
#if defined(__AVX512F__)
    return in_order((Integers)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)weight, (__m512i)x)));
#else
    return in_order((Integers)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weight, (__m256i)x)));
#endif
}

// The sum of a group as floats, exactly.
static inline __attribute__((always_inline)) Floats total_of_group(Integers sum) {
    if constexpr (!kHasFours) sum = add_pairs(Integers{}, sum, Integers{} + 0x00010001);
    return __builtin_convertvector(sum, Floats);
}

// Of 32 numbers of x.
static inline int32_t first_of_group(const int8_t* values) {
    int32_t first = 0, last = 0;
    for (int i = 0; i < 32; i += 4) {
        first -= 8 * (values[i] + values[i + 1]);
        last -= 8 * (values[i + 2] + values[i + 3]);
    }
    return kHasFours ? first + last : int32_t((uint32_t(last) << 16) | (uint32_t(first) & 0xffff));
}

static inline Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

static inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
static inline uint16_t to_half(float x) { return uint16_t(_cvtss_sh(x, 0)); }  // to nearest, ties to even
