// Adds to rows of the residual stream, and norms the sums. The same in torch is in layers/norm.py.
//
// A row is one thread's work and is summed in one order, so its bits do not depend on other rows.

#include <cmath>

#include "activation.h"
#include "team.h"

namespace {

constexpr int64_t kWorthThreads = 16384;  // numbers; below, waking a thread costs more than it saves

// A norm: _Descriptor of layers/norm.py.
struct Norm {
    const float* weight;  // [width]
    const float* bias;    // [width], or null: then the norm has no mean either, and is RMSNorm
    int64_t width;
    float epsilon;
    int32_t is_output_float32;  // else bfloat16
};

// x += delta; out = (x - mean) * weight / sqrt(var + epsilon) + bias, or without mean and bias. Ba, Kiros and Hinton
// 2016; Zhang and Sennrich 2019. The row is read from memory once: after the first pass it is in the nearest cache.
template <bool is_centered, typename Delta, typename Out>
void norm_row(const Norm& norm, float* x, const Delta* delta, Out* out) {
    const int64_t width = norm.width;
    Floats sum = zeros();
    for (int64_t i = 0; i < width; i += LANES) {
        Floats value = load_first(x + i, width - i);
        if (delta) {
            value = value + load_first(delta + i, width - i);
            store_first(x + i, value, width - i);
        }
        sum = sum + value;
    }
    const float mean = is_centered ? total(sum) / float(width) : 0.0f;
    Floats squares = zeros();
    for (int64_t i = 0; i < width; i += LANES) {
        Floats value = load_first(x + i, width - i) - splat(mean);
        if (width - i < LANES) value = within(0, int(width - i), value, zeros());
        squares = multiply_add(value, value, squares);
    }
    const Floats scale = splat(1.0f / std::sqrt(total(squares) / float(width) + norm.epsilon));
    for (int64_t i = 0; i < width; i += LANES) {
        Floats value = (load_first(x + i, width - i) - splat(mean)) * scale * load_first(norm.weight + i, width - i);
        if constexpr (is_centered) value = value + load_first(norm.bias + i, width - i);
        store_first(out + i, value, width - i);
    }
}

template <bool is_centered, typename Delta, typename Out>
void norm_rows(const Norm& norm, float* x, const Delta* delta, int64_t num_rows, Out* out) {
    const int64_t width = norm.width;
    for_each(num_rows, num_rows * width > kWorthThreads, [&](int64_t row) {
        const Delta* of_row = delta ? delta + row * width : nullptr;
        norm_row<is_centered>(norm, x + row * width, of_row, out + row * width);
    });
}

template <typename Delta, typename Out>
void run(const Norm& norm, float* x, const Delta* delta, int64_t num_rows, Out* out) {
    if (norm.bias) {
        norm_rows<true>(norm, x, delta, num_rows, out);
    } else {
        norm_rows<false>(norm, x, delta, num_rows, out);
    }
}

template <typename Delta>
void run(const Norm& norm, float* x, const Delta* delta, int64_t num_rows, void* out) {
    if (norm.is_output_float32) {
        run(norm, x, delta, num_rows, static_cast<float*>(out));
    } else {
        run(norm, x, delta, num_rows, static_cast<bfloat16*>(out));
    }
}

}  // namespace

// x [num_rows, width] and, unless null, delta of the same shape, float32 or bfloat16, into x + delta in place of x and
// the norm of that in out.
EXPORT void roseinfer_add_norm(const Norm* norm, float* x, const void* delta, int32_t is_delta_float32,
                               int64_t num_rows, void* out) {
    if (is_delta_float32) {
        run(*norm, x, static_cast<const float*>(delta), num_rows, out);
    } else {
        run(*norm, x, static_cast<const bfloat16*>(delta), num_rows, out);
    }
}
