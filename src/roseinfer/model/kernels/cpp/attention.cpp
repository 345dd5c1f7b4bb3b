// Attention of packed queries over a paged cache of keys and values, which the new keys and values are written to first.
//
// out[token, head] = sum over keys of softmax(scale * q[token, head] . k[key]) * v[key], over the keys of the token's
// sequence at positions from `position - window + 1` (or 0) to `position`. A soft cap bends the scores, and a sink is
// one more score, whose value is 0. Reference: attention/reference.py.
//
// The layout of the cache is this kernel's own. One block of one key head holds `block_size` keys and values of
// `head_dim` numbers. A product takes STEP numbers of a key at a time: 1 of float32, 2 of bfloat16, and
//     keys    [head_dim / STEP, block_size, STEP]     the scores of neighbouring keys fill a register, or a tile's row
//     values  [block_size / STEP, head_dim, STEP]     the sums of neighbouring dimensions do
// so there are no sums across a register, and the pairs are those of the instructions that multiply bfloat16.
// In int8 the layout is the same, and each key and value has a scale: a tile is widened before its products, scores are
// multiplied by the scales of their keys, and weights by those of their values.
//
// Every query is computed by one sequence of operations, which depends on its own numbers and its own position alone:
// keys are met in tiles of 64 cut at absolute positions, in ascending order, and the softmax is corrected once a tile
// (online softmax, Milakov and Gimelshein, 2018). How many queries are computed together changes which sums wait for
// each other, never the order of a sum. A key that a query does not see has the weight 0, which changes no sum, because
// values are finite: others are replaced when they are written.

#include "attention.h"
#include "attention_read.h"
#include "attention_registers.h"
#include "attention_tiles.h"
#include "attention_write.h"
#include "team.h"

#include <alloca.h>
#include <omp.h>

#include <algorithm>

namespace {

// Rows are queries times heads. So many of them one thread takes through the keys together: a tile of keys and values
// is read from memory once for all of them, and from the second cache once.
constexpr int MAX_ROWS = 128;
constexpr int MAX_HEADS = 32;  // whose rows are taken together, where a head has few
constexpr float HIDDEN = -__builtin_inff();

// Rows `first_row..` of a sequence's new queries, which are token after token, and heads of a group within each; and
// the key heads for which they are computed.
struct Item {
    int32_t sequence;
    int32_t first_row;
    int32_t num_rows;  // of each head
    int32_t first_kv_head;
    int32_t num_kv_heads;
};

// ---- One tile of keys for a few rows

// The keys of a tile that a query sees: first..last-1; none where last <= first.
struct Span {
    int first;
    int last;

