// Weights into int4, packed as panels.h tells: 32 inputs share a float16 scale and a zero, w is about scale * (q - zero), q
// from 0 to 15. The same in torch is `grouped_rows` of layers/int4.py, to the bit.
//
// Numbers that are a float16 times whole numbers of a range of 15 around 0, as those of GPTQ, AWQ and compressed-tensors
// are, stay what they are. For others candidates send the group's largest number to different q; the scale of each is the
// one with the least squared error for its numbers, rounded to float16, and the candidate with the least error after that
// is taken. Their zero is kMiddle.
//
// A register holds a number each of LANES groups of one row.

#include <algorithm>
#include <cmath>
#include <limits>

#include "activation.h"
#include "panels.h"

namespace {

constexpr int64_t kWorthThreads = 16384;  // numbers
constexpr float kMost = 15.0f;            // the largest q
constexpr float kSmallest = 0x1p-21f;     // a group below has a scale that float16 does not hold: zeros
constexpr float kPlaces[] = {-8.0f,  -7.75f, -8.25f, -7.5f, -8.5f, -7.25f, -8.75f,
                             -7.0f,  -9.0f,  -6.75f, -9.25f, -6.5f, -6.25f};  // of the largest in units of the scale
constexpr int kLook = 4;                  // numbers after which most of what is not exact has shown itself

using Mask = decltype(Floats{} < Floats{});  // of lanes

inline bool any(Mask mask) { return largest(mask ? splat(1.0f) : zeros()) > 0.0f; }

inline Floats as_half(Floats x) {
    uint16_t halves[LANES];
    store_halves(halves, x);
    return load_halves(halves);
}

// Groups side by side, and what is found for each: q is w * factor, rounded, and zero added.
struct Groups {
    Floats weights[kGroup];
    Floats largest, factor, scale, zero;
    Mask is_open;   // nothing is found yet
    Mask is_exact;
};

template <typename T>
void read(const T* from, const int32_t* order, int64_t count, Groups& groups) {
    alignas(64) float values[kGroup][LANES] = {};
    for (int64_t i = 0; i < count; ++i) values[i % kGroup][i / kGroup] = to_float(from[order ? order[i] : i]);
    std::memcpy(groups.weights, values, sizeof values);
    Floats poison = zeros();
    groups.largest = zeros();
    for (const Floats w : groups.weights) {
        groups.largest = magnitude(w) > magnitude(groups.largest) ? w : groups.largest;
        poison = poison + w * zeros();
    }
    groups.factor = zeros();
    groups.scale = poison == zeros() ? zeros() : splat(std::numeric_limits<float>::quiet_NaN());
    groups.zero = splat(float(kMiddle));
    groups.is_exact = poison == zeros() && groups.largest == zeros();
    groups.is_open = poison == zeros() && groups.largest != zeros();
}

// Takes the groups that are a float16 times whole numbers, of which the largest is `place`.
void take_exact(float place, Groups& groups) {
    const Floats size = magnitude(groups.largest), scale = divide(size, splat(place)), factor = divide(splat(place), size);
    Mask fits = groups.is_open && as_half(scale) == scale && scale * splat(place) == size;
    Floats least = zeros(), most = zeros();
    for (int i = 0; i < kGroup; ++i) {
        if ((i == 0 || i == kLook) && !any(fits)) return;
        const Floats q = round(groups.weights[i] * factor);
        fits = fits && q * scale == groups.weights[i];
        least = q < least ? q : least;
        most = q > most ? q : most;
    }
    fits = fits && most - least <= splat(kMost);
    const Floats middle = splat(float(kMiddle)), most_above = splat(kMost) - middle;
    const Mask is_turned = most == most_above + splat(1.0f) && least > -middle;  // a negative scale will do
    const Floats zero = is_turned ? middle : least < -middle ? -least : most > most_above ? splat(kMost) - most : middle;
    groups.zero = fits ? zero : groups.zero;
    groups.factor = fits ? (is_turned ? -factor : factor) : groups.factor;
    groups.scale = fits ? (is_turned ? -scale : scale) : groups.scale;
    groups.is_exact = groups.is_exact || fits;
    groups.is_open = groups.is_open && !fits;
}

// Searches for the scales of the groups that are open, whose error begins at infinity.
void search(float place, Groups& groups, Floats& error) {
    const Floats factor = divide(splat(place), groups.largest), least = splat(-kMiddle), most = splat(kMost - kMiddle);
    Floats numbers[kGroup], products = zeros(), squares = zeros(), sum = zeros();
    for (int i = 0; i < kGroup; ++i) {
        Floats q = groups.weights[i] * factor;
        q = q < least ? least : q;
        q = round(q > most ? most : q);
        numbers[i] = q;
        products = products + groups.weights[i] * q;
        squares = squares + q * q;
    }
    const Floats scale = as_half(divide(products, squares));
    for (int i = 0; i < kGroup; ++i) {
        const Floats off = groups.weights[i] - numbers[i] * scale;
        sum = sum + off * off;
    }
    const Mask is_better = groups.is_open && sum < error;
    error = is_better ? sum : error;
    groups.factor = is_better ? factor : groups.factor;
    groups.scale = is_better ? scale : groups.scale;
}

void quantize(Groups& groups) {
    for (float place = 1.0f; place <= kMost && any(groups.is_open); ++place) take_exact(place, groups);
    groups.is_open = groups.is_open && magnitude(groups.largest) >= splat(kSmallest);
    if (!any(groups.is_open)) return;
    Floats error = splat(std::numeric_limits<float>::infinity());
    for (const float place : kPlaces) search(place, groups, error);
    const Mask is_beyond = groups.is_open && error == splat(std::numeric_limits<float>::infinity());
    groups.scale = is_beyond ? splat(std::numeric_limits<float>::quiet_NaN()) : groups.scale;
}

// The packed weight, for the rows of one call.
struct Packed {
    uint8_t* words;
    uint16_t* scales;
    uint8_t* zeros;
};

struct Counts {
    int64_t exact = 0;
    int64_t moved = 0;  // zeros that are not kMiddle
};

// `count` groups of a row into their places, the first of which is `at` for words, scales and zeros.
Counts write(const Groups& groups, int64_t count, int64_t at, const Packed& to) {
    alignas(64) uint32_t words[kGroupWords][LANES];
    for (int word = 0; word < kGroupWords; ++word) {
        Integers both = {};
        for (int i = 0; i < 8; ++i) {
            Floats q = round(groups.weights[word * 8 + i] * groups.factor) + groups.zero;
            q = q > zeros() ? q : zeros();
            q = q < splat(kMost) ? q : splat(kMost);
            both |= __builtin_convertvector(q, Integers) << (8 * (i % 4) + i / 4 * 4);
        }
        std::memcpy(words[word], &both, sizeof both);
    }
    uint16_t scales[LANES];
    store_halves(scales, groups.scale);
    Counts counts;
    for (int64_t lane = 0; lane < count; ++lane, at += kPanel) {
        const int64_t first = at / kPanel * kGroupWords * kPanel + at % kPanel;
        for (int64_t word = 0; word < kGroupWords; ++word) {
            std::memcpy(to.words + (first + word * kPanel) * 4, &words[word][lane], 4);
        }
        to.scales[at] = scales[lane];
        to.zeros[at] = uint8_t(groups.zero[lane]);
        counts.exact += groups.is_exact[lane] ? 1 : 0;
        counts.moved += groups.zero[lane] != kMiddle ? 1 : 0;
    }
    return counts;
}

template <typename T>
void pack(const T* weight, const int32_t* order, int64_t num_rows, int64_t width, const Packed& to, int64_t* counts) {
    const int64_t num_groups = (width + kGroup - 1) / kGroup;
    int64_t exact = 0, moved = 0;
#pragma omp parallel for if (num_rows * width > kWorthThreads) reduction(+ : exact, moved)
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t group = 0; group < num_groups; group += LANES) {
            const int64_t first = group * kGroup, count = std::min<int64_t>(LANES, num_groups - group);
            const T* from = weight + row * width;
            Groups groups;
            read(order ? from : from + first, order ? order + first : nullptr, std::min(count * kGroup, width - first),
                 groups);
            quantize(groups);
            const Counts found = write(groups, count, (row / kPanel * num_groups + group) * kPanel + row % kPanel, to);
            exact += found.exact, moved += found.moved;
        }
    }
    counts[0] = exact, counts[1] = moved;
}

}  // namespace

// weight [num_rows, width] -> packed words, scales and zeros, of room for ceil(num_rows / kPanel) * kPanel rows; and how
// many groups are exact, and how many zeros are not kMiddle. With `order` the inputs lie in that order.
EXPORT void roseinfer_linear_pack_int4_of_float32(const float* weight, const int32_t* order, int64_t num_rows,
                                                  int64_t width, uint8_t* words, uint16_t* scales, uint8_t* zeros,
                                                  int64_t* counts) {
    pack(weight, order, num_rows, width, {words, scales, zeros}, counts);
}

EXPORT void roseinfer_linear_pack_int4_of_bfloat16(const bfloat16* weight, const int32_t* order, int64_t num_rows,
                                                   int64_t width, uint8_t* words, uint16_t* scales, uint8_t* zeros,
                                                   int64_t* counts) {
    pack(weight, order, num_rows, width, {words, scales, zeros}, counts);
}
