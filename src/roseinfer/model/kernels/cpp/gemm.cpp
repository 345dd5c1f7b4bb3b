// y = activation(x W^T + b) on AMX tiles, the weight packed once: in bfloat16, or in int8 with a scale for each row of
// x and of W.
//
// An output is one chain of tile products over k, in ascending order, each into the sum of the ones before it. Rows and
// columns of a tile do not mix, and a row that is computed without tiles has the same sums. So an output's bits depend on
// its row of x and its row of W alone: not on the number of rows, on their order, or on the threads, which share out
// columns and rows and never k.
//
// Packed weight: for each 16 outputs, one below the other, a tile for each 64 bytes of k. Tile row r holds, for each
// output, the 4 bytes of k that follow 4 r: the layout of the tile product's right operand. Everything past the
// weight's edges is 0. The rows of x are packed on each call: for each 16 rows a tile for each 64 bytes of k.

#include "common.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

#include <algorithm>

#include "activation.h"
#include "buffer.h"
#include "quantize.h"
#include "team.h"
#include "tiles.h"

namespace {

constexpr int64_t kSide = 2 * kTileRows;  // a panel is so many outputs: two columns of tiles
constexpr int64_t kChunk = 16;            // tiles of k after which, of more than 64 rows, the next ones take their turn:
                                          // the panel's 32 KiB stay in the nearest cache meanwhile
constexpr int64_t kRowsBytes = 1 << 20;   // packed rows that stay in the second cache while panels go by
constexpr int64_t kMaxRows = 512;         // of them
constexpr int64_t kAhead = 2048;          // bytes before their use that lines of a column are prefetched
constexpr int64_t kFewRows = 2;           // that each thread packs for itself, sooner than it would meet the others
constexpr int64_t kFewCopies = 128;       // of rows that are not quantised, by all threads together, up to which each thread
                                          // packs for itself too; measured with two threads
constexpr int64_t kWorthThreads = 64;     // tiles; below, waking a thread costs more than it saves

// A linear layer: _TileDescriptor of layers/packed_linear.py.
struct Linear {
    const uint8_t* weight;  // packed
    const float* scales;    // [num_outputs] of an int8 weight
    const float* bias;      // [num_outputs], or null
    int64_t num_outputs;
    int64_t num_inputs;
    int32_t activation;
    int32_t is_output_float32;  // else bfloat16
};

template <typename T>
int64_t num_tiles_of_k(int64_t num_inputs) {
    return (num_inputs * int64_t(sizeof(T)) + kLineBytes - 1) / kLineBytes;
}

thread_local Buffer packed_rows;  // of the calling thread, where those of its team read it, or of each
thread_local Buffer row_scales;

// The packed operands of a call.
struct Rows {
    uint8_t* tiles;
    float* scales;  // of int8 rows
    int64_t count;
    int64_t per_tile;  // 16, or fewer where there are not so many
};

// Sums of up to 32 rows of a panel on their way into outputs: scale, add the bias, activate, round. It goes on row by row,
// so that the instructions of vectors run while tiles are multiplied.
template <typename T, typename Out, Activation activation>
struct Pending {
    const uint8_t* sums;  // of the next row, in the first of two columns of tiles
    const float* scale;   // of an int8 row
    Out* out;
    int64_t row = 0, end = 0, row_step;  // of outputs
    int64_t count;                       // of outputs side by side
    bool is_streamed;
    Floats scales[2], bias[2];

    // Takes sums [row tile][two columns] of a panel, from row `first` on. Streamed outputs are whole lines, and pass the caches
    // by: a store that waits for its line would hold up sums that are stored, and read again, after it.
    void take(const Linear& linear, const Rows& rows, const uint8_t* from, int64_t first, int64_t num_rows, int64_t panel,
              Out* to, bool streams) {
        sums = from;
        scale = rows.scales + first;
        out = to + first * linear.num_outputs + panel * kSide;
        row = 0;
        end = num_rows;
        row_step = linear.num_outputs;
        count = std::min(kSide, linear.num_outputs - panel * kSide);
        is_streamed = streams;
        for (int64_t column = 0; column * kTileRows < kSide; ++column) {
            const int64_t at = panel * kSide + column * kTileRows;
            const int64_t here = std::max<int64_t>(0, count - column * kTileRows);
            scales[column] = sizeof(T) == 1 ? load_first(linear.scales + at, here) : zeros();
            bias[column] = linear.bias ? load_first(linear.bias + at, here) : zeros();
        }
    }

