// y = activation(x W^T + b) in registers, the weight packed once: in float32, in bfloat16, in int8 with a scale for
// each row of x and of W, or in int4 with a scale for each row of x and each 32 inputs of a row of W; int4_tiles.h
// multiplies many rows by such a weight.
//
// Beside gemm.cpp because there are no tiles of float32, and processors that multiply the other types without tiles:
// here a product is a register's and not a tile's, rows are read where they lie, and for float32 AVX2 will do. What
// both do to a sum at the end is in activation.h.
//
// The factors are words of 4 bytes, each one input in float32, two in bfloat16 or four in int8. An output is one
// chain of multiply-adds over its words, in ascending order, from 0: a sum that has to wait in memory has the bits
// there that it has in its register. Rows do not mix. So an output's bits depend on its row of x and its row of W
// alone: not on the number of rows, on how they are cut into blocks, or on the threads, which share out panels and
// rows and never k.
//
// Packed weight: panels of kPanel outputs, one below the other; in a panel, for each word, those of its outputs.
// Outputs past the weight's edge, and inputs that fill up a row's last word, are 0.
//
// The instruction for int8 on x86 takes x unsigned, so 128 is added to x, and each sum is too large by 128 times the sum
// of its weights. Sums may wrap around on the way: subtracting this surplus wraps them back, and for up to 133,144 inputs
// the result fits. Other levels multiply pairs of 16 bits, or signed bytes, and have no surplus; the sums are the same.
//
// In int4 the integers of a group, of which panels.h tells, are summed exactly; the sum becomes a float, and its product
// with the scale is added to the output's, fused, in ascending order, from 0. Its zeros are taken away at the beginning: x
// has the sum of each group's numbers, times a zero that all have.

#include <algorithm>

#include "activation.h"
#include "buffer.h"
#include "common.h"
#include "dot.h"
#ifdef __AMX_INT8__
#include "int4_tiles.h"
#endif
#include "panels.h"
#include "quantize.h"
#include "row_pairs.h"
#include "team.h"

// On x86 without its instruction torch has the faster product of bfloat16; on Arm nobody has one that keeps rows exact.
#if defined(HAS_BFLOAT16_PRODUCTS) || defined(__ARM_NEON)
#define HAS_BFLOAT16_LINEARS
#endif

