// The instructions of AVX-512: registers of 16 float32 lanes. See simd.h.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using Floats = __m512;
constexpr int LANES = 16, REGISTERS = 32;

static inline Floats zeros() { return _mm512_setzero_ps(); }
static inline Floats splat(float x) { return _mm512_set1_ps(x); }
static inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
static inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
static inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
static inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
static inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats negative_multiply_add(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
static inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
static inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
static inline float total(Floats x) { return _mm512_reduce_add_ps(x); }

static inline Floats with_sign_of(Floats y, Floats x) {
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_castps_si512(x)));
}

static inline Floats within(int first, int last, Floats x, Floats otherwise) {
    first = first < 0 ? 0 : first > LANES ? LANES : first;
    last = last < 0 ? 0 : last > LANES ? LANES : last;
    const uint32_t mask = ((1u << last) - 1) & ~((1u << first) - 1);
    return _mm512_mask_mov_ps(otherwise, __mmask16(mask), x);
}

static inline Floats scale_by_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

static inline Floats zero_below(Floats x, Floats y, Floats limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, limit, _CMP_NLT_UQ), x);
}

static inline Floats reciprocal(Floats x) {
    const Floats near = _mm512_maskz_rcp14_ps(0xffff, x);
    return near * (splat(2.0f) - x * near);  // a step of Newton's
}

// ---- Words of 4 bytes

using Words = __m512i;
static inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }

// The lower eight words, and 0 in the others.
static inline Words load_half_words(const void* from) {
    return _mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
static inline Words join_halves(const void* low, const void* high) {
    return _mm512_inserti64x4(load_half_words(low), _mm256_loadu_si256(static_cast<const __m256i*>(high)), 1);
}
static inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }

static inline void store_bytes(int8_t* to, Floats x) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

#define HAS_ROUNDED_STORE

static inline void store_rounded(int8_t* to, const Floats (&x)[4]) {
    const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)));
}

static inline Floats load_bytes(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

// ---- bfloat16

static inline Floats lower_bfloat16(Words x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
static inline Floats upper_bfloat16(Words x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000))));
}

#ifdef __AVX512BF16__

#define HAS_BFLOAT16_PRODUCTS
#define HAS_BFLOAT16_STORE

static inline Words splat_word(int32_t x) { return _mm512_set1_epi32(x); }

static inline Floats add_bfloat16_pairs(Floats sum, Words a, Words b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

static inline Words small_bfloat16(Floats a, Floats b) { return (Words)_mm512_cvtne2ps_pbh(b, a); }

static inline void store_bfloat16(uint16_t* to, Floats x) {
    const __m256bh halves = _mm512_cvtneps_pbh(x);
    std::memcpy(to, &halves, sizeof halves);
}

#endif

// ---- float16

static inline Floats load_halves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
static inline void store_halves(uint16_t* to, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, 0));
}
static inline float half_to_float(uint16_t half) { return _cvtsh_ss(half); }
static inline uint16_t to_half(float x) { return uint16_t(_cvtss_sh(x, 0)); }

// ---- Products of integers

typedef int32_t Integers __attribute__((vector_size(sizeof(Floats))));

static inline __attribute__((always_inline)) Integers pair_products(Integers a, Integers b) {
    return (Integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}

static inline __attribute__((always_inline)) Integers odd_bytes(Integers words) {
    return (Integers)_mm512_srai_epi16((__m512i)words, 8);
}

static inline __attribute__((always_inline)) Integers even_bytes(Integers words) {
    return odd_bytes((Integers)_mm512_slli_epi16((__m512i)words, 8));
}

static inline __attribute__((always_inline)) Integers add_byte_pairs(Integers sum, Integers a, Integers b) {
    return (Integers)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)a, (__m512i)b));
}

#ifdef __AVX512VNNI__

#define HAS_FOURS

static inline __attribute__((always_inline)) Integers add_fours(Integers sum, Integers x, Integers weight) {
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weight);
}

#endif
