// The instructions of AVX2: registers of 8 float32 lanes. See simd.h.

#pragma once

#include <immintrin.h>

#include <cstdint>

using Floats = __m256;
constexpr int LANES = 8, REGISTERS = 16;

static inline Floats zeros() { return _mm256_setzero_ps(); }
static inline Floats splat(float x) { return _mm256_set1_ps(x); }
static inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
static inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
static inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
static inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
static inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline Floats negative_multiply_add(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
static inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
static inline Floats round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }

static inline float largest(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

static inline float total(Floats x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

static inline Floats with_sign_of(Floats y, Floats x) { return _mm256_or_ps(_mm256_and_ps(y, splat(-0.0f)), x); }

static inline Floats within(int first, int last, Floats x, Floats otherwise) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i is_left = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    const __m256i is_inside = _mm256_andnot_si256(is_left, _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
    return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(is_inside));
}

static inline Floats scale_by_power(Floats x, Floats n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return multiply(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

static inline Floats zero_below(Floats x, Floats y, Floats limit) {
    return _mm256_and_ps(x, _mm256_cmp_ps(y, limit, _CMP_NLT_UQ));
}

static inline Floats reciprocal(Floats x) { return splat(1.0f) / x; }

// ---- Words of 4 bytes

using Words = __m256i;
static inline Words load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

static inline void store_bytes(int8_t* to, Floats x) {
    alignas(32) float all[LANES];
    store(all, x);
    for (int lane = 0; lane < LANES; ++lane) to[lane] = int8_t(int32_t(all[lane]));
}

static inline Floats load_bytes(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}

// ---- bfloat16

static inline Floats lower_bfloat16(Words x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
static inline Floats upper_bfloat16(Words x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int32_t(0xffff0000))));
}

// ---- float16

static inline Floats load_halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
static inline void store_halves(uint16_t* to, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, 0));
}
static inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
static inline uint16_t to_half(float x) { return uint16_t(_cvtss_sh(x, 0)); }

// ---- Products of integers

typedef int32_t Integers __attribute__((vector_size(sizeof(Floats))));

static inline __attribute__((always_inline)) Integers pair_products(Integers a, Integers b) {
    return (Integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

static inline __attribute__((always_inline)) Integers odd_bytes(Integers words) {
    return (Integers)_mm256_srai_epi16((__m256i)words, 8);
}

static inline __attribute__((always_inline)) Integers even_bytes(Integers words) {
    return odd_bytes((Integers)_mm256_slli_epi16((__m256i)words, 8));
}

static inline __attribute__((always_inline)) Integers add_byte_pairs(Integers sum, Integers a, Integers b) {
    return (Integers)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b));
}

#ifdef __AVXVNNI__

#define HAS_FOURS

static inline __attribute__((always_inline)) Integers add_fours(Integers sum, Integers x, Integers weight) {
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)weight);
}

#endif
