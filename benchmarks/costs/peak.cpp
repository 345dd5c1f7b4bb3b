// Multiplies registers that stay registers: the most that a level's instructions can do, for benchmarks/costs.

#include <utility>

#include "common.h"
#include "dot.h"
#ifdef __AMX_INT8__
#include "tiles.h"
#endif

constexpr std::make_index_sequence<12> kChains;  // more than an instruction takes cycles, so that none waits

template <typename Sum, typename Step, size_t... I>
static inline __attribute__((always_inline)) void repeat(int64_t count, float* out, const Step& step,
                                                         std::index_sequence<I...>) {
    Sum sums[] = {(Sum)splat(float(I))...};
    Sum x = (Sum)splat(0.5f);
    const auto advance = [&](Sum sum) __attribute__((always_inline)) {
        asm("" : "+v"(x));  // so that no product is computed once for all
        sum = step(sum, x);
        asm("" : "+v"(sum));
        return sum;
    };
    for (int64_t turn = 0; turn < count; ++turn) (static_cast<void>(sums[I] = advance(sums[I])), ...);
    store(out, (zeros() + ... + (Floats)sums[I]));
}

// Each does count * 12 * LANES * (1 for float32, 2 for bfloat16, else 4) multiply-adds.
EXPORT void peak_float32(int64_t count, float* out) {
    repeat<Floats>(count, out, [](Floats sum, Floats x) { return multiply_add(x, x, sum); }, kChains);
}

#ifdef __AMX_INT8__

// What linears multiply with at this level: four sums in tiles, of which a product is that of 4 registers for each byte of
// depth.
template <typename Step>
static void repeat_tiles(int64_t count, float* out, const Step& step, int64_t depth = kLineBytes) {
    alignas(64) uint8_t tile[kTileBytes] = {};
    const TileScope scope(kTileRows, depth);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, tile, kLineBytes);
    _tile_loadd(5, tile, kLineBytes);
    _tile_loadd(6, tile, kLineBytes);
    _tile_loadd(7, tile, kLineBytes);
    for (int64_t turn = 0; turn < count * 12 / (4 * 4 * depth); ++turn) step();
    _tile_stored(0, tile, kLineBytes);
    std::memcpy(out, tile, kLineBytes);
}

EXPORT void peak_int8(int64_t count, float* out) {
    repeat_tiles(count, out, [] {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    });
}

EXPORT void peak_bfloat16(int64_t count, float* out) {
    repeat_tiles(count, out, [] {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    });
}

// Of many rows: the sums of 32 inputs leave their tile.
EXPORT void peak_int4(int64_t count, float* out) {
    alignas(64) uint8_t sums[4 * kTileBytes];
    repeat_tiles(count, out, [&] {
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums, kLineBytes);
        _tile_dpbssd(1, 4, 7);
        _tile_stored(1, sums + kTileBytes, kLineBytes);
        _tile_dpbssd(2, 5, 6);
        _tile_stored(2, sums + 2 * kTileBytes, kLineBytes);
        _tile_dpbssd(3, 5, 7);
        _tile_stored(3, sums + 3 * kTileBytes, kLineBytes);
    }, 32);
}

#else

EXPORT void peak_int8(int64_t count, float* out) {
    repeat<Integers>(count, out, [](Integers sum, Integers x) {
#ifdef HAS_FOURS
        return add_fours(sum, x, x);
#else
        return add_pairs(add_pairs(sum, x, x), x, x);
#endif
    }, kChains);
}

#if defined(__AVX512BF16__)
EXPORT void peak_bfloat16(int64_t count, float* out) {
    repeat<Floats>(count, out, [](Floats sum, Floats x) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x);
    }, kChains);
}
#endif

EXPORT void peak_int4(int64_t count, float* out) {
    repeat<Integers>(count, out, [](Integers sum, Integers x) { return add_nibbles(sum, x, x); }, kChains);
}

#endif
