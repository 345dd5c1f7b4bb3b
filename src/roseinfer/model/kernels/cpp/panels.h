// How linear.cpp's packed weights lie: panels of kPanel outputs, one below the other; in a panel, for each word of inputs,
// those of its outputs.
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