    Pending() = default;

    // Part by part, as in `multiply_tiles`.
    Pending(const Pending& other)
        : sums(other.sums),
          scale(other.scale),
          out(other.out),
          row(other.row),
          end(other.end),
          row_step(other.row_step),
          count(other.count),
          is_streamed(other.is_streamed),
          scales{other.scales[0], other.scales[1]},
          bias{other.bias[0], other.bias[1]} {}

    // Goes on where a copy of this has come to.
    void follow(const Pending& copy) { sums = copy.sums, scale = copy.scale, out = copy.out, row = copy.row; }

    // Rows that a step takes for all to be done in so many.
    int64_t rows_of_step(int64_t num_steps) const { return (kSide + num_steps - 1) / num_steps; }

    inline __attribute__((always_inline)) void step(int64_t num_rows) {
        for (const int64_t last = std::min(end, row + num_rows); row < last; ++row) {
            const Floats low = output(0);
            if (count <= kTileRows) {
                store_first(out, low, count);
            } else if (is_streamed) {
                stream(low, output(1));
            } else {
                store(out, low);
                store_first(out + kTileRows, output(1), count - kTileRows);
            }
            sums += row == kTileRows - 1 ? kTileBytes + kLineBytes : kLineBytes;
            out += row_step;
            ++scale;
        }
    }

private:
    inline __attribute__((always_inline)) Floats output(int column) const {
        Floats x = load(reinterpret_cast<const Sum<T>*>(sums + column * kTileBytes));
        if constexpr (sizeof(T) == 1) x = x * scales[column] * splat(*scale);
        return activate<activation>(x + bias[column]);
    }

    inline __attribute__((always_inline)) void stream(Floats low, Floats high) const {
        if constexpr (sizeof(Out) == sizeof(float)) {
            _mm512_stream_ps(out, low);
            _mm512_stream_ps(out + kTileRows, high);
        } else {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out), (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
};

// Rows first..end-1 (first a multiple of 16) times one panel, two row tiles at a time, each two beside the outputs of the
// two before, of which those of the last call may be pending still, and the last ones are when it returns.
template <typename T, typename Out, Activation activation>
void multiply_panel(const Linear& linear, const Rows& rows, int64_t first, int64_t end, int64_t panel, uint8_t* sums,
                    Out* out, bool is_streamed, Pending<T, Out, activation>& pending) {
    const int64_t num_tiles = num_tiles_of_k<T>(linear.num_inputs);
    const int64_t num_columns = linear.num_outputs - panel * kSide > kTileRows ? 2 : 1;
    const int64_t num_row_tiles = (end - first + kTileRows - 1) / kTileRows, num_turns = (num_row_tiles + 1) / 2;
    const int64_t num_chunks = num_turns <= 2 ? 1 : (num_tiles + kChunk - 1) / kChunk;
    Operands at = {};
    at.row_step = rows.per_tile * kLineBytes;
    at.rows_step = num_tiles * at.row_step;
    at.column_step = num_tiles * kTileBytes;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const bool is_last = chunk + 1 == num_chunks;
        const int64_t tile = num_tiles * chunk / num_chunks;
        at.num_tiles = num_tiles * (chunk + 1) / num_chunks - tile;
        at.column = linear.weight + panel * 2 * at.column_step + tile * kTileBytes;
        // Each turn prefetches a share of the next chunk; a single row tile, which memory keeps waiting, what comes a
        // little later.
        at.ahead = at.column + at.num_tiles * kTileBytes + (is_last ? (num_columns - 1) * at.column_step : 0);
        if (num_row_tiles == 1) at.ahead = at.column + kAhead;
        const uint8_t* ahead_end = at.ahead + at.num_tiles * kTileBytes;
        for (int64_t turn = 0; turn < num_turns; ++turn) {
            const int64_t row = first + turn * kSide, num_together = std::min<int64_t>(2, num_row_tiles - 2 * turn);
            at.rows = rows.tiles + row / kTileRows * at.rows_step + tile * at.row_step;
            at.num_ahead = at.ahead < ahead_end ? (kTileRows + num_turns - 1) / num_turns : 0;
            uint8_t* of_turn = sums + (num_chunks > 1 ? turn : 0) * 4 * kTileBytes;
            multiply_block<T>(at, num_together, num_columns, chunk == 0, of_turn, pending);
            at.ahead += at.num_ahead * kLineBytes * at.num_tiles;
            if (is_last) pending.take(linear, rows, of_turn, row, std::min(kSide, end - row), panel, out, is_streamed);
        }
    }
}

// Rows up to which registers are faster than tiles, which are then mostly empty.
template <typename T>
constexpr int64_t kRowsInRegisters = sizeof(T) == 1 ? 2 : 1;

// The sums of one row and 16 outputs, in registers, with the bits that tiles give them.
template <typename T>
struct Sums;

// The instruction takes bytes of the weight unsigned, so 128 is added to them, and the sums begin with less by as much.
template <>
struct Sums<int8_t> {
    __m512i chains[2];  // of which neighbours do not wait for each other

