// The steps before and after torch's product of int8 matrices: rows to int8 and scales, and sums to outputs. gemm.cpp and
// linear.cpp do all three at once, on processors that have their instructions. The same in torch is in layers/int8.py.

#include <algorithm>

#include "quantize.h"
#include "team.h"

namespace {

constexpr int64_t kWorthThreads = 16384;  // numbers; below, waking a thread costs more than it saves
constexpr int64_t kRun = 1024;            // outputs of a row that one thread finishes

template <typename T>
void quantize(const T* x, int64_t num_rows, int64_t width, int8_t* quantized, float* scales) {
    for_each(num_rows, num_rows * width > kWorthThreads, [&](int64_t row) {
        scales[row] = quantize_row(x + row * width, width, [&](int64_t piece, const int8_t* values, int64_t count) {
            std::memcpy(quantized + row * width + piece * kQuantizedPiece, values, count);
        });
    });
}

template <typename Out>
void finish(const int32_t* sums, const float* row_scales, const float* scales, const float* bias, int32_t activation,
            int64_t num_rows, int64_t num_outputs, Out* out) {
    const int64_t num_runs = (num_outputs + kRun - 1) / kRun;
    for_each(num_rows * num_runs, num_rows * num_outputs > kWorthThreads, [&](int64_t unit) {
        const int64_t row = unit / num_runs, run = unit % num_runs;
        const int64_t end = std::min(num_outputs, (run + 1) * kRun);
        with_activation(activation, [&](auto constant) {
            for (int64_t i = run * kRun; i < end; i += LANES) {
                const int64_t count = end - i;
                Floats x = load_first(sums + row * num_outputs + i, count) * load_first(scales + i, count);
                x = x * splat(row_scales[row]);
                if (bias) x = x + load_first(bias + i, count);
                store_first(out + row * num_outputs + i, activate<constant.value>(x), count);
            }
        });
    });
}

}  // namespace

// x [num_rows, width] -> quantized of the same shape and a scale for each row.
EXPORT void roseinfer_quantize_float32(const float* x, int64_t num_rows, int64_t width, int8_t* quantized,
                                       float* scales) {
    quantize(x, num_rows, width, quantized, scales);
}

EXPORT void roseinfer_quantize_bfloat16(const bfloat16* x, int64_t num_rows, int64_t width, int8_t* quantized,
                                        float* scales) {
    quantize(x, num_rows, width, quantized, scales);
}

// sums [num_rows, num_outputs] -> activation(sums * scales * row_scales + bias) in out; the bias may be null.
EXPORT void roseinfer_dequantize_to_float32(const int32_t* sums, const float* row_scales, const float* scales,
                                            const float* bias, int32_t activation, int64_t num_rows,
                                            int64_t num_outputs, float* out) {
    finish(sums, row_scales, scales, bias, activation, num_rows, num_outputs, out);
}

EXPORT void roseinfer_dequantize_to_bfloat16(const int32_t* sums, const float* row_scales, const float* scales,
                                             const float* bias, int32_t activation, int64_t num_rows,
                                             int64_t num_outputs, bfloat16* out) {
    finish(sums, row_scales, scales, bias, activation, num_rows, num_outputs, out);
}