namespace {

constexpr int64_t kLineWords = 16;  // a cache line

constexpr int kBlockRows = REGISTERS / 4;     // 8 rows of 3 sums, 3 weights and a number of x fill 28 of AVX-512's 32
                                              // registers; 4 rows AVX2's 16
constexpr int64_t kChunk = 768;               // words of a panel, at most, that rows pass before the next one does:
                                              // 144 KiB in the second cache, and as much on its way there
constexpr int64_t kNear = 2048;               // words ahead of its own that a single block prefetches: 8 KiB
constexpr int64_t kMaxRows = 128;             // whose share of a chunk, 384 KiB, stays in the second cache too; it
constexpr int64_t kMaxPanels = 8;             // serves so many panels, at most, before the next chunk has its turn,
constexpr int64_t kMaxSums = 128 * 192;       // with so many sums, 96 KiB, that wait for it
constexpr int64_t kWorthQuantizing = 16384;   // numbers; below, waking a thread costs more than it saves

constexpr int64_t kReadOnce = 512 << 10;      // bytes; a model has some dozens of such weights and a head, so that a last
                                              // cache of 32 MiB holds none of them until the next step

// Whether prefetches for one reading come in time. On an Intel Xeon they doubled the time of one row (docs/log.md,
// 2026-11-27): there the line goes to the nearest cache alone.
#if defined(__x86_64__)
const bool kReadsOnce = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
// Whether one row of int4 is faster without prefetches: on Zen 4 (docs/log.md, 2026-11-28).
const bool kReadsAhead = (__builtin_cpu_init(), __builtin_cpu_is("amdfam19h"));
#else
const bool kReadsOnce = true, kReadsAhead = false;
#endif

struct Int4 {
    uint8_t numbers;  // two of them
};
constexpr int64_t kGroupRowWords = 1 + kGroup / 4;  // of x, the first of which sums begin with

// A block of rows times a chunk of a panel.
struct Block {
    const float* x;
    int64_t row_step;
    const float* weight;
    const uint16_t* scales;  // of int4
    const uint8_t* zeros;
    int64_t num_words;
    bool is_first;        // chunk of the panel: sums begin at 0
    bool is_last;         // outputs come next
    float* sums;          // [row][kPanel]
    const float* ahead;  // the words to prefetch, those of one step every so many:
    int64_t every;
    bool is_read_once;  // the weight, until the next step: no other block reads it, and no cache would keep it
};

// The type of sums in registers. Of int8 they are integers there: GCC 12 keeps a second copy of each sum in
// memory where its type changes at every product.
template <typename T>
struct OfWords {
    using Sums = Floats;
};
template <>
struct OfWords<int8_t> {
    using Sums = Integers;
};
template <typename T>
using Sums = typename OfWords<T>::Sums;

template <typename T>
constexpr bool kIsInt8 = std::is_same_v<T, int8_t>;
template <typename T>
constexpr bool kIsInt4 = std::is_same_v<T, Int4>;

// Words of x for words of the weight: int8 without an instruction for four products takes two, of 16 bits.
template <typename T>
constexpr int64_t kRowWords = kIsInt8<T> && !kHasFours ? 2 : 1;
template <typename T>
constexpr int64_t row_words(int64_t num_words) {
    if constexpr (kIsInt4<T>) return num_words / kGroupWords * kGroupRowWords;
#ifdef HAS_EIGHTS
    if constexpr (kIsInt8<T>) return (num_words + 1) / 2 * 2;
#endif
    return num_words * kRowWords<T>;
}

// Rows at once. In int4 each output has a sum of its group and one of all groups; in int8 without an instruction for
// four products, products have registers too.
template <typename T>
constexpr int kRowsAtOnce = REGISTERS == 16 && (kIsInt4<T> || (kIsInt8<T> && !kHasFours)) ? 3
                            : kIsInt4<T>                                                  ? 4
                                                                                          : kBlockRows;

// sum + x * weight, in each lane: of a word's one product, its two or its four.
template <typename T>
inline __attribute__((always_inline)) Sums<T> add_product(Sums<T> sum, Floats x, Floats weight) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return multiply_add(x, weight, sum);
    } else if constexpr (kIsInt8<T>) {
        return add_fours(sum, (Integers)x, (Integers)weight);
#ifdef HAS_BFLOAT16_LINEARS
    } else if constexpr (sizeof(T) == 2) {
        return add_bfloat16_pairs(sum, (Words)x, (Words)weight);
#endif
    } else {
        static_assert(sizeof(T) == 0, "this level has no product of such words");
    }
}

template <typename T, int num_rows>
inline __attribute__((always_inline)) void multiply_word(const float* x, int64_t row_step, const float* weight,
                                                         Sums<T> (&sums)[num_rows][kVectors]) {
    if constexpr (kRowWords<T> == 2) {
        for (int i = 0; i < kVectors; ++i) {
            const Sums<T> bytes = (Sums<T>)load(weight + i * LANES), even = even_bytes(bytes), odd = odd_bytes(bytes);
            for (int row = 0; row < num_rows; ++row) {
                const Sums<T> sum = add_pairs(sums[row][i], (Sums<T>)splat(x[row * row_step]), even);
                sums[row][i] = add_pairs(sum, (Sums<T>)splat(x[row * row_step + 1]), odd);
            }
        }
    } else {
        Floats weights[kVectors];
        for (int i = 0; i < kVectors; ++i) weights[i] = load(weight + i * LANES);
        for (int row = 0; row < num_rows; ++row) {
            const Floats value = splat(x[row * row_step]);
            for (int i = 0; i < kVectors; ++i) sums[row][i] = add_product<T>(sums[row][i], value, weights[i]);
        }
    }
}

// Prefetches words of the weight while a block goes through others.
class Ahead {
public:
    explicit Ahead(const Block& block) : next_(block.ahead), every_(block.every), is_once_(block.is_read_once) {}

    inline __attribute__((always_inline)) void step(int64_t num_words) {
        if (--wait_ > 0) return;
        if (is_once_) {
            for (int64_t i = 0; i < num_words * kPanel; i += kLineWords) prefetch_once(next_ + i);
        } else {
            for (int64_t i = 0; i < num_words * kPanel; i += kLineWords) prefetch_to_level2(next_ + i);
        }
        next_ += num_words * kPanel;
        wait_ = every_;
    }

private:
    const float* next_;
    int64_t every_, wait_ = 1;
    bool is_once_;
};

