// The instructions of Arm's NEON: registers of 4 float32 lanes. See simd.h.

#pragma once

#include <arm_neon.h>

#include <cstdint>

using Floats = float32x4_t;
constexpr int LANES = 4, REGISTERS = 32;

static inline Floats zeros() { return vdupq_n_f32(0.0f); }
static inline Floats splat(float x) { return vdupq_n_f32(x); }
static inline Floats load(const float* from) { return vld1q_f32(from); }
static inline void store(float* to, Floats x) { vst1q_f32(to, x); }
static inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
static inline Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
static inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
static inline Floats negative_multiply_add(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
static inline Floats maximum(Floats a, Floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline Floats round(Floats x) { return vrndnq_f32(x); }
static inline Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }
static inline float largest(Floats x) { return vmaxvq_f32(x); }
static inline float total(Floats x) { return vaddvq_f32(x); }

static inline Floats with_sign_of(Floats y, Floats x) { return vbslq_f32(vdupq_n_u32(0x80000000), y, x); }

static inline Floats within(int first, int last, Floats x, Floats otherwise) {
    const int32x4_t lane = {0, 1, 2, 3};
    const uint32x4_t is_inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(last)));
    return vbslq_f32(is_inside, x, otherwise);
}

static inline Floats scale_by_power(Floats x, Floats n) {
    const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}

static inline Floats zero_below(Floats x, Floats y, Floats limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(y, limit)));
}

static inline Floats reciprocal(Floats x) { return vdivq_f32(splat(1.0f), x); }

// ---- Words of 4 bytes

using Words = uint32x4_t;
static inline Words load_words(const void* from) { return vld1q_u32(static_cast<const uint32_t*>(from)); }
static inline Words splat_word(int32_t x) { return vdupq_n_u32(uint32_t(x)); }

static inline void store_bytes(int8_t* to, Floats x) {
    const int16x4_t halves = vmovn_s32(vcvtq_s32_f32(x));
    const int32x2_t bytes = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves)));
    const int32_t word = vget_lane_s32(bytes, 0);
    __builtin_memcpy(to, &word, sizeof word);
}

static inline Floats load_bytes(const int8_t* from) {
    int32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    const int16x8_t halves = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves)));
}

// ---- bfloat16

static inline Floats lower_bfloat16(Words x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }
static inline Floats upper_bfloat16(Words x) {
    return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000)));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

#define HAS_BFLOAT16_PRODUCTS

static inline Floats add_bfloat16_pairs(Floats sum, Words a, Words b) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}

static inline Words small_bfloat16(Floats a, Floats b) {
    return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
}

#else

// Two products of float32, the lower first.
static inline Floats add_bfloat16_pairs(Floats sum, Words a, Words b) {
    sum = vfmaq_f32(sum, lower_bfloat16(a), lower_bfloat16(b));
    return vfmaq_f32(sum, upper_bfloat16(a), upper_bfloat16(b));
}

#endif

#define HAS_BFLOAT16_STORE

static inline void store_bfloat16(uint16_t* to, Floats x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), last);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    vst1_u16(to, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}

// ---- float16

static inline Floats load_halves(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
static inline void store_halves(uint16_t* to, Floats x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
static inline float half_to_float(uint16_t half) {
    __fp16 x;
    __builtin_memcpy(&x, &half, sizeof x);
    return x;
}
static inline uint16_t to_half(float x) {
    const __fp16 half = __fp16(x);
    uint16_t bits;
    __builtin_memcpy(&bits, &half, sizeof bits);
    return bits;
}

// ---- Products of integers

typedef int32_t Integers __attribute__((vector_size(sizeof(Floats))));

#define HAS_FOURS

// Without the instruction: of one product, and of two, the sums fit in 16 bits, since no number is -128.
static inline __attribute__((always_inline)) Integers add_fours(Integers sum, Integers x, Integers weight) {
#ifdef __ARM_FEATURE_DOTPROD
    return (Integers)vdotq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)weight);
#else
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)x), vget_low_s8((int8x16_t)weight));
    const int16x8_t high = vmull_high_s8((int8x16_t)x, (int8x16_t)weight);
    return (Integers)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
}

#ifdef __ARM_FEATURE_MATMUL_INT8

#define HAS_EIGHTS

static inline __attribute__((always_inline)) Integers add_eights(Integers sum, Integers x, Integers weight) {
    sum = (Integers)vmmlaq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)weight);
    asm("" : "+w"(sum));  // the next weights are not loaded before: they would take the registers of sums
    return sum;
}

static inline Integers join_eights(const void* first, const void* second) {
    return (Integers)vcombine_s8(vld1_s8(static_cast<const int8_t*>(first)), vld1_s8(static_cast<const int8_t*>(second)));
}
static inline Integers lower_words(Integers a, Integers b) { return (Integers)vzip1q_s32((int32x4_t)a, (int32x4_t)b); }
static inline Integers upper_words(Integers a, Integers b) { return (Integers)vzip2q_s32((int32x4_t)a, (int32x4_t)b); }
static inline Integers lower_halves(Integers a, Integers b) { return (Integers)vzip1q_s64((int64x2_t)a, (int64x2_t)b); }
static inline Integers upper_halves(Integers a, Integers b) { return (Integers)vzip2q_s64((int64x2_t)a, (int64x2_t)b); }

#endif
