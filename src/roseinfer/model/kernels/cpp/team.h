// Threads that take a kernel's work piece by piece, so that those with a core do what one without a core would have done.
//
// Where other processes want the cores too, the system takes one from a thread for milliseconds. A region of OpenMP waits
// for each of its threads at its end, with work or without. So a step is one region, and a kernel in it waits only for
// threads that have taken a piece and not finished it. And so that those have their cores until they have finished, a thread
// offers its core to others every millisecond, when it has no piece.

#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

// Units that no thread has taken: the first in the upper half, and the end.
struct alignas(64) Range {
    std::atomic<uint64_t> bounds{0};

    void set(int64_t first, int64_t end) { bounds.store(uint64_t(first) << 32 | uint64_t(end)); }
};

// Where a thread takes its pieces: from its own range in order, since memory is read faster in order, and then from the
// ends of the others'.
class Pieces {
public:
    Pieces(Range* ranges, int num_threads, int thread) : ranges_(ranges), num_threads_(num_threads), thread_(thread) {}

    // Takes a unit. False when all are taken.
    bool take(int64_t* unit) {
        int64_t end;
        return take(1, unit, &end);
    }

    // Takes units first..end-1, at most `at_once`. False when all are taken.
    bool take(int64_t at_once, int64_t* first, int64_t* end) {
        for (int i = 0; i < num_threads_; ++i) {
            std::atomic<uint64_t>& range = ranges_[(thread_ + i) % num_threads_].bounds;
            uint64_t bounds = range.load(), rest;
            do {
                const int64_t low = bounds >> 32, high = uint32_t(bounds), count = std::min(at_once, high - low);
                if (count == 0) break;
                *first = i == 0 ? low : high - count;
                *end = *first + count;
                rest = i == 0 ? uint64_t(*end) << 32 | uint64_t(high) : uint64_t(low) << 32 | uint64_t(*first);
                if (range.compare_exchange_weak(bounds, rest)) return true;
            } while (true);
        }
        return false;
    }

    // The first unit of the thread's own range.
    int64_t first() const { return ranges_[thread_].bounds.load() >> 32; }

private:
    Range* ranges_;
    int num_threads_, thread_;
};

// The threads of a region: one calls kernels, and the others help it with each.
class Team {
public:
    // Calls call(0), .., call(num_calls - 1), one after the other, in a region unless this thread is in one. The first
    // thread begins, and after a millisecond whichever has a core goes on.
    template <class Call>
    static void open(int64_t num_calls, const Call& call) {
        if (current_ || !has_threads()) {
            for (int64_t i = 0; i < num_calls; ++i) call(i);
            return;
        }
        Team team(omp_get_max_threads());
#pragma omp parallel
        team.take_part(num_calls, call);
    }

    // Calls work(pieces) on each thread that comes, or on this one alone where the work is too small to share. Returns when
    // units 0..num_units-1 are done.
    template <class Work>
    static void share_out(int64_t num_units, bool is_worth_threads, const Work& work) {
        if (is_worth_threads && current_) return current_->run(num_units, work);
        if (is_worth_threads && has_threads()) return open(1, [&](int64_t) { current_->run(num_units, work); });
        Range all;
        all.set(0, num_units);
        Pieces pieces(&all, 1, 0);
        work(pieces);
    }

private:
    using Clock = std::chrono::steady_clock;

    static constexpr int64_t kNone = 0, kNoCaller = -1, kOver = -2;  // in place of a job's number
    static constexpr int kPatience = 20'000;                         // rounds of waiting, a millisecond at most
    static constexpr auto kTurn = std::chrono::milliseconds(1);

    explicit Team(int num_threads) : ranges_(num_threads) {}

    static bool has_threads() { return omp_get_max_threads() > 1 && !omp_in_parallel(); }

    template <class Work>
    void run(int64_t num_units, const Work& work) {
        const int num_threads = int(ranges_.size());
        call_ = [](const void* work, Pieces& pieces) { (*static_cast<const Work*>(work))(pieces); };
        work_ = &work;
        for (int64_t i = 0; i < num_threads; ++i) {
            ranges_[i].set(num_units * i / num_threads, num_units * (i + 1) / num_threads);
        }
        job_.store(++num_jobs_);
        current_ = nullptr;  // what the work calls is not shared out again
        Pieces pieces(ranges_.data(), num_threads, omp_get_thread_num());
        work(pieces);
        current_ = this;
        job_.store(kNone);
        // A thread that comes now finds no job, whether it has counted itself in or not.
        for (int rounds = 0; num_inside_.load();) wait(&rounds);
    }

    template <class Call>
    void take_part(int64_t num_calls, const Call& call) {
        const int thread = omp_get_thread_num();
        if (thread == 0) make_calls(num_calls, call);
        int64_t done = kNone;
        auto turn_ends = Clock::now() + kTurn;
        for (int rounds = 0;;) {
            int64_t job = job_.load();
            if (job == kOver) return;
            if (job == kNoCaller && job_.compare_exchange_strong(job, kNone)) {
                make_calls(num_calls, call);
            } else if (job > 0 && job != done) {
                num_inside_.fetch_add(1);
                if (job_.load() == job) {  // or else it is over, and what belongs to it may be gone
                    Pieces pieces(ranges_.data(), int(ranges_.size()), thread);
                    call_(work_, pieces);
                    done = job;
                }
                num_inside_.fetch_sub(1);
                if (Clock::now() < turn_ends) continue;
                sched_yield();
            } else {
                wait(&rounds);
                continue;
            }
            turn_ends = Clock::now() + kTurn;
            rounds = 0;
        }
    }

    // Calls of one turn.
    template <class Call>
    void make_calls(int64_t num_calls, const Call& call) {
        const auto turn_ends = Clock::now() + kTurn;
        current_ = this;
        while (next_call_ < num_calls) {
            call(next_call_++);
            if (Clock::now() >= turn_ends) break;
        }
        current_ = nullptr;
        const bool is_over = next_call_ == num_calls;
        job_.store(is_over ? kOver : kNoCaller);
        if (!is_over) sched_yield();
    }

    // A round of waiting. Where threads are more than cores, the one waited for may need this core.
    static void wait(int* rounds) {
        if (++*rounds % kPatience == 0) sched_yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    static inline thread_local Team* current_ = nullptr;  // of the thread that calls, while it may share out work

    std::vector<Range> ranges_;  // of each thread
    void (*call_)(const void*, Pieces&) = nullptr;
    const void* work_ = nullptr;
    int64_t num_jobs_ = 0, next_call_ = 0;
    alignas(64) std::atomic<int64_t> job_{kNone};
    alignas(64) std::atomic<int> num_inside_{0};  // of the others, with work or on their way to it
};

// Calls body(unit) for each unit, on the threads that come.
template <class Body>
void for_each(int64_t num_units, bool is_worth_threads, const Body& body) {
    const int64_t at_once = std::max<int64_t>(1, num_units / (8 * omp_get_max_threads()));
    Team::share_out(num_units, is_worth_threads, [&](Pieces& pieces) {
        for (int64_t unit, end; pieces.take(at_once, &unit, &end);) {
            for (; unit < end; ++unit) body(unit);
        }
    });
}
