// Weights into int4: 32 inputs share a float16 scale, w is about scale * q, q from -8 to 7. The same in torch is
// `grouped_rows` of layers/int4.py, to the bit.
//
// Candidates send the group's largest number m to another q each; the scale of each is the one with the least squared
// error for its numbers, rounded to float16, and the candidate with the least error after that is taken. Numbers that
// are a float16 times whole numbers from -8 to 7, as those of GPTQ, AWQ and compressed-tensors are, stay what they are.

#include <cmath>
#include <limits>

#include "activation.h"
#include "dot.h"

namespace {

constexpr int64_t kGroup = 32;
constexpr int64_t kWorthThreads = 16384;      // numbers
constexpr float kSmallest = 0x1p-21f;         // a group below has a scale that float16 does not hold: zeros
constexpr float kPlaces[] = {-8.0f,  -7.75f, -8.25f, -7.5f, -8.5f, -7.25f, -8.75f,
                             -7.0f,  -9.0f,  -6.75f, -9.25f, -6.5f, -6.25f};  // of m in units of the scale
constexpr float kWholePlaces[] = {8, 7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1};  // tried where m / place is a float16

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightIntegers __attribute__((vector_size(32)));

inline float total(Eight x) {
    const float four[] = {x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7]};
    return (four[0] + four[2]) + (four[1] + four[3]);
}

struct Fit {
    Eight numbers[4];
    float error;
    uint16_t scale;
};

inline Fit fit(const Eight (&weights)[4], float factor) {
    constexpr float kRounds = 12582912.0f;  // adding it leaves no room for a fraction: rounds to nearest, ties to even
    const Eight least = Eight{} - 8.0f, most = Eight{} + 7.0f;
    Fit found;
    Eight products = {}, squares = {}, errors = {};
    for (int i = 0; i < 4; ++i) {
        Eight q = weights[i] * factor;
        q = q < least ? least : q;
        q = q > most ? most : q;
        q = (q + kRounds) - kRounds;
        found.numbers[i] = q;
        products = products + weights[i] * q;
        squares = squares + q * q;
    }
    found.scale = to_half(total(products) / total(squares));
    const float scale = half_to_float(found.scale);
    for (int i = 0; i < 4; ++i) {
        const Eight error = weights[i] - found.numbers[i] * scale;
        errors = errors + error * error;
    }
    found.error = total(errors);
    return found;
}

// One group. Returns whether its numbers are exactly those it was given.
template <typename T>
bool quantize_group(const T* from, int64_t count, int8_t* numbers, uint16_t* scale) {
    alignas(32) float values[kGroup] = {};
    float largest = 0.0f, poison = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        values[i] = to_float(from[i]);
        poison += values[i] * 0.0f;
        if (std::fabs(values[i]) > std::fabs(largest)) largest = values[i];
    }
    for (int64_t i = 0; i < count; ++i) numbers[i] = 0;
    *scale = poison == 0.0f ? 0 : 0x7e00;  // NaN
    if (poison != 0.0f || std::fabs(largest) < kSmallest) return poison == 0.0f && largest == 0.0f;
    Eight weights[4];
    std::memcpy(weights, values, sizeof weights);
    Fit best;
    best.error = std::numeric_limits<float>::infinity();
    const auto take = [&](float place) {
        const Fit found = fit(weights, place / largest);
        if (found.error < best.error) best = found;
    };
    for (const float place : kPlaces) take(place);
    for (const float place : kWholePlaces) {
        if (best.error > 0.0f && half_to_float(to_half(largest / place)) * place == largest) take(place);
    }
    if (!(best.error < std::numeric_limits<float>::infinity())) return *scale = 0x7e00, false;
    *scale = best.scale;
    for (int64_t i = 0; i < count; ++i) numbers[i] = int8_t(best.numbers[i / 8][i % 8]);
    return best.error == 0.0f;
}

template <typename T>
void quantize(const T* weight, int64_t num_rows, int64_t width, int8_t* numbers, uint16_t* scales, int64_t* num_exact) {
    const int64_t num_groups = (width + kGroup - 1) / kGroup;
    int64_t exact = 0;
#pragma omp parallel for if (num_rows * width > kWorthThreads) reduction(+ : exact)
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t first = row * width + group * kGroup, left = width - group * kGroup;
            exact += quantize_group(weight + first, left < kGroup ? left : kGroup, numbers + first,
                                    scales + row * num_groups + group);
        }
    }
    *num_exact = exact;
}

}  // namespace

// weight [num_rows, width] -> numbers of the same shape, scales [num_rows, groups], and how many groups are exact.
EXPORT void roseinfer_quantize_int4_float32(const float* weight, int64_t num_rows, int64_t width, int8_t* numbers,
                                            uint16_t* scales, int64_t* num_exact) {
    quantize(weight, num_rows, width, numbers, scales, num_exact);
}

EXPORT void roseinfer_quantize_int4_bfloat16(const bfloat16* weight, int64_t num_rows, int64_t width, int8_t* numbers,
                                             uint16_t* scales, int64_t* num_exact) {
    quantize(weight, num_rows, width, numbers, scales, num_exact);
}