    bool is_empty() const { return last <= first; }
};

Span visible_keys(int64_t tile_start, int64_t position, int64_t window) {
    const int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return {int(std::clamp<int64_t>(first - tile_start, 0, KEY_TILE)),
            int(std::clamp<int64_t>(position + 1 - tile_start, 0, KEY_TILE))};
}

// cap * tanh(x / cap), with tanh(y) = (1 - e^(-2 |y|)) / (1 + e^(-2 |y|)) and the sign of y.
Floats bend(Floats x, float cap) {
    const Floats size = maximum(x, subtract(zeros(), x));
    const Floats power = exponential(multiply(size, splat(-2.0f / cap)));
    const Floats bent = multiply(splat(cap), divide(subtract(splat(1.0f), power), add(splat(1.0f), power)));
    return with_sign_of(x, bent);
}

// Scales the scores of one row, hides the keys that it does not see, and returns the highest of its scores and `so_far`.
// `key_scales` is null but for a cache in int8.
float hide(float* scores, Span span, int num_vectors, const float* key_scales, float scale, float softcap,
           float so_far) {
    const bool sees_all = span.first == 0 && span.last >= num_vectors * LANES;
    Floats highest = splat(so_far);
    for (int vector = 0; vector < num_vectors; vector++) {
        const int lane = vector * LANES;
        Floats seen = multiply(load(scores + lane), splat(scale));
        if (key_scales) seen = multiply(seen, load(key_scales + lane));
        if (softcap != 0.0f) seen = bend(seen, softcap);
        if (!sees_all) seen = within(span.first - lane, span.last - lane, seen, splat(HIDDEN));
        highest = maximum(highest, seen);
        store(scores + lane, seen);
    }
    return largest(highest);
}

// Scores of one row into weights relative to e^maximum; corrects the earlier totals and adds to them. The weights that are
// stored are those of the numbers in the cache: `value_scales` is null but for int8.
template <class Type>
void weigh(const float* scores, int num_vectors, const float* value_scales, float maximum, float correction,
           float* lane_totals, typename Type::Operand* weights) {
    Floats totals = multiply(load(lane_totals), splat(correction));
    for (int vector = 0; vector < num_vectors; vector++) {
        Floats weight = exponential(subtract(load(scores + vector * LANES), splat(maximum)));
        totals = add(totals, weight);
        if (value_scales) weight = multiply(weight, load(value_scales + vector * LANES));
        Type::store_weights(weights + vector * LANES, weight);
    }
    store(lane_totals, totals);
}

// What sums relative to e^maximum are multiplied by, where a sink is beside weights with this total.
float share_beside(float sink, float maximum, float total) {
    const float highest = std::max(sink, maximum);
    alignas(64) float powers[LANES] = {maximum - highest, sink - highest};
    store(powers, exponential(load(powers)));
    return powers[0] / (total * powers[0] + powers[1]);
}

// ---- One item: some rows of a sequence, for some key heads

void write_number(float* to, float x) { *to = x; }
void write_number(bfloat16* to, float x) { *to = to_bfloat16(x); }

template <class Stored>
void find_tile(const Call& call, const int32_t* blocks, int64_t tile_start, int64_t last_position, int64_t head,
               Tile<Stored>& tile) {
    const int64_t first = tile_start / call.block_size, last = last_position / call.block_size;
    for (int64_t block = 0; block < KEY_TILE / call.block_size; block++) {
        const int64_t id = blocks[std::min(first + block, last)];
        const int64_t page = (id * call.num_kv_heads + head) * call.block_size * call.head_dim;
        tile.keys[block] = static_cast<const Stored*>(call.keys) + page;
        tile.values[block] = static_cast<const Stored*>(call.values) + page;
    }
}

// The rows of an item: those of its first head, then those of the next.
template <class Products>
struct Rows {
    using Operand = typename Products::Operand;

    int num_rows;  // of each head
    int num_heads;
    alignas(64) float lane_totals[MAX_ROWS * LANES];  // of the weights; these and the sums are relative to e^maximum
    alignas(64) float scores[MAX_ROWS * KEY_TILE];    // of one tile of keys
    alignas(64) Operand weights[MAX_ROWS * KEY_TILE];
    alignas(64) float corrections[MAX_ROWS];  // of the sums before this tile
    float maxima[MAX_ROWS];
    int64_t positions[MAX_ROWS];
    Operand* q;                      // [rows, head_dim]
    float* sums;                     // [rows, padded head_dim]
    typename Products::Number* wide;  // [KEY_TILE, head_dim] of a cache in int8

    int num_all() const { return num_rows * num_heads; }
    Span span(const Call& call, int64_t tile_start, int row) const {
        return visible_keys(tile_start, positions[row], call.window);
    }
};

// Rows first..first+num_rows-1, which are computed together, and the keys of the tile up to the last that they see.
struct Block {
    int head;
    int first;
    int num_rows;
    int num_keys;

    int num_vectors() const { return (num_keys + LANES - 1) / LANES; }
    bool is_first_of_head(int num_rows_of_head) const { return first == head * num_rows_of_head; }
};

// The blocks of rows that see a key of the tile. Returns their number.
template <class Products>
int find_blocks(const Call& call, const Rows<Products>& rows, int64_t tile_start, Block* blocks) {
    int num_blocks = 0;
    for (int head = 0; head < rows.num_heads; head++)
        for (int row = 0; row < rows.num_rows; row += Products::MAX_ROWS) {
            Block block{head, head * rows.num_rows + row, std::min(Products::MAX_ROWS, rows.num_rows - row), 0};
            for (int i = 0; i < block.num_rows; i++) {
                const Span span = rows.span(call, tile_start, row + i);
                if (!span.is_empty()) block.num_keys = std::max(block.num_keys, span.last);
            }
            if (block.num_keys > 0) blocks[num_blocks++] = block;
        }
    return num_blocks;
}

// The rows of a block whose scores are not weights yet. Some at a time become so beside the products of another block.
template <class Products, class Few>
class Weighing {
public:
    Weighing(const Call& call, Reader<Products, Few>& reader, Rows<Products>& rows, const Block& block,
             int64_t tile_start)
        : call_(call),
          rows_(rows),
          value_scales_(reader.value_scales(call, block.head)),
          tile_start_(tile_start),
          num_vectors_(block.num_vectors()),
          row_(block.first),
          end_(block.first + block.num_rows) {}