// Not inlined, so that the general registers are enough for the rows' addresses.
template <typename T, int num_rows>
__attribute__((noinline)) void multiply_rows(const Block& block) {
    Sums<T> sums[num_rows][kVectors];
    for (int row = 0; row < num_rows; ++row) {
        for (int i = 0; i < kVectors; ++i) {
            sums[row][i] = (Sums<T>)(block.is_first ? zeros() : load(block.sums + row * kPanel + i * LANES));
        }
    }
    const float *x = block.x, *weight = block.weight;
    const int64_t row_step = block.row_step;
    Ahead ahead(block);
#pragma GCC unroll 2
    for (int64_t word = 0; word < block.num_words; ++word, x += kRowWords<T>, weight += kPanel) {
        ahead.step(1);
        multiply_word<T>(x, row_step, weight, sums);
    }
    for (int row = 0; row < num_rows; ++row) {
        for (int i = 0; i < kVectors; ++i) store(block.sums + row * kPanel + i * LANES, (Floats)sums[row][i]);
    }
}

#ifdef HAS_EIGHTS

// The same for int8 with an instruction for eight products.
template <int num_rows>
__attribute__((noinline)) void multiply_row_pairs(const Block& block) {
    RowPairs<num_rows, kVectors> pairs;
    for (int i = 0; i < kVectors; ++i) {
        pairs.start(i, [&](int row) {
            return block.is_first ? Integers{} : (Integers)load(block.sums + row * kPanel + i * LANES);
        });
    }
    const float *x = block.x, *weight = block.weight;
    Ahead ahead(block);
    int64_t word = 0;
    for (; word + 2 <= block.num_words; word += 2, x += 2, weight += 2 * kPanel) {
        ahead.step(2);
        for (int i = 0; i < kVectors; ++i) {
            const float* words = weight + i * LANES;
            pairs.add(i, x, block.row_step, (Integers)load(words), (Integers)load(words + kPanel));
        }
    }
    if (word < block.num_words) {
        for (int i = 0; i < kVectors; ++i) {
            pairs.add(i, x, block.row_step, (Integers)load(weight + i * LANES), Integers{});
        }
    }
    for (int row = 0; row < num_rows; ++row) {
        for (int i = 0; i < kVectors; ++i) store(block.sums + row * kPanel + i * LANES, (Floats)pairs.row(i, row));
    }
}

// sums + the groups of rows times those of the weight.
template <int num_rows, bool has_zeros>
inline __attribute__((always_inline)) void multiply_group(const float* x, int64_t row_step, const float* weight,
                                                          const uint16_t* scales, const uint8_t* zeros,
                                                          Floats (&sums)[num_rows][kVectors]) {
    RowPairs<num_rows, kVectors> of_group;
    for (int i = 0; i < kVectors; ++i) {
        of_group.start(i, [&](int row) {
            const Integers first = (Integers)splat(x[row * row_step]);
            return has_zeros ? times_zeros(first, load_zeros(zeros + i * LANES)) : first;
        });
    }
#pragma GCC unroll 4
    for (int word = 0; word < kGroupWords; ++word) {
        for (int i = 0; i < kVectors; ++i) {
            const Integers words = (Integers)load(weight + word * kPanel + i * LANES);
            of_group.add(i, x + 1 + 2 * word, row_step, low_nibbles(words), high_nibbles(words));
        }
    }
    each<kVectors>([&](auto i) __attribute__((always_inline)) {
        const Floats scale = load_halves(scales + i * LANES);
        each<num_rows>([&](auto row) __attribute__((always_inline)) {
            sums[row][i] = multiply_add(total_of_group(of_group.row(i, row)), scale, sums[row][i]);
        });
    });
}

#else

// sums + the groups of rows times those of the weight.
template <int num_rows, bool has_zeros>
inline __attribute__((always_inline)) void multiply_group(const float* x, int64_t row_step, const float* weight,
                                                          const uint16_t* scales, const uint8_t* zeros,
                                                          Floats (&sums)[num_rows][kVectors]) {
    Integers of_group[num_rows][kVectors];
    for (int row = 0; row < num_rows; ++row) {
        const Integers first = (Integers)splat(x[row * row_step]);
        for (int i = 0; i < kVectors; ++i) {
            of_group[row][i] = has_zeros ? times_zeros(first, load_zeros(zeros + i * LANES)) : first;
        }
    }
#pragma GCC unroll 8
    for (int half = 0; half < 2 * kGroupWords; ++half) {
        Integers values[num_rows];
        for (int row = 0; row < num_rows; ++row) values[row] = (Integers)splat(x[row * row_step + 1 + half]);
        asm("" : "+r"(weight));  // else the words stay in registers for their other halves, which sums need
        for (int i = 0; i < kVectors; ++i) {
            const Integers words = (Integers)load(weight + half / 2 * kPanel + i * LANES);
            const Integers weights = half % 2 ? high_nibbles(words) : low_nibbles(words);
            for (int row = 0; row < num_rows; ++row) {
                of_group[row][i] = add_nibbles(of_group[row][i], weights, values[row]);
            }
        }
    }
    each<kVectors>([&](auto i) __attribute__((always_inline)) {
        const Floats scale = load_halves(scales + i * LANES);
        each<num_rows>([&](auto row) __attribute__((always_inline)) {
            sums[row][i] = multiply_add(total_of_group(of_group[row][i]), scale, sums[row][i]);
        });
    });
}

