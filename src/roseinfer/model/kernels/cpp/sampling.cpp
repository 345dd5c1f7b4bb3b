// Samples a token of each row of logits, and computes log-probabilities.
//
// A row is one thread's work from its first number to its token, so its result depends on the row alone. A row of some
// hundred kilobytes stays in the core's cache, so main memory is read once, whatever the number of passes. All threads look
// for the largest logit of a row that is alone: of that the order makes no difference. The same in torch is in
// sampling/torch.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common.h"
#include "team.h"

namespace {

constexpr int64_t kChunk = 256;  // of the vocabulary: its mass is one number, so a draw searches few and then one chunk
constexpr int64_t kLanes = 32;   // partial results kept side by side, in an order that no compiler may change
constexpr int64_t kGroup = 32;   // logits held against the worst candidate at once
constexpr int64_t kMaxSelected = 2048;  // up to so many likeliest tokens are selected; beyond, a threshold is searched
constexpr int64_t kWorthThreads = 16384;  // logits; below, waking a thread costs more than it saves
constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr float kHighest = std::numeric_limits<float>::infinity();
constexpr int64_t kNoToken = -1;  // `NO_TOKEN` of engine/core/batch.py

enum Need : int32_t { kGreedy, kWhole, kTruncated };

// One slot's parameters: the fields of `SLOT` in sampling/slot_table.py.
struct Slot {
    int64_t seed;
    int64_t top_k;  // 0: no limit
    int64_t barred_before;
    double top_p;
    float temperature;
    float min_p;
    int32_t need;
    int32_t num_logprobs;
};

struct Candidate {
    float value;
    int32_t id;
};

bool is_likelier(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

template <typename T>
struct Row {
    const T* logits;
    int64_t vocab_size;

    int64_t num_chunks() const { return (vocab_size + kChunk - 1) / kChunk; }

    // Chunk `index` as float32, with -inf past the vocabulary. NaN becomes +inf: the row then has no token.
    void load(int64_t index, float* out) const {
        const int64_t start = index * kChunk, size = std::min(kChunk, vocab_size - start);
        const T* from = logits + start;
        for (int64_t i = 0; i < size; ++i) {
            const float value = to_float(from[i]);
            out[i] = value == value ? value : kHighest;
        }
        for (int64_t i = size; i < kChunk; ++i) out[i] = kLowest;
    }
};

float largest_of(const float* values, int64_t size) {
    float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = values[lane];
    for (int64_t i = kLanes; i < size; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) 
            lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
    return *std::max_element(lanes, lanes + kLanes);
}

// The likeliest token, of equal ones the first. `largest` becomes its logit.
template <typename T>
int64_t first_of_largest(const Row<T>& row, float* largest) {
    int64_t best = 0;
    *largest = kLowest;
    Team::share_out(row.num_chunks(), row.vocab_size > kWorthThreads, [&](Pieces& pieces) {
        float values[kChunk], own_largest = kLowest;
        int64_t own_best = 0;
        for (int64_t index, end; pieces.take(8, &index, &end);) {
            for (; index < end; ++index) {
                row.load(index, values);
                const float candidate = largest_of(values, kChunk);
                if (candidate > own_largest || (candidate == own_largest && index < own_best)) {
                    own_largest = candidate;
                    own_best = index;
                }
            }
        }
#pragma omp critical
        if (own_largest > *largest || (own_largest == *largest && own_best < best)) {
            *largest = own_largest;
            best = own_best;
        }
    });
    float values[kChunk];
    row.load(best, values);
    return best * kChunk + (std::find(values, values + kChunk, *largest) - values);
}

// 2^x for x <= 0, and 0 below 2^-126. The polynomial is the one of degree 6, 1 at 0, with the least relative error over
// [-0.5, 0.5]; with its coefficients in float32 that is 1.6e-8.
inline float exp2_of(float x) {
    const float clamped = std::max(x, -126.0f);
    const float whole = std::floor(clamped + 0.5f), rest = clamped - whole;
    float value = 1.5353358e-4f;
    value = value * rest + 1.3398879e-3f;
    value = value * rest + 9.6184378e-3f;
    value = value * rest + 5.5503324e-2f;
    value = value * rest + 2.4022648e-1f;
    value = value * rest + 6.9314718e-1f;
    value = value * rest + 1.0f;
    const int32_t bits = (int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < -126.0f ? 0.0f : value * scale;
}

// exp((logit - largest) / temperature) of tokens: the share that each has of the row's mass.
struct Mass {
    float largest, scale, scale_rest;  // log2(e) / temperature in two parts, the second of which the first lost

    Mass(float largest, float temperature) : largest(largest) {
        const double exact = 1.4426950408889634 / double(temperature);
        scale = float(exact);
        scale_rest = float(exact - double(scale));
    }
    float of(float logit) const {
        const float below = logit - largest;
        return below > kLowest ? exp2_of(below * scale + below * scale_rest) : 0.0f;
    }
};

// The sum of the masses of a chunk that reach a threshold.
inline float chunk_sum(const float* masses, float threshold = 0.0f) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < kChunk; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] += masses[i + lane] >= threshold ? masses[i + lane] : 0.0f;
    for (int64_t half = kLanes / 2; half; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// The masses of one chunk, and their sum.
template <typename T>
__attribute__((noinline)) float chunk_masses(const Row<T>& row, int64_t index, const Mass& mass, float* masses) {
    row.load(index, masses);
    for (int64_t i = 0; i < kChunk; ++i) masses[i] = mass.of(masses[i]);
    return chunk_sum(masses);
}

// The mass of the whole row.
template <typename T>
double total_mass(const Row<T>& row, const Mass& mass) {
    float masses[kChunk];
    double total = 0;
    for (int64_t index = 0; index < row.num_chunks(); ++index) total += chunk_masses(row, index, mass, masses);
    return total;
}

// Where a draw in [0, 1) falls in cumulative masses; the draw becomes how far inside, again in [0, 1). An entry without
// mass of its own is never hit, whatever the rounding.
int64_t invert(const double* cumulative, int64_t size, double* draw) {
    const double total = cumulative[size - 1], target = *draw * total;
    const int64_t last = std::lower_bound(cumulative, cumulative + size, total) - cumulative;
    const int64_t index = std::min<int64_t>(std::upper_bound(cumulative, cumulative + size, target) - cumulative, last);
    const double before = index ? cumulative[index - 1] : 0.0;
    const double inside = (target - before) / (cumulative[index] - before);
    *draw = inside > 0.0 ? std::min(inside, 1.0 - 0x1p-53) : 0.0;  // 0 too when nothing has any mass
    return index;
}

// What one thread needs besides its row.
struct Workspace {
    std::vector<double> cumulative;  // [chunks], or [candidates]
    std::vector<float> masses;       // [chunks * kChunk]
    std::vector<Candidate> candidates;
};

// A draw from tokens of masses [chunks * kChunk] whose chunks' cumulative masses are known: the chunk among these, then
// the token inside it. `masses_of` gives the masses of one chunk.
template <typename MassesOf>
int64_t draw_in_two_levels(const std::vector<double>& cumulative, double draw, MassesOf masses_of) {
    const int64_t chunk = invert(cumulative.data(), cumulative.size(), &draw);
    const float* masses = masses_of(chunk);
    double inside[kChunk], total = 0;
    for (int64_t i = 0; i < kChunk; ++i) inside[i] = total += masses[i];
    return chunk * kChunk + invert(inside, kChunk, &draw);
}

// A draw from all tokens.
template <typename T>
int64_t draw_whole(const Row<T>& row, const Mass& mass, double draw, Workspace& work) {
    float masses[kChunk];
    double total = 0;
    work.cumulative.resize(row.num_chunks());
    for (int64_t index = 0; index < row.num_chunks(); ++index)
        work.cumulative[index] = total += chunk_masses(row, index, mass, masses);
    return draw_in_two_levels(work.cumulative, draw, [&](int64_t index) {
        chunk_masses(row, index, mass, masses);
        return masses;
    });
}

// The `width` likeliest tokens, the likeliest first, of equal ones the first first.
template <typename T>
void select(const Row<T>& row, int64_t width, std::vector<Candidate>& heap) {
    heap.clear();
    float values[kChunk];
    for (int64_t index = 0; index < row.num_chunks(); ++index) {
        row.load(index, values);
        const int64_t start = index * kChunk, size = std::min(kChunk, row.vocab_size - start);
        for (int64_t group = 0; group < size; group += kGroup) {
            const bool is_full = int64_t(heap.size()) == width;
            if (is_full && !(largest_of(values + group, kGroup) > heap.front().value)) continue;
            for (int64_t i = group; i < std::min(group + kGroup, size); ++i) {
                const Candidate candidate{values[i], int32_t(start + i)};
                if (int64_t(heap.size()) == width) {
                    if (!is_likelier(candidate, heap.front())) continue;
                    std::pop_heap(heap.begin(), heap.end(), is_likelier);  // the front is the least likely
                    heap.back() = candidate;
                } else {
                    heap.push_back(candidate);
                }
                std::push_heap(heap.begin(), heap.end(), is_likelier);
            }
        }
    }
    std::sort_heap(heap.begin(), heap.end(), is_likelier);
}

// A draw among the top_k likeliest tokens, of which top-p and min-p keep the first.
template <typename T>
int64_t draw_selected(const Row<T>& row, const Slot& slot, const Mass& mass, double draw, Workspace& work) {
    select(row, slot.top_k, work.candidates);
    work.cumulative.resize(slot.top_k);
    double total = 0;
    for (int64_t i = 0; i < slot.top_k; ++i) work.cumulative[i] = total += mass.of(work.candidates[i].value);
    int64_t num_kept = 1;
    while (num_kept < slot.top_k && (slot.top_p >= 1 || work.cumulative[num_kept - 1] < slot.top_p * total) &&
           mass.of(work.candidates[num_kept].value) >= slot.min_p)
        ++num_kept;
    return work.candidates[invert(work.cumulative.data(), num_kept, &draw)].id;
}

// The largest threshold for which `reaches` is true; it is true for 0 and for all below one for which it is true. Masses
// are never negative, so their order is that of their bits, and never above 1.
template <typename Reaches>
float largest_reaching(Reaches reaches) {
    uint32_t low = 0, high = 0x3f800001;  // the bits of 0 and of what follows 1
    const auto threshold_of = [](uint32_t bits) {
        float threshold;
        std::memcpy(&threshold, &bits, sizeof threshold);
        return threshold;
    };
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        (reaches(threshold_of(middle)) ? low : high) = middle;
    }
    return threshold_of(low);
}

double mass_reaching(const std::vector<float>& masses, float threshold) {
    double total = 0;
    for (size_t start = 0; start < masses.size(); start += kChunk) total += chunk_sum(&masses[start], threshold);
    return total;
}

int64_t count_reaching(const std::vector<float>& masses, float threshold) {
    int64_t count = 0;
    for (const float mass : masses) count += mass >= threshold;
    return count;
}

// Sets to 0 what is below the threshold, and of what is equal to it all but the first `num_equal`.
void keep(std::vector<float>& masses, float threshold, int64_t num_equal) {
    int64_t num_surplus = -num_equal;
    for (float& mass : masses) {
        num_surplus += mass == threshold;
        mass = mass >= threshold ? mass : 0.0f;
    }
    for (size_t i = masses.size(); num_surplus > 0 && i-- > 0;) {
        if (masses[i] != threshold) continue;
        masses[i] = 0.0f;
        --num_surplus;
    }
}

// A draw among the tokens that the slot's limits keep, however many, without sorting them.
template <typename T>
int64_t draw_kept(const Row<T>& row, const Slot& slot, const Mass& mass, double draw, Workspace& work) {
    std::vector<float>& masses = work.masses;
    masses.resize(row.num_chunks() * kChunk);
    for (int64_t index = 0; index < row.num_chunks(); ++index) chunk_masses(row, index, mass, &masses[index * kChunk]);
    if (slot.top_k) {
        const float least = largest_reaching([&](float t) { return count_reaching(masses, t) >= slot.top_k; });
        keep(masses, least, slot.top_k - count_reaching(masses, std::nextafter(least, 2.0f)));
    }
    if (slot.top_p < 1) {
        const double share = slot.top_p * mass_reaching(masses, 0.0f);
        const float least = largest_reaching([&](float t) { return mass_reaching(masses, t) >= share; });
        const double missing = share - mass_reaching(masses, std::nextafter(least, 2.0f));
        keep(masses, least, least > 0.0f ? int64_t(std::ceil(missing / least)) : 0);
    }
    keep(masses, slot.min_p, row.vocab_size);
    double total = 0;
    work.cumulative.resize(row.num_chunks());
    for (int64_t index = 0; index < row.num_chunks(); ++index)
        work.cumulative[index] = total += chunk_sum(&masses[index * kChunk]);
    return draw_in_two_levels(work.cumulative, draw, [&](int64_t index) { return &masses[index * kChunk]; });
}

uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

// The number in [0, 1) of a seed and a position: `uniforms` in sampling/torch.py.
double uniform(int64_t seed, int64_t position) {
    const uint64_t state = mix64(uint64_t(seed)) + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15;
    return double(mix64(state) >> 11) * 0x1p-53;
}

template <typename T>
int64_t sample(const Row<T>& row, const Slot& slot, int64_t position, Workspace& work) {
    float largest;
    const int64_t likeliest = first_of_largest(row, &largest);
    if (!(std::fabs(largest) < kHighest)) return kNoToken;  // a NaN or +inf somewhere, or nothing but -inf
    if (slot.need == kGreedy) return likeliest;
    const Mass mass(largest, slot.temperature);
    const double draw = uniform(slot.seed, position);
    if (slot.need == kWhole) return draw_whole(row, mass, draw, work);
    const bool is_selected = slot.top_k && slot.top_k <= kMaxSelected;
    return is_selected ? draw_selected(row, slot, mass, draw, work) : draw_kept(row, slot, mass, draw, work);
}

// Calls take(row, workspace) for each row. The threads share out rows, or the vocabulary of one that is alone.
template <typename Take>
void take_rows(int64_t num_rows, const Take& take) {
    Team::share_out(num_rows, num_rows > 1, [&](Pieces& pieces) {
        Workspace work;
        for (int64_t row; pieces.take(&row);) take(row, work);
    });
}

template <typename T>
void sample_rows(const T* logits, int64_t stride, int64_t num_rows, int64_t vocab_size, const Slot* table,
                 const int32_t* slots, const int32_t* positions, int64_t* ids) {
    take_rows(num_rows, [&](int64_t i, Workspace& work) {
        ids[i] = sample(Row<T>{logits + i * stride, vocab_size}, table[slots[i]], positions[i], work);
    });
}

template <typename T>
void score_rows(const T* logits, int64_t stride, int64_t num_rows, int64_t vocab_size, const int64_t* rows,
                const int64_t* tokens, int64_t width, double* logprobs, int64_t* ranks, int64_t* top_ids,
                double* top_logprobs) {
    take_rows(num_rows, [&](int64_t i, Workspace& work) {
        const Row<T> row{logits + rows[i] * stride, vocab_size};
        float largest;
        first_of_largest(row, &largest);
        const double norm = double(largest) + std::log(total_mass(row, Mass(largest, 1.0f)));
        const float chosen = to_float(row.logits[tokens[i]]);
        int64_t rank = 1;
        for (int64_t id = 0; id < vocab_size; ++id) rank += to_float(row.logits[id]) > chosen;
        logprobs[i] = double(chosen) - norm;
        ranks[i] = rank;
        if (width) select(row, width, work.candidates);
        for (int64_t k = 0; k < width; ++k) {
            top_ids[i * width + k] = work.candidates[k].id;
            top_logprobs[i * width + k] = double(work.candidates[k].value) - norm;
        }
    });
}

}  // namespace

// The next token of each row. logits [num_rows, vocab_size] with `stride` numbers between rows, float32 or bfloat16;
// table [any] of Slot; slots, positions int32 [num_rows]; ids int64 [num_rows], -1 for a row with a NaN or +inf, or with
// nothing above -inf.
EXPORT void sampling_tokens(const void* logits, int64_t is_bfloat16, int64_t stride, int64_t num_rows,
                            int64_t vocab_size, const void* table, const int32_t* slots, const int32_t* positions,
                            int64_t* ids) {
    const Slot* slot_table = static_cast<const Slot*>(table);
    if (is_bfloat16)
        sample_rows(static_cast<const bfloat16*>(logits), stride, num_rows, vocab_size, slot_table, slots, positions,
                    ids);
    else
        sample_rows(static_cast<const float*>(logits), stride, num_rows, vocab_size, slot_table, slots, positions, ids);
}

// Log-softmax of the raw logits at the sampled tokens, their ranks, and the `width` likeliest tokens with theirs.
// rows, tokens int64 [num_rows] say which rows of `logits` and which tokens; logprobs float64 [num_rows],
// ranks int64 [num_rows], top_ids int64 and top_logprobs float64 [num_rows, width].
EXPORT void sampling_logprobs(const void* logits, int64_t is_bfloat16, int64_t stride, int64_t num_rows,
                              int64_t vocab_size, const int64_t* rows, const int64_t* tokens, int64_t width,
                              double* logprobs, int64_t* ranks, int64_t* top_ids, double* top_logprobs) {
    if (is_bfloat16)
        score_rows(static_cast<const bfloat16*>(logits), stride, num_rows, vocab_size, rows, tokens, width, logprobs,
                   ranks, top_ids, top_logprobs);
    else
        score_rows(static_cast<const float*>(logits), stride, num_rows, vocab_size, rows, tokens, width, logprobs,
                   ranks, top_ids, top_logprobs);
}
