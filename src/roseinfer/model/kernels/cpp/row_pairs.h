// A block of sums in registers, for an instruction that multiplies two rows of eight bytes with two others.
//
// A register holds the sums of two rows, and of each two outputs side by side. Weights lie in words of four inputs,
// those of LANES outputs side by side: two words of an output become neighbours on the way.

#pragma once

#include "dot.h"

#ifdef HAS_EIGHTS

template <int num_rows, int num_vectors>
class RowPairs {
public:
    // Sums of all rows and one register of outputs, from those of each row.
    template <typename OfRow>
    inline __attribute__((always_inline)) void start(int vector, const OfRow& of_row) {
        for (int pair = 0; pair < kPairs; ++pair) {
            const Integers first = of_row(2 * pair), second = of_row(partner(pair));
            sums_[pair][vector][0] = lower_halves(first, second);
            sums_[pair][vector][1] = upper_halves(first, second);
        }
    }

    // Adds the products of eight bytes of each row with two words of each output.
    inline __attribute__((always_inline)) void add(int vector, const float* x, int64_t row_step, Integers words,
                                                   Integers next_words) {
        const Integers lower = lower_words(words, next_words), upper = upper_words(words, next_words);
        for (int pair = 0; pair < kPairs; ++pair) {
            const Integers rows = join_eights(x + 2 * pair * row_step, x + partner(pair) * row_step);
            sums_[pair][vector][0] = add_eights(sums_[pair][vector][0], rows, lower);
            sums_[pair][vector][1] = add_eights(sums_[pair][vector][1], rows, upper);
        }
    }

    inline __attribute__((always_inline)) Integers row(int vector, int row) const {
        const Integers* both = sums_[row / 2][vector];
        return row % 2 ? upper_halves(both[0], both[1]) : lower_halves(both[0], both[1]);
    }

private:
    static constexpr int kPairs = (num_rows + 1) / 2;

    // The second row of a pair; of an odd number of rows the last is its own.
    static constexpr int partner(int pair) { return 2 * pair + 1 < num_rows ? 2 * pair + 1 : 2 * pair; }

    Integers sums_[kPairs][num_vectors][2];
};

#endif