#endif

template <int num_rows, bool has_zeros>
__attribute__((noinline)) void multiply_groups(const Block& block) {
    Floats sums[num_rows][kVectors];
    each<num_rows>([&](auto row) __attribute__((always_inline)) {
        each<kVectors>([&](auto i) __attribute__((always_inline)) {
            sums[row][i] = block.is_first ? Floats{} : load(block.sums + row * kPanel + i * LANES);
        });
    });
    const float *x = block.x, *weight = block.weight;
    const uint16_t* scales = block.scales;
    const uint8_t* zeros = block.zeros;
    const int64_t row_step = block.row_step;
    Ahead ahead(block);
    for (int64_t word = 0; word < block.num_words; word += kGroupWords) {
        ahead.step(kGroupWords);
        multiply_group<num_rows, has_zeros>(x, row_step, weight, scales, zeros, sums);
        x += kGroupRowWords, weight += kGroupWords * kPanel, scales += kPanel;
        if constexpr (has_zeros) zeros += kPanel;
    }
    each<num_rows>([&](auto row) __attribute__((always_inline)) {
        each<kVectors>([&](auto i) __attribute__((always_inline)) {
            store(block.sums + row * kPanel + i * LANES, sums[row][i]);
        });
    });
}

template <typename T, int at_most = kRowsAtOnce<T>>
void multiply_block(int64_t num_rows, const Block& block) {
    if constexpr (at_most > 1) {
        if (num_rows < at_most) return multiply_block<T, at_most - 1>(num_rows, block);
    }
    if constexpr (kIsInt4<T>) {
        return block.zeros ? multiply_groups<at_most, true>(block) : multiply_groups<at_most, false>(block);
#ifdef HAS_EIGHTS
    } else if constexpr (kIsInt8<T>) {
        multiply_row_pairs<at_most>(block);
#endif
    } else {
        multiply_rows<T, at_most>(block);
    }
}

// The integers whose bits are in `sums`, less the surplus.
inline Floats without_surplus(Floats sums, const int32_t* surplus) {
    typedef uint32_t Wrapping __attribute__((vector_size(sizeof(Floats))));  // signed ones must not
    Wrapping less;
    std::memcpy(&less, surplus, sizeof less);
    return (Floats)__builtin_convertvector((Integers)((Wrapping)sums - less), Floats);
}

// Sums of rows into outputs: scale, add the bias, activate. `scales` are those of int8 rows.
template <typename T, typename Out>
void finish_rows(const Linear& linear, const float* sums, const float* scales, int64_t num_rows, int64_t column,
                 Out* out) {
    const int64_t count = std::min(kPanel, linear.num_outputs - column);
    alignas(64) float bias[kPanel] = {};
    alignas(64) float column_scales[kPanel] = {};
    alignas(64) int32_t surplus[kPanel] = {};
    if (linear.bias) std::memcpy(bias, linear.bias + column, count * sizeof(float));
    if constexpr (kIsInt8<T>) {
        std::memcpy(column_scales, static_cast<const float*>(linear.scales) + column, count * sizeof(float));
        if constexpr (kRowsAreUnsigned) std::memcpy(surplus, linear.surplus + column, count * sizeof(int32_t));
    }
    with_activation(linear.activation, [&](auto activation) {
        for (int64_t row = 0; row < num_rows; ++row) {
            Out* to = out + row * linear.num_outputs + column;
            for (int64_t at = 0; at < count; at += LANES) {
                Floats x = load(sums + row * kPanel + at);
                if constexpr (kIsInt4<T>) x = x * splat(scales[row]);
                if constexpr (kIsInt8<T>) {
                    x = without_surplus(x, surplus + at) * load(column_scales + at) * splat(scales[row]);
                }
                store_first(to + at, activate<activation.value>(add(x, load(bias + at))), count - at);
            }
        }
    });
}

