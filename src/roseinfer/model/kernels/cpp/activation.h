// Before and after a product: numbers of other types to registers of float32 and back, and activations.

#pragma once

#include <type_traits>

#include "common.h"
#include "simd.h"

template <typename T>
struct alignas(alignof(T)) Several {
    T values[LANES];
};

// The names of `ACTIVATIONS` in layers/activation.py, in its order.
enum Activation : int32_t { kNone, kGelu, kGeluTanh, kSilu };

static inline Floats load(const bfloat16* from) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));
    typedef uint32_t Wide __attribute__((vector_size(LANES * sizeof(uint32_t))));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Wide) << 16);
}

static inline Floats load(const int32_t* from) {
    typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
    Integers integers;
    std::memcpy(&integers, from, sizeof integers);
    return (Floats)__builtin_convertvector(integers, Floats);
}

static inline void store(bfloat16* to, Floats x) { store_bfloat16(to, x); }

// The first `count` of LANES numbers; the others are 0.
template <typename T>
static inline Floats load_first(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    Several<T> padded = {};
    std::memcpy(padded.values, from, count * sizeof(T));
    return load(padded.values);
}

template <typename T>
static inline void store_first(T* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    Several<T> all;
    store(all.values, x);
    std::memcpy(to, all.values, count * sizeof(T));
}

static inline Floats magnitude(Floats x) { return maximum(-x, x); }

// 1 / (1 + e^-x), from e^-|x|, which cannot overflow.
static inline Floats sigmoid(Floats x) {
    const Floats power = exponential(-magnitude(x));
    const Floats share = reciprocal(splat(1.0f) + power);
    return x < zeros() ? power * share : share;
}

// To an absolute 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
static inline Floats error_function(Floats x) {
    const Floats size = magnitude(x);
    const Floats t = reciprocal(splat(1.0f) + splat(0.3275911f) * size);
    Floats p = splat(1.061405429f);
    p = multiply_add(p, t, splat(-1.453152027f));
    p = multiply_add(p, t, splat(1.421413741f));
    p = multiply_add(p, t, splat(-0.284496736f));
    p = multiply_add(p, t, splat(0.254829592f));
    const Floats y = splat(1.0f) - p * t * exponential(-size * size);
    return x < zeros() ? -y : y;
}

template <Activation activation>
static inline Floats activate(Floats x) {
    if constexpr (activation == kGelu) {
        return splat(0.5f) * x * (splat(1.0f) + error_function(x * splat(0.70710678f)));
    } else if constexpr (activation == kGeluTanh) {  // (1 + tanh z) / 2 is sigmoid(2 z)
        return x * sigmoid(splat(1.59576912f) * (x + splat(0.044715f) * x * x * x));
    } else if constexpr (activation == kSilu) {
        return x * sigmoid(x);
    } else {
        return x;
    }
}

// Calls `finish` with the number of the activation as a constant, so that loops inside it do not test it again.
template <typename Finish>
static inline void with_activation(int32_t activation, const Finish& finish) {
    switch (activation) {
        case kGelu:
            return finish(std::integral_constant<Activation, kGelu>());
        case kGeluTanh:
            return finish(std::integral_constant<Activation, kGeluTanh>());
        case kSilu:
            return finish(std::integral_constant<Activation, kSilu>());
        default:
            return finish(std::integral_constant<Activation, kNone>());
    }
}
