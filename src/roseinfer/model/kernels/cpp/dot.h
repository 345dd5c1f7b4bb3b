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

// sum + the two products of signed 16 bits in each word; sums wrap around.
static inline __attribute__((always_inline)) Integers add_pairs(Integers sum, Integers a, Integers b) {
#if defined(__AVX512F__)
    return (Integers)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#else
    return (Integers)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
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