// Prefetches the lines that the sums of a panel will be written to.
template <typename Out>
void ask_for_outputs(const Out* out, int64_t row_step, int64_t num_rows) {
    constexpr int64_t kLine = kLineWords * sizeof(float) / sizeof(Out);
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t at = 0; at < kPanel; at += kLine) prefetch_to_level1(out + row * row_step + at);
        prefetch_to_level1(out + row * row_step + kPanel - 1);
    }
}

// Prefetches what makes outputs of the integer sums of a panel, which are read once in a step, as its words are.
inline void ask_for_scales(const Linear& linear, int64_t column) {
    for (int64_t at = column; at < column + kPanel; at += kLineWords) {
        prefetch_to_level1(static_cast<const float*>(linear.scales) + at);
        if (kRowsAreUnsigned) prefetch_to_level1(linear.surplus + at);
    }
}

// Rows times a chunk of one panel. `all` is the first of the blocks. Several share out the words that it has to prefetch;
// a single one, which memory keeps waiting, prefetches what comes a little later in its own.
template <typename T, typename Out>
void multiply_chunk(const Linear& linear, const Block& all, int64_t num_rows, const Out* out) {
    const int64_t num_blocks = (num_rows + kRowsAtOnce<T> - 1) / kRowsAtOnce<T>;
    const int64_t step = kIsInt4<T> ? kGroupWords : 1, num_steps = all.num_words / step;
    Block block = all;
    block.every = num_blocks;
    for (int64_t index = 0; index < num_blocks; ++index) {
        const int64_t row = num_rows * index / num_blocks, end = num_rows * (index + 1) / num_blocks;
        block.x = all.x + row * block.row_step;
        block.sums = all.sums + row * kPanel;
        block.is_read_once = num_blocks == 1 && all.is_read_once;
        block.ahead = num_blocks == 1 ? all.weight + kNear : all.ahead + num_steps * index / num_blocks * step * kPanel;
        if (kReadsAhead && kIsInt4<T> && num_rows == 1) block.every = block.num_words + 1;  // never, but for the first
        if (block.is_last) ask_for_outputs(out + row * linear.num_outputs, linear.num_outputs, end - row);
        multiply_block<T>(end - row, block);
    }
}

// All words of some rows times a few panels, into their outputs.
template <typename T, typename Out>
void multiply_panels(const Linear& linear, const float* x, const float* scales, int64_t num_rows, int64_t panel,
                     int64_t num_panels, float* sums, Out* out) {
    const int64_t num_words = linear.num_words, panel_step = num_words * kPanel;
    const int64_t num_chunks = num_rows <= kRowsAtOnce<T> ? 1 : (num_words + kChunk - 1) / kChunk;
    const int64_t chunk = ((num_words + num_chunks - 1) / num_chunks + kGroupWords - 1) / kGroupWords * kGroupWords;
    Block block = {};
    block.row_step = row_words<T>(num_words);
    block.is_read_once = kReadsOnce && linear.num_outputs * num_words * int64_t(sizeof(float)) >= kReadOnce;
    for (int64_t word = 0; word < num_words; word += chunk) {
        block.x = x + row_words<T>(word);
        block.num_words = std::min(chunk, num_words - word);
        block.is_first = word == 0;
        block.is_last = word + chunk >= num_words;
        const float* weight = linear.weight + panel * panel_step + word * kPanel;
        const float* next = block.is_last ? linear.weight + (panel + num_panels) * panel_step : weight + chunk * kPanel;
        for (int64_t index = 0; index < num_panels; ++index) {
            block.weight = weight + index * panel_step;
            if constexpr (kIsInt4<T>) {
                const int64_t group = (panel + index) * (num_words / kGroupWords) + word / kGroupWords;
                block.scales = static_cast<const uint16_t*>(linear.scales) + group * kPanel;
                block.zeros = linear.zeros ? linear.zeros + group * kPanel : nullptr;
            }
            if (kIsInt8<T> && block.is_last) ask_for_scales(linear, (panel + index) * kPanel);
            block.sums = sums + index * num_rows * kPanel;
            block.ahead = index + 1 < num_panels ? block.weight + panel_step : next;
            multiply_chunk<T>(linear, block, num_rows, out + (panel + index) * kPanel);
        }
    }
    for (int64_t index = 0; index < num_panels; ++index) {
        finish_rows<T>(linear, sums + index * num_rows * kPanel, scales, num_rows, (panel + index) * kPanel, out);
    }
}

