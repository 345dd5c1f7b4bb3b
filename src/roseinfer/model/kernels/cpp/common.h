// Included by every kernel: the export of a function, and the types of numbers.

#pragma once

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

// bfloat16: the upper half of a float32.
using bfloat16 = uint16_t;

// Has a line of memory brought to the nearest cache, or to the second.
static inline void prefetch_to_level1(const void* line) { __builtin_prefetch(line, 0, 3); }
static inline void prefetch_to_level2(const void* line) { __builtin_prefetch(line, 0, 2); }

// For one reading: on x86 the line passes the larger caches by, and leaves there what it would have pushed out.
static inline void prefetch_once(const void* line) {
#if defined(__x86_64__)
    __builtin_prefetch(line, 0, 0);
#else
    prefetch_to_level2(line);
#endif
}

static inline float to_float(float value) { return value; }

static inline float to_float(int8_t value) { return float(value); }

static inline float to_float(bfloat16 value) {
    const uint32_t bits = uint32_t(value) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
static inline bfloat16 to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return bfloat16((bits >> 16) | 0x40);
    return bfloat16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
