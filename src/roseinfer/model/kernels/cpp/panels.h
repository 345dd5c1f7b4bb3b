// A linear layer of linear.cpp and how its packed weight lies: panels of kPanel outputs, one below the other; in a panel,
// for each word of inputs, those of its outputs.
//
// A word of int4 has eight inputs, which are numbers from 0 to 15: in the low halves of its bytes four and in the high
// halves the next four. Four words are a group, whose outputs have a float16 scale and a zero each, as [panel][group]
// [kPanel]: a weight is (number - zero) * scale. Without an array of zeros all are kMiddle.

#pragma once

#include "simd.h"

constexpr int kVectors = 3;                   // registers of outputs side by side
constexpr int64_t kPanel = kVectors * LANES;  // layers/packed_linear.py rounds up to 48

constexpr int64_t kGroup = 32;      // inputs of int4 with one scale
constexpr int64_t kGroupWords = 4;  // of the weight
constexpr int kMiddle = 8;

constexpr int64_t kWorthThreads = 1 << 16;  // words to multiply; below, waking a thread costs more than it saves

// A linear layer: RegisterDescriptor of layers/packed_linear.py. A word is the float32 that has its bits.
struct Linear {
    const float* weight;     // packed words
    const void* scales;      // float32 [num_outputs] of an int8 weight; float16 [panel][group][kPanel] of int4
    const int32_t* surplus;  // [num_outputs], of its sums
    const uint8_t* zeros;    // of int4, or null
    const int32_t* order;    // [num_inputs] of int4: which inputs lie one after the other, or null
    const float* bias;       // [num_outputs], or null
    int64_t num_outputs;
    int64_t num_inputs;
    int64_t num_words;  // of a row
    int32_t activation;
    int32_t is_output_float32;  // else of the type of x
};