    void begin(int32_t surplus) {
        chains[1] = _mm512_setzero_si512();
        chains[0] = _mm512_sub_epi32(chains[1], _mm512_set1_epi32(surplus));
    }
    void begin_tile() {}
    void add(int word, __m512i weights, __m512i values) {
        const __m512i unsigned_weights = _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
        chains[word % 2] = _mm512_dpbusd_epi32(chains[word % 2], unsigned_weights, values);
    }
    void end_tile() {}
    __m512i end() const { return _mm512_add_epi32(chains[0], chains[1]); }
};

// Intel's manual, TDPBF16PS: even and odd inputs of a tile are added up from zero, each in order and rounded each time, and
// then their two sums, and that to what there was; denormal numbers count as zero.
template <>
struct Sums<bfloat16> {
    Floats sum, even, odd;

    void begin(int32_t) { sum = zeros(); }
    void begin_tile() { even = odd = zeros(); }
    void add(int, __m512i weights, __m512i values) {
        even = multiply_add(lower_bfloat16(weights), lower_bfloat16(values), even);
        odd = multiply_add(upper_bfloat16(weights), upper_bfloat16(values), odd);
    }
    void end_tile() { sum = sum + (even + odd); }
    __m512i end() const { return _mm512_castps_si512(sum); }
};

// While it lives, this thread takes and makes denormal numbers as zero, as tiles do. Compilers move arithmetic past it, but no
// call that is not inlined.
class DenormalsAreZero {
public:
    DenormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
    ~DenormalsAreZero() { _mm_setcsr(before_); }

private:
    const unsigned before_;
};

// sums [two columns][16 rows] = rows times the columns, in registers.
template <typename T, int num_rows, int num_columns>
__attribute__((noinline)) void multiply_in_registers(const Rows& rows, const uint8_t* column, int64_t num_tiles,
                                                     const int32_t* surplus, uint8_t* to) {
    Sums<T> sums[num_columns][num_rows];
    for (auto& side : sums) {
        for (int row = 0; row < num_rows; ++row) side[row].begin(surplus[row]);
    }
    const uint8_t* x = rows.tiles;
    for (int64_t tile = 0; tile < num_tiles; ++tile, x += num_rows * kLineBytes, column += kTileBytes) {
        for (auto& side : sums) {
            for (auto& sum : side) sum.begin_tile();
        }
#pragma GCC unroll 16
        for (int word = 0; word < kTileRows; ++word) {
#pragma GCC unroll 2
            for (int side = 0; side < num_columns; ++side) {
                const uint8_t* line = column + side * num_tiles * kTileBytes + word * kLineBytes;
                prefetch_to_level2(line + kAhead);
                const __m512i weights = _mm512_loadu_si512(line);
#pragma GCC unroll 2
                for (int row = 0; row < num_rows; ++row) {
                    int32_t values;
                    std::memcpy(&values, x + row * kLineBytes + word * sizeof values, sizeof values);
                    sums[side][row].add(word, weights, _mm512_set1_epi32(values));
                }
            }
        }
        for (auto& side : sums) {
            for (auto& sum : side) sum.end_tile();
        }
    }
    for (int side = 0; side < num_columns; ++side) {
        for (int row = 0; row < num_rows; ++row) {
            _mm512_storeu_si512(to + side * kTileBytes + row * kLineBytes, sums[side][row].end());
        }
    }
}

// 128 times the sum of a row's bytes.
int32_t surplus_of(const Rows& rows, int64_t row, int64_t num_tiles) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const __m512i values = _mm512_loadu_si512(rows.tiles + (tile * rows.count + row) * kLineBytes);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), values);
    }
    return _mm512_reduce_add_epi32(sum);
}