// The number of groups that rows are cut into: no group has more than kMaxRows, and every thread has work.
int64_t num_groups(int64_t num_rows, int64_t num_panels) {
    const int64_t wanted = (2 * omp_get_max_threads() + num_panels - 1) / num_panels;
    const int64_t possible = (num_rows + kBlockRows - 1) / kBlockRows;
    return std::max((num_rows + kMaxRows - 1) / kMaxRows, std::min(wanted, possible));
}

// weight[output * output_step + input * input_step] into words of panels.
template <typename T>
void pack(const T* weight, int64_t output_step, int64_t input_step, int64_t num_outputs, int64_t num_inputs,
          T* packed) {
    constexpr int64_t kPerWord = sizeof(float) / sizeof(T);
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
    const int64_t num_words = (num_inputs + kPerWord - 1) / kPerWord;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        T* to = packed + panel * kPanel * num_words * kPerWord;
        for (int64_t word = 0; word < num_words; ++word) {
            for (int64_t output = panel * kPanel; output < (panel + 1) * kPanel; ++output) {
                for (int64_t input = word * kPerWord; input < (word + 1) * kPerWord; ++input) {
                    const bool is_inside = output < num_outputs && input < num_inputs;
                    *to++ = is_inside ? weight[output * output_step + input * input_step] : T(0);
                }
            }
        }
    }
}

// Rows of the weight, by their ids -> out [num_ids, num_inputs].
template <typename T>
void unpack_rows(const Linear& linear, const int64_t* ids, int64_t num_ids, float* out) {
    constexpr int64_t kPerWord = sizeof(float) / sizeof(T);
    const int64_t num_inputs = linear.num_inputs, num_words = (num_inputs + kPerWord - 1) / kPerWord;
    const T* packed = reinterpret_cast<const T*>(linear.weight);
    for_each(num_ids, num_ids * num_words > kWorthQuantizing, [&](int64_t i) {
        const int64_t panel = ids[i] / kPanel, output = ids[i] % kPanel;
        const T* from = packed + (panel * num_words * kPanel + output) * kPerWord;
        const float scale = linear.scales ? static_cast<const float*>(linear.scales)[ids[i]] : 1.0f;
        for (int64_t input = 0; input < num_inputs; ++input) {
            const T value = from[input / kPerWord * kPanel * kPerWord + input % kPerWord];
            out[i * num_inputs + input] = to_float(value) * scale;
        }
    });
}

template <typename T, typename Out>
void multiply_all(const Linear& linear, const float* x, const float* scales, int64_t num_rows, Out* out) {
    if (num_rows == 0) return;
    const int64_t num_words = linear.num_words, num_outputs = linear.num_outputs;
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
    const int64_t groups = num_groups(num_rows, num_panels), num_units = groups * num_panels;
    const int64_t most_rows = (num_rows + groups - 1) / groups;
    const int64_t at_once = std::min(num_words > kChunk ? kMaxSums / (most_rows * kPanel) : 1, kMaxPanels);
    Team::share_out(num_units, num_rows * num_words * num_outputs > kWorthThreads, [&](Pieces& pieces) {
        alignas(64) float sums[kMaxSums];
        for (int64_t unit, last; pieces.take(at_once, &unit, &last);) {
            for (int64_t count; unit < last; unit += count) {
                const int64_t group = unit / num_panels, panel = unit % num_panels;
                const int64_t row = num_rows * group / groups, end = num_rows * (group + 1) / groups;
                count = std::min(num_panels - panel, last - unit);
                multiply_panels<T>(linear, x + row * row_words<T>(num_words), scales + row, end - row, panel, count,
                                   sums, out + row * num_outputs);
            }
        }
    });
}

template <typename T>
void run(const Linear& linear, const float* x, const float* scales, int64_t num_rows, void* out) {
    if (linear.is_output_float32) {
        multiply_all<T>(linear, x, scales, num_rows, static_cast<float*>(out));
    } else {
        multiply_all<T>(linear, x, scales, num_rows, static_cast<bfloat16*>(out));
    }
}

void unpack_int4_rows(const Linear& linear, const int64_t* ids, int64_t num_ids, float* out) {
    const int64_t num_groups = linear.num_words / kGroupWords;
    const uint8_t* packed = reinterpret_cast<const uint8_t*>(linear.weight);
    for_each(num_ids, num_ids * linear.num_inputs > kWorthQuantizing, [&](int64_t i) {
        const int64_t panel = ids[i] / kPanel, output = ids[i] % kPanel;
        float scale = 0.0f;
        int zero = kMiddle;
        for (int64_t input = 0; input < linear.num_inputs; ++input) {
            if (input % kGroup == 0) {
                const int64_t at = (panel * num_groups + input / kGroup) * kPanel + output;
                scale = half_to_float(static_cast<const uint16_t*>(linear.scales)[at]);
                if (linear.zeros) zero = linear.zeros[at];
            }
            const int64_t word = panel * linear.num_words + input / 8;
            const uint8_t both = packed[(word * kPanel + output) * 4 + input % 4];
            const int64_t to = linear.order ? linear.order[input] : input;
            out[i * linear.num_inputs + to] = float((input % 8 < 4 ? both & 15 : both >> 4) - zero) * scale;
        }
    });
}

