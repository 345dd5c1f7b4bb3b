// Registers of float32 lanes: 16 with AVX-512, 8 with AVX2. The same names at both widths; no kernel is known here.

#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__AVX512F__)

using Floats = __m512;
constexpr int LANES = 16;

static inline Floats zeros() { return _mm512_setzero_ps(); }
static inline Floats splat(float x) { return _mm512_set1_ps(x); }
static inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
static inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
static inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
static inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
static inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
static inline Floats negative_multiply_add(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
static inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where either is NaN
static inline Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
static inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
static inline float total(Floats x) { return _mm512_reduce_add_ps(x); }

// The size of x, which is not negative, with the sign of y.
static inline Floats with_sign_of(Floats y, Floats x) {
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_castps_si512(x)));
}

// x in lanes first..last-1, `otherwise` in the others.
static inline Floats within(int first, int last, Floats x, Floats otherwise) {
    first = first < 0 ? 0 : first > LANES ? LANES : first;
    last = last < 0 ? 0 : last > LANES ? LANES : last;
    const uint32_t mask = ((1u << last) - 1) & ~((1u << first) - 1);
    return _mm512_mask_mov_ps(otherwise, __mmask16(mask), x);
}

// 2^n * x for whole n
static inline Floats scale_by_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

// x, or 0 where y < limit
static inline Floats zero_below(Floats x, Floats y, Floats limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, limit, _CMP_NLT_UQ), x);
}

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

// The lower and the upper bfloat16 of each word, widened.
static inline Floats lower_bfloat16(Words x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
static inline Floats upper_bfloat16(Words x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000))));
}

#else

using Floats = __m256;
constexpr int LANES = 8;

static inline Floats zeros() { return _mm256_setzero_ps(); }
static inline Floats splat(float x) { return _mm256_set1_ps(x); }
static inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
static inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
static inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
static inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
static inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c
static inline Floats negative_multiply_add(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
static inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b where either is NaN
static inline Floats round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }

static inline Floats with_sign_of(Floats y, Floats x) { return _mm256_or_ps(_mm256_and_ps(y, splat(-0.0f)), x); }

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

// x in lanes first..last-1, `otherwise` in the others.
static inline Floats within(int first, int last, Floats x, Floats otherwise) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i is_left = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    const __m256i is_inside = _mm256_andnot_si256(is_left, _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
    return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(is_inside));
}

// 2^n * x for whole n from -126 to 127
static inline Floats scale_by_power(Floats x, Floats n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return multiply(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

// x, or 0 where y < limit
static inline Floats zero_below(Floats x, Floats y, Floats limit) {
    return _mm256_and_ps(x, _mm256_cmp_ps(y, limit, _CMP_NLT_UQ));
}

using Words = __m256i;
static inline Words load_words(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// The lower and the upper bfloat16 of each word, widened.
static inline Floats lower_bfloat16(Words x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
static inline Floats upper_bfloat16(Words x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int32_t(0xffff0000))));
}

#endif

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