template <typename T, int num_rows, Activation activation, typename Out>
void multiply_panels_in_registers(const Linear& linear, const Rows& rows, Pieces& pieces, Out* out) {
    if constexpr (num_rows > 1) {
        if (rows.count < num_rows) return multiply_panels_in_registers<T, num_rows - 1, activation>(linear, rows, pieces, out);
    }
    const int64_t num_tiles = num_tiles_of_k<T>(linear.num_inputs);
    int32_t surplus[num_rows] = {};
    if constexpr (sizeof(T) == 1) {
        for (int row = 0; row < num_rows; ++row) surplus[row] = surplus_of(rows, row, num_tiles);
    }
    alignas(64) uint8_t sums[2 * kTileBytes];
    for (int64_t panel; pieces.take(&panel);) {
        const uint8_t* column = linear.weight + panel * 2 * num_tiles * kTileBytes;
        const bool is_whole = linear.num_outputs - panel * kSide > kTileRows;
        {
            const DenormalsAreZero scope;
            if (is_whole) multiply_in_registers<T, num_rows, 2>(rows, column, num_tiles, surplus, sums);
            else multiply_in_registers<T, num_rows, 1>(rows, column, num_tiles, surplus, sums);
        }
        Pending<T, Out, activation> pending;
        pending.take(linear, rows, sums, 0, num_rows, panel, out, false);
        pending.step(kSide);
    }
}

// One row into its place in the tiles; the scale where it is quantised.
template <typename T, typename In>
void pack_row(const In* x, int64_t num_inputs, uint8_t* to, int64_t step, float* scale) {
    if constexpr (sizeof(T) == 1) {
        *scale = quantize_row(x, num_inputs, [&](int64_t piece, const int8_t* values, int64_t) {
            std::memcpy(to + piece * step, values, kLineBytes);
            prefetch_to_level1(to + piece * step + kLineBytes);  // of the next row
        });
    } else {
        constexpr int64_t kPiece = kLineBytes / sizeof(T);
        const int64_t whole = num_inputs / kPiece;
        for (int64_t piece = 0; piece < whole; ++piece) std::memcpy(to + piece * step, x + piece * kPiece, kLineBytes);
        if (whole * kPiece < num_inputs) {
            std::memset(to + whole * step, 0, kLineBytes);
            std::memcpy(to + whole * step, x + whole * kPiece, (num_inputs - whole * kPiece) * sizeof(T));
        }
    }
}

// Has the first lines of two columns on their way while rows are packed.
void ask_for_beginning(const uint8_t* column, int64_t column_bytes) {
    for (int64_t line = 0; line < std::min(kAhead, column_bytes); line += kLineBytes) {
        prefetch_to_level2(column + line);
        prefetch_to_level2(column + column_bytes + line);
    }
}

// As many rows as stay in the cache, and no more than leave work for every thread.
int64_t rows_at_once(int64_t num_rows, int64_t row_bytes, int64_t num_panels) {
    int64_t at_once = std::min(kMaxRows, kRowsBytes / row_bytes);
    const int64_t num_wanted = 2 * omp_get_max_threads();
    if (num_panels < num_wanted) at_once = std::min(at_once, num_rows * num_panels / num_wanted);
    return std::max(kSide, at_once / kSide * kSide);
}