thread_local Buffer quantized_rows;  // of the calling thread; those of its team read it
thread_local Buffer row_scales;
thread_local Buffer ordered_row;  // of each thread

// A piece of an int8 row as words of x: bytes, perhaps with 128 added, or, for each word of the weight, the first and
// third number in 16 bits and then the second and fourth.
void write_piece(const int8_t* values, int64_t count, uint8_t* to) {
    if constexpr (kHasFours && !kRowsAreUnsigned) {
        std::memcpy(to, values, count);
    } else if constexpr (kHasFours) {
        for (int64_t i = 0; i < count; ++i) to[i] = uint8_t(values[i]) ^ 0x80;
    } else {
        for (int64_t i = 0; i < count; i += 4) {
            const int16_t word[4] = {values[i], values[i + 2], values[i + 1], values[i + 3]};
            std::memcpy(to + 2 * i, word, sizeof word);
        }
    }
}

// The same for int4: in each group first the word that its sum begins with, where all zeros are `zero`.
void write_groups(const int8_t* values, int64_t count, int zero, uint8_t* to) {
    for (int64_t i = 0; i < count; i += kGroup, to += kGroupRowWords * sizeof(float)) {
        const int32_t first = first_of_group(values + i, zero);
        std::memcpy(to, &first, sizeof first);
        std::memcpy(to + sizeof first, values + i, kGroup);
    }
}

// The numbers of a row in another order.
template <typename In>
const In* put_in_order(const In* x, int64_t num_inputs, const int32_t* order) {
    In* ordered = reinterpret_cast<In*>(ordered_row.take(num_inputs * sizeof(In)));
    for (int64_t i = 0; i < num_inputs; ++i) ordered[i] = x[order[i]];
    return ordered;
}

// Calls write(row, input, the 64 numbers from there on) for rows in int8. Returns their scales.
template <typename In, typename Write>
const float* quantize_rows(const Linear& linear, const In* x, int64_t num_rows, const Write& write) {
    const int64_t num_inputs = linear.num_inputs;
    float* scales = reinterpret_cast<float*>(row_scales.take(num_rows * sizeof(float)));
    for_each(num_rows, num_rows * num_inputs > kWorthQuantizing, [&](int64_t row) {
        const In* from = x + row * num_inputs;
        if (linear.order) from = put_in_order(from, num_inputs, linear.order);
        scales[row] = quantize_row(from, num_inputs, [&](int64_t piece, const int8_t* values, int64_t) {
            write(row, piece * kQuantizedPiece, values);
        });
    });
    return scales;
}

// Rows into int8 first. T is the weight's.
template <typename T, typename In>
void quantize_and_run(const Linear& linear, const In* x, int64_t num_rows, void* out) {
    constexpr int64_t kPerWord = kIsInt4<T> ? 8 : 4;
    const int64_t width = linear.num_words * kPerWord, row_bytes = row_words<T>(linear.num_words) * sizeof(float);
    uint8_t* rows = quantized_rows.take(num_rows * row_bytes);
    const auto write = [&](int64_t row, int64_t input, const int8_t* values) {
        const int64_t count = std::min(width - input, kQuantizedPiece);
        uint8_t* to = rows + row * row_bytes + row_words<T>(input / kPerWord) * sizeof(float);
        if constexpr (kIsInt4<T>) write_groups(values, count, linear.zeros ? 1 : kMiddle, to);
        else write_piece(values, count, to);
    };
    const float* scales = quantize_rows(linear, x, num_rows, write);
    run<T>(linear, reinterpret_cast<const float*>(rows), scales, num_rows, out);
}

