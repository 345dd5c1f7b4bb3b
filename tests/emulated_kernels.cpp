// Calls functions of a shared object for another process, whose memory they see as their own: tests/emulated_kernels.py.
//
//     emulated_kernels OBJECT
//
// A request on standard input is followed by any number of questions for pages and by pages that have changed, and at
// last by the answer. The other process's addresses have another bit here, so that none of them is taken. A page is
// asked for when it is touched first, and lies here until the call ends.

#include <dlfcn.h>
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr uint64_t kOtherBit = uint64_t(1) << 45, kPageSize = 4096;
constexpr uint64_t kMaxBytes = 64 << 20, kMaxAtOnce = 8 * kPageSize;
constexpr int kMaxRuns = 1 << 14, kMaxIntegers = 16, kMaxFloats = 2;

enum Answer : uint64_t { kDone, kWantsPages, kHasChanged };

struct Request {
    char name[64];
    int64_t integers[kMaxIntegers];  // and addresses, in the order of the arguments of either kind
    float floats[kMaxFloats];
    int32_t num_threads;
    int32_t is_call;  // else a question whether the function is there
};

struct Message {
    uint64_t answer, address, size;
};

// Pages that came together.
struct Run {
    uint8_t* here;
    uint8_t* before;  // what they held then
    uint64_t size;
};

Run runs[kMaxRuns];
int num_runs;
alignas(kPageSize) uint8_t held_before[kMaxBytes];
uint64_t num_held;
std::atomic_flag is_taken = ATOMIC_FLAG_INIT;

void transfer(bool is_out, void* data, size_t size) {
    for (uint8_t* at = static_cast<uint8_t*>(data); size;) {
        const ssize_t done = is_out ? write(1, at, size) : read(0, at, size);
        if (done <= 0) _exit(is_out ? 1 : 0);  // the other process has ended
        at += done;
        size -= done;
    }
}

void say(uint64_t answer, const void* address = nullptr, uint64_t size = 0) {
    Message message = {answer, uint64_t(address) ^ kOtherBit, size};
    transfer(true, &message, sizeof message);
}

bool is_here(const uint8_t* address) {
    for (int i = num_runs; i-- > 0;)
        if (address >= runs[i].here && address < runs[i].here + runs[i].size) return true;
    return false;
}

[[noreturn]] void fail(const char* reason) {
    std::fprintf(stderr, "emulated kernels: %s\n", reason);
    _exit(1);
}

// Brings the page that has the address, and some that follow. They get their place when they are whole: other threads do
// not wait for them.
void bring(void* address) {
    uint8_t* here = reinterpret_cast<uint8_t*>(uint64_t(address) & ~(kPageSize - 1));
    if (is_here(here)) return;  // another thread was first
    uint64_t num_wanted = kPageSize, size = 0;
    while (num_wanted < kMaxAtOnce && !is_here(here + num_wanted)) num_wanted += kPageSize;
    if (num_runs == kMaxRuns || num_held + num_wanted > kMaxBytes) fail("too much memory is touched in one call");
    say(kWantsPages, here, num_wanted);
    transfer(false, &size, sizeof size);
    if (!size) fail("memory is touched that is not there");
    uint8_t* before = held_before + num_held;
    transfer(false, before, size);
    void* whole = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) fail("there is no memory");
    std::memcpy(whole, before, size);
    if (mremap(whole, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, here) != here) fail("a page does not get its place");
    runs[num_runs++] = {here, before, size};
    num_held += size;
}

void on_fault(int, siginfo_t* info, void*) {
    while (is_taken.test_and_set(std::memory_order_acquire)) sched_yield();
    bring(info->si_addr);
    is_taken.clear(std::memory_order_release);
}

// Words that have changed: nobody else has part of one.
void return_changes(const uint64_t* here, const uint64_t* before) {
    constexpr uint64_t kWords = kPageSize / sizeof *here;
    if (!std::memcmp(here, before, kPageSize)) return;
    for (uint64_t first = 0, last; first < kWords; first = last) {
        last = first + 1;
        if (here[first] == before[first]) continue;
        while (last < kWords && here[last] != before[last]) ++last;
        say(kHasChanged, here + first, (last - first) * sizeof *here);
        transfer(true, const_cast<uint64_t*>(here) + first, (last - first) * sizeof *here);
    }
}

void return_pages() {
    for (int i = 0; i < num_runs; ++i) {
        const Run& run = runs[i];
        for (uint64_t page = 0; page < run.size; page += kPageSize)
            return_changes(reinterpret_cast<uint64_t*>(run.here + page), reinterpret_cast<uint64_t*>(run.before + page));
        munmap(run.here, run.size);
    }
    num_runs = 0;
    num_held = 0;
}

// Integers and floats are in registers of their own, and integers past the last register in words of the stack.
void call(void* function, const Request& request) {
    using I = int64_t;
    using Function = void (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, float, float);
    const I* i = request.integers;
    omp_set_num_threads(request.num_threads);
    reinterpret_cast<Function>(function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12],
                                         i[13], i[14], i[15], request.floats[0], request.floats[1]);
    return_pages();
}

}  // namespace

int main(int, char** arguments) {
    void* object = dlopen(arguments[1], RTLD_NOW);
    if (!object) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    for (Request request;;) {
        transfer(false, &request, sizeof request);
        void* function = dlsym(object, request.name);
        if (function && request.is_call) call(function, request);
        say(kDone, nullptr, function != nullptr);
    }
}