// Units, each of which is some rows times one panel.
template <typename T, Activation activation, typename Out>
void multiply_units(const Linear& linear, const Rows& rows, int64_t at_once, Pieces& pieces, Out* out) {
    const int64_t num_panels = (linear.num_outputs + kSide - 1) / kSide;
    const int64_t row_bytes = linear.num_outputs * int64_t(sizeof(Out));
    const bool has_lines = (reinterpret_cast<uintptr_t>(out) | row_bytes) % kLineBytes == 0;
    const bool is_streamed = has_lines && rows.count * row_bytes >= kManyBytes;
    alignas(64) uint8_t sums[kMaxRows / kTileRows * 2 * kTileBytes];
    Pending<T, Out, activation> pending;
    for (int64_t unit; pieces.take(&unit);) {
        const int64_t first = unit / num_panels * at_once, end = std::min(rows.count, first + at_once);
        multiply_panel<T>(linear, rows, first, end, unit % num_panels, sums, out, is_streamed, pending);
    }
    pending.step(kSide);
    _mm_sfence();  // what is streamed has no order of its own
}

template <typename T, typename In, typename Out>
void multiply_rows(const Linear& linear, const In* x, int64_t num_rows, Out* out) {
    const int64_t num_tiles = num_tiles_of_k<T>(linear.num_inputs);
    const int64_t num_panels = (linear.num_outputs + kSide - 1) / kSide;
    const int64_t per_tile = std::min(kTileRows, num_rows), row_step = per_tile * kLineBytes;
    const int64_t rows_step = num_tiles * row_step;
    const bool packs_alone = num_rows <= kFewRows || (sizeof(T) > 1 && num_rows * omp_get_max_threads() <= kFewCopies);
    const auto take = [&] {
        uint8_t* tiles = packed_rows.take((num_rows + kTileRows - 1) / kTileRows * rows_step);
        return Rows{tiles, reinterpret_cast<float*>(row_scales.take(num_rows * sizeof(float))), num_rows, per_tile};
    };
    const auto pack = [&](const Rows& rows, int64_t row) {
        uint8_t* to = rows.tiles + row / kTileRows * rows_step + row % kTileRows * kLineBytes;
        pack_row<T>(x + row * linear.num_inputs, linear.num_inputs, to, row_step, rows.scales + row);
    };
    const Rows shared = packs_alone ? Rows{} : take();
    const int64_t at_once = rows_at_once(num_rows, num_tiles * kLineBytes, num_panels);
    const int64_t num_units = (num_rows + at_once - 1) / at_once * num_panels;
    const bool is_worth_threads = num_units * num_tiles > kWorthThreads;
    if (!packs_alone) for_each(num_rows, is_worth_threads, [&](int64_t row) { pack(shared, row); });
    Team::share_out(num_units, is_worth_threads, [&](Pieces& pieces) {
        const Rows rows = packs_alone ? take() : shared;
        if (packs_alone) {
            const int64_t first = pieces.first() % num_panels;
            ask_for_beginning(linear.weight + first * 2 * num_tiles * kTileBytes, num_tiles * kTileBytes);
            for (int64_t row = 0; row < num_rows; ++row) pack(rows, row);
        }
        with_activation(linear.activation, [&](auto activation) {
            if (num_rows <= kRowsInRegisters<T>) {
                return multiply_panels_in_registers<T, kRowsInRegisters<T>, activation.value>(linear, rows, pieces, out);
            }
            const TileScope scope(per_tile);
            multiply_units<T, activation.value>(linear, rows, at_once, pieces, out);
        });
    });
}

template <typename T, typename In>
void run(const Linear& linear, const In* x, int64_t num_rows, void* out) {
    if (num_rows == 0) return;
    if (linear.is_output_float32) {
        multiply_rows<T>(linear, x, num_rows, static_cast<float*>(out));
    } else {
        multiply_rows<T>(linear, x, num_rows, static_cast<bfloat16*>(out));
    }
}