    void step(int num_rows) {
        for (const int last = std::min(end_, row_ + num_rows); row_ < last; row_++) {
            auto* weights = rows_.weights + row_ * KEY_TILE;
            if (rows_.span(call_, tile_start_, row_).is_empty())
                std::memset(weights, 0, KEY_TILE * sizeof *weights);
            else
                weigh<Products>(rows_.scores + row_ * KEY_TILE, num_vectors_, value_scales_, rows_.maxima[row_],
                                rows_.corrections[row_], rows_.lane_totals + row_ * LANES, weights);
        }
    }
    void finish() { step(end_ - row_); }

private:
    const Call& call_;
    Rows<Products>& rows_;
    const float* value_scales_;
    int64_t tile_start_;
    int num_vectors_, row_, end_;
};

// One tile of keys: the scores of all rows, then the weights and the sums of all, those of a block beside the weights of the
// next, so that no row waits for its own. `heads` has the tile of each head, and after them the next tile, if there is one.
template <class Products, class Few>
void attend_tile(const Call& call, const Tile<typename Few::Number>* heads, bool has_next, int64_t tile_start,
                 Rows<Products>& rows) {
    const int64_t row_size = padded_head_dim(call);
    Block blocks[MAX_ROWS];
    const int num_blocks = find_blocks(call, rows, tile_start, blocks);
    Reader<Products, Few> reader{heads, rows.wide, rows.num_rows <= Few::MAX_ROWS};
    for (int i = 0; i < num_blocks; i++) reader.num_keys = std::max(reader.num_keys, blocks[i].num_vectors() * LANES);
    const auto next_of = [&](const Block& block) {
        const bool is_followed = has_next || block.head + 1 < rows.num_heads;
        return is_followed && block.is_first_of_head(rows.num_rows) ? &heads[block.head + 1] : nullptr;
    };
    {
        const typename Products::ScoreScope registers(rows.num_rows);
        for (int i = 0; i < num_blocks; i++) {
            const Block& block = blocks[i];
            const float* key_scales = reader.key_scales(call, block.head);
            reader.score(call, block.head, next_of(block), block.num_rows, block.num_vectors(),
                         rows.q + block.first * call.head_dim, rows.scores + block.first * KEY_TILE);
            for (int row = block.first; row < block.first + block.num_rows; row++) {
                const Span span = rows.span(call, tile_start, row);
                const float so_far = rows.maxima[row];
                if (!span.is_empty())
                    rows.maxima[row] = hide(rows.scores + row * KEY_TILE, span, block.num_vectors(), key_scales,
                                            call.scale, call.softcap, so_far);
                rows.corrections[row] = rows.maxima[row] == so_far ? 0.0f : so_far - rows.maxima[row];
            }
        }
    }
    for (int row = 0; row < rows.num_all(); row += LANES)
        store(rows.corrections + row, exponential(load(rows.corrections + row)));
    const auto weighing = [&](const Block& block) {
        return Weighing<Products, Few>(call, reader, rows, block, tile_start);
    };
    const typename Products::SumScope registers(rows.num_rows);
    if (num_blocks > 0) weighing(blocks[0]).finish();
    for (int i = 0; i < num_blocks; i++) {
        const Block& block = blocks[i];
        Weighing<Products, Few> beside = i + 1 < num_blocks ? weighing(blocks[i + 1]) : weighing({block.head, 0, 0, 0});
        reader.mix(call, block.head, next_of(block), block.num_rows, block.num_keys,
                   rows.weights + block.first * KEY_TILE, rows.corrections + block.first,
                   rows.sums + block.first * row_size, beside);
        beside.finish();
    }
}

// Takes the rows through all keys that one of them sees; heads side by side, as they lie in memory.
template <class Products, class Few>
void attend_rows(const Call& call, const Item& item, const int32_t* blocks, Rows<Products>& rows) {
    Tile<typename Few::Number> heads[MAX_HEADS + 1];
    const int64_t page_size = call.block_size * call.head_dim, last_position = rows.positions[rows.num_rows - 1];
    const int64_t first_seen = call.window ? std::max<int64_t>(0, rows.positions[0] - call.window + 1) : 0;
    int64_t start = first_seen / KEY_TILE * KEY_TILE;
    find_tile(call, blocks, start, last_position, item.first_kv_head, heads[0]);
    for (; start <= last_position; start += KEY_TILE) {
        for (int head = 1; head < rows.num_heads; head++)
            for (int block = 0; block < KEY_TILE / call.block_size; block++) {
                heads[head].keys[block] = heads[head - 1].keys[block] + page_size;
                heads[head].values[block] = heads[head - 1].values[block] + page_size;
            }
        const bool has_next = start + KEY_TILE <= last_position;
        auto& next = heads[rows.num_heads];
        if (has_next) find_tile(call, blocks, start + KEY_TILE, last_position, item.first_kv_head, next);
        attend_tile<Products, Few>(call, heads, has_next, start, rows);
        heads[0] = next;
    }
}

template <class Products, class Few>
void attend_item(const Call& call, const Item& item) {
    using Number = typename Products::Number;
    using Stored = typename Few::Number;
    const int64_t head_dim = call.head_dim, row_size = padded_head_dim(call);
    const int64_t group = call.num_heads / call.num_kv_heads;
    const int64_t first_token = call.query_starts[item.sequence], last_token = call.query_starts[item.sequence + 1];
    Rows<Products> rows;
    rows.num_rows = item.num_rows;
    rows.num_heads = item.num_kv_heads;
    const int64_t num_all = rows.num_all(), num_allocated = (num_all + 15) / 16 * 16;  // tiles have 16 rows
    rows.q = static_cast<typename Products::Operand*>(alloca(num_allocated * head_dim * sizeof *rows.q));
    rows.sums = static_cast<float*>(alloca(num_allocated * row_size * sizeof *rows.sums));
    if constexpr (!std::is_same_v<Stored, Number>)
        rows.wide = static_cast<Number*>(__builtin_alloca_with_align(KEY_TILE * head_dim * sizeof(Number), 512));
    if (!call.appends_first)
        for (int head = 0; head < item.num_kv_heads; head++)
            prefetch_place<Products, Stored>(call, first_token, item.first_kv_head + head);
    const auto each_row = [&](const auto& visit) {
        for (int row = 0; row < num_all; row++) {
            const int64_t flat = item.first_row + row % rows.num_rows;
            visit(row, first_token + flat / group, (item.first_kv_head + row / rows.num_rows) * group + flat % group);
        }
    };
    each_row([&](int row, int64_t token, int64_t head) {
        const Number* from = static_cast<const Number*>(call.q) + token * call.q_strides[0] + head * call.q_strides[1];
        for (int64_t dim = 0; dim < head_dim; dim++) rows.q[row * head_dim + dim] = Products::to_operand(from[dim]);
        rows.positions[row] = call.positions[token];
        rows.maxima[row] = HIDDEN;
        std::memset(rows.sums + row * row_size, 0, row_size * sizeof *rows.sums);
    });
    std::memset(rows.lane_totals, 0, num_all * LANES * sizeof *rows.lane_totals);
    std::memset(rows.corrections, 0, num_allocated * sizeof *rows.corrections);

    if (!call.appends_first)
        for (int64_t token = first_token; token < last_token; token++)
            if (const int64_t length = run_length(call, token, first_token, last_token))
                for (int head = 0; head < item.num_kv_heads; head++)
                    append<Products, Stored>(call, token, length, item.first_kv_head + head);
    attend_rows<Products, Few>(call, item, call.block_table + call.slots[first_token] * call.block_table_stride, rows);

    each_row([&](int row, int64_t token, int64_t head) {
        Number* to = static_cast<Number*>(call.out) + (token * call.num_heads + head) * head_dim;
        const float seen = total(load(rows.lane_totals + row * LANES));
        const float scale = call.sinks ? share_beside(call.sinks[head], rows.maxima[row], seen) : 1.0f / seen;
        for (int64_t dim = 0; dim < head_dim; dim++) write_number(to + dim, rows.sums[row * row_size + dim] * scale);
    });
}

// The cache has the numbers that Few reads: those of the products, or int8.
template <class Products, class Few = Products>
void attend(const Call& call) {
    using Stored = typename Few::Number;
    const Item* items = reinterpret_cast<const Item*>(call.items);
    if (call.appends_first)
        for_each(call.num_tokens, true, [&](int64_t token) {
            if (const int64_t length = run_length(call, token, 0, call.num_tokens))
                for (int64_t head = 0; head < call.num_kv_heads; head++)
                    append<Products, Stored>(call, token, length, head);
        });
    Team::share_out(call.num_items, true, [&](Pieces& pieces) {
        for (int64_t item; pieces.take(&item);) attend_item<Products, Few>(call, items[item]);
    });
}

}  // namespace