template <typename In>
void quantize_and_run_int4(const Linear& linear, const In* x, int64_t num_rows, void* out) {
#ifdef __AMX_INT8__
    if (num_rows >= kWorthTiles) {
        const int64_t width = linear.num_words * 8, tile_bytes = kTileRows * width;
        uint8_t* rows = quantized_rows.take((num_rows + kTileRows - 1) / kTileRows * tile_bytes);
        const auto write = [&](int64_t row, int64_t input, const int8_t* values) {
            uint8_t* to = rows + row / kTileRows * tile_bytes + input * kTileRows + row % kTileRows * kGroup;
            for (int64_t i = 0; i < kQuantizedPiece && input + i < width; i += kGroup, to += kGroupBytes) {
                std::memcpy(to, values + i, kGroup);
            }
        };
        const float* scales = quantize_rows(linear, x, num_rows, write);
        if (linear.is_output_float32) multiply_in_tiles(linear, rows, scales, num_rows, static_cast<float*>(out));
        else multiply_in_tiles(linear, rows, scales, num_rows, static_cast<bfloat16*>(out));
        return;
    }
#endif
    quantize_and_run<Int4>(linear, x, num_rows, out);
}

}  // namespace

// weight[output * output_step + input * input_step] -> packed, of room for ceil(outputs / kPanel) * kPanel rows.
EXPORT void roseinfer_linear_pack_float32(const float* weight, int64_t output_step, int64_t input_step,
                                          int64_t num_outputs, int64_t num_inputs, float* packed) {
    pack(weight, output_step, input_step, num_outputs, num_inputs, packed);
}

// x [num_rows, num_inputs] -> out [num_rows, num_outputs].
EXPORT void roseinfer_linear_float32(const Linear* linear, const float* x, int64_t num_rows, float* out) {
    multiply_all<float>(*linear, x, nullptr, num_rows, out);
}

// Rows of the weight, by their ids -> out [num_ids, num_inputs].
EXPORT void roseinfer_linear_rows_float32(const Linear* linear, const int64_t* ids, int64_t num_ids, float* out) {
    unpack_rows<float>(*linear, ids, num_ids, out);
}

#ifdef HAS_BFLOAT16_LINEARS

// The same in bfloat16; rows of `packed` are of an even number of inputs.
EXPORT void roseinfer_linear_pack_bfloat16_pairs(const bfloat16* weight, int64_t output_step, int64_t input_step,
                                                 int64_t num_outputs, int64_t num_inputs, bfloat16* packed) {
    pack(weight, output_step, input_step, num_outputs, num_inputs, packed);
}

// x [num_rows, 2 * num_words] bfloat16 -> out [num_rows, num_outputs], of the linear's output type.
EXPORT void roseinfer_linear_bfloat16_pairs(const Linear* linear, const float* x, int64_t num_rows, void* out) {
    run<bfloat16>(*linear, x, nullptr, num_rows, out);
}

EXPORT void roseinfer_linear_rows_bfloat16_pairs(const Linear* linear, const int64_t* ids, int64_t num_ids,
                                                 float* out) {
    unpack_rows<bfloat16>(*linear, ids, num_ids, out);
}

#endif

// The same for an int8 weight, in words of four inputs.
EXPORT void roseinfer_linear_pack_int8_fours(const int8_t* weight, int64_t output_step, int64_t input_step,
                                             int64_t num_outputs, int64_t num_inputs, int8_t* packed) {
    pack(weight, output_step, input_step, num_outputs, num_inputs, packed);
}

// x [num_rows, num_inputs], each row of which gets a scale and becomes int8 on the way.
EXPORT void roseinfer_linear_int8_fours_of_bfloat16(const Linear* linear, const bfloat16* x, int64_t num_rows,
                                                    void* out) {
    quantize_and_run<int8_t>(*linear, x, num_rows, out);
}

EXPORT void roseinfer_linear_int8_fours_of_float32(const Linear* linear, const float* x, int64_t num_rows, void* out) {
    quantize_and_run<int8_t>(*linear, x, num_rows, out);
}

// Each times its scale.
EXPORT void roseinfer_linear_rows_int8_fours(const Linear* linear, const int64_t* ids, int64_t num_ids, float* out) {
    unpack_rows<int8_t>(*linear, ids, num_ids, out);
}

// The same for an int4 weight, which quantize_int4.cpp packs.
EXPORT void roseinfer_linear_int4_of_bfloat16(const Linear* linear, const bfloat16* x, int64_t num_rows, void* out) {
    quantize_and_run_int4(*linear, x, num_rows, out);
}

EXPORT void roseinfer_linear_int4_of_float32(const Linear* linear, const float* x, int64_t num_rows, void* out) {
    quantize_and_run_int4(*linear, x, num_rows, out);
}

EXPORT void roseinfer_linear_rows_int4(const Linear* linear, const int64_t* ids, int64_t num_ids, float* out) {
    unpack_int4_rows(*linear, ids, num_ids, out);
}