// weight[output * output_step + input * input_step] into tiles.
template <typename T>
void pack(const T* weight, int64_t output_step, int64_t input_step, int64_t num_outputs, int64_t num_inputs,
          T* packed) {
    constexpr int64_t kGroup = 4 / sizeof(T), kPerLine = kLineBytes / sizeof(T);
    const int64_t num_tiles = num_tiles_of_k<T>(num_inputs), num_columns = (num_outputs + kTileRows - 1) / kTileRows;
#pragma omp parallel for
    for (int64_t column = 0; column < num_columns; ++column) {
        T* to = packed + column * num_tiles * kTileRows * kPerLine;
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            for (int64_t i = 0; i < kTileRows * kPerLine; ++i) {
                const int64_t input = tile * kPerLine + i / (kTileRows * kGroup) * kGroup + i % kGroup;
                const int64_t output = column * kTileRows + i / kGroup % kTileRows;
                const bool is_inside = output < num_outputs && input < num_inputs;
                *to++ = is_inside ? weight[output * output_step + input * input_step] : T(0);
            }
        }
    }
}

// Rows of the weight, by their ids -> out [num_ids, num_inputs].
template <typename T>
void unpack_rows(const Linear& linear, const int64_t* ids, int64_t num_ids, float* out) {
    constexpr int64_t kGroup = 4 / sizeof(T), kPerLine = kLineBytes / sizeof(T);
    const int64_t num_inputs = linear.num_inputs, num_tiles = num_tiles_of_k<T>(num_inputs);
    const T* packed = reinterpret_cast<const T*>(linear.weight);
    for_each(num_ids, num_ids > 1, [&](int64_t i) {
        const int64_t column = ids[i] / kTileRows, output = ids[i] % kTileRows;
        const T* from = packed + column * num_tiles * kTileRows * kPerLine + output * kGroup;
        const float scale = linear.scales ? linear.scales[ids[i]] : 1.0f;
        for (int64_t input = 0; input < num_inputs; ++input) {
            const T value = from[input / kGroup * kTileRows * kGroup + input % kGroup];
            out[i * num_inputs + input] = to_float(value) * scale;
        }
    });
}

}  // namespace

// weight[output * output_step + input * input_step] -> packed, of ceil(outputs / 16) * 16 rows of whole 64 bytes.
EXPORT void roseinfer_linear_pack_bfloat16(const bfloat16* weight, int64_t output_step, int64_t input_step,
                                           int64_t num_outputs, int64_t num_inputs, bfloat16* packed) {
    pack(weight, output_step, input_step, num_outputs, num_inputs, packed);
}

EXPORT void roseinfer_linear_pack_int8(const int8_t* weight, int64_t output_step, int64_t input_step,
                                       int64_t num_outputs, int64_t num_inputs, int8_t* packed) {
    pack(weight, output_step, input_step, num_outputs, num_inputs, packed);
}

// Rows of the weight, by their ids -> out [num_ids, num_inputs]; of int8 each times its scale.
EXPORT void roseinfer_linear_rows_bfloat16(const Linear* linear, const int64_t* ids, int64_t num_ids, float* out) {
    unpack_rows<bfloat16>(*linear, ids, num_ids, out);
}

EXPORT void roseinfer_linear_rows_int8(const Linear* linear, const int64_t* ids, int64_t num_ids, float* out) {
    unpack_rows<int8_t>(*linear, ids, num_ids, out);
}

// x [num_rows, num_inputs] -> out [num_rows, num_outputs], of the linear's output type.
EXPORT void roseinfer_linear_bfloat16(const Linear* linear, const bfloat16* x, int64_t num_rows, void* out) {
    run<bfloat16>(*linear, x, num_rows, out);
}

// The same with an int8 weight; each row of x gets a scale and becomes int8 on the way.
EXPORT void roseinfer_linear_int8_of_bfloat16(const Linear* linear, const bfloat16* x, int64_t num_rows, void* out) {
    run<int8_t>(*linear, x, num_rows, out);
}

EXPORT void roseinfer_linear_int8_of_float32(const Linear* linear, const float* x, int64_t num_rows, void* out) {
    run<int8_t>(*linear, x, num_rows, out);
}

#endif