// Cuts a step's rows into items, the most expensive first. Writes them to `items` [tokens * heads, 5], their number to
// results[0], and to results[1] whether keys must be appended first.
EXPORT void attention_plan(const int32_t* query_starts, const int32_t* positions, int64_t num_sequences,
                           int64_t num_heads, int64_t num_kv_heads, int32_t* items, int64_t* results) {
    const int64_t group = num_heads / num_kv_heads, num_threads = omp_get_max_threads();
    const auto rows_of = [&](int64_t sequence) { return (query_starts[sequence + 1] - query_starts[sequence]) * group; };
    const auto count_pieces = [&](int64_t num_rows) {
        int64_t num_pieces = 0;
        for (int64_t sequence = 0; sequence < num_sequences; sequence++)
            num_pieces += (rows_of(sequence) + num_rows - 1) / num_rows;
        return num_pieces;
    };
    // Items are as large as they can be while every thread has several, or a share of each sequence. Heads that lie side
    // by side in memory are read as one stream.
    int64_t max_rows = MAX_ROWS;
    while (max_rows > MAX_HEADS && count_pieces(max_rows) * num_kv_heads < 8 * num_threads) max_rows /= 2;
    const int64_t num_pieces = count_pieces(max_rows);
    const int64_t share = (num_kv_heads + num_threads - 1) / num_threads;
    const int64_t wanted = std::max(share, num_pieces * num_kv_heads / (8 * num_threads));
    Item* made = reinterpret_cast<Item*>(items);
    int64_t num_items = 0, is_cut = 0;
    for (int64_t sequence = 0; sequence < num_sequences; sequence++)
        for (int64_t row = 0; row < rows_of(sequence); row += max_rows) {
            const int64_t num_rows = std::min(max_rows, rows_of(sequence) - row);
            is_cut |= row > 0;
            const int64_t step = std::min({wanted, std::max<int64_t>(1, MAX_HEADS / num_rows), num_kv_heads});
            for (int64_t head = 0; head < num_kv_heads; head += step)
                made[num_items++] = {int32_t(sequence), int32_t(row), int32_t(num_rows), int32_t(head),
                                     int32_t(std::min(step, num_kv_heads - head))};
        }
    const auto cost = [&](const Item& item) {
        return int64_t(positions[query_starts[item.sequence]] + item.first_row / group + 1) * item.num_rows *
               item.num_kv_heads;
    };
    std::stable_sort(made, made + num_items, [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
    results[0] = num_items;
    results[1] = is_cut;
}

namespace {

// OfBytes is what reads a cache in int8, or else the same as Type.
template <class Type, class OfBytes>
void attend_bfloat16(const Call& call) {
#if defined(__AMX_BF16__)
    using Few = std::conditional_t<std::is_same_v<Type, OfBytes>, Tiles, OnlyWidened>;
    if (Tiles::can_compute(call)) return attend<Tiles, Few>(call);
#endif
    attend<Registers<Type>, Registers<OfBytes>>(call);
}

}  // namespace

EXPORT void attention_float32(const Step* step, const Layer* layer) {
    attend<Registers<Float32>>(Call{*step, *layer});
}

EXPORT void attention_bfloat16(const Step* step, const Layer* layer) {
    attend_bfloat16<BFloat16, BFloat16>(Call{*step, *layer});
}

EXPORT void attention_float32_int8(const Step* step, const Layer* layer) {
    attend<Registers<Float32>, Registers<Float32OfBytes>>(Call{*step, *layer});
}

EXPORT void attention_bfloat16_int8(const Step* step, const Layer* layer) {
    attend_bfloat16<BFloat16, BFloat16OfBytes>(Call{*step, *layer});
}
